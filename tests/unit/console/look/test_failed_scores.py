"""Which reward a failed score names, in the words of its error."""

from typing import Any

import pytest

from tests.support.trajectories import make_config
from tidemill.common.process.failures import Failure
from tidemill.common.wire.messages import Score, ScoreStatus
from tidemill.services.console.look.failed_scores import MAX_LINES, failing_lines, failure_rows, failures_in

SUM = {"rewards": {"exact": {"function": "my.py:exact"}, "style": {"function": "my.py:style"}}}
ONE = {"function": "my.py:compute"}


def failed(error: str, **fields: Any) -> Score:
    values = {"ticket": 1, "index": 0, "status": ScoreStatus.FAILED, "error": error, "latency_s": 0.1}
    return Score(**{**values, **fields})


@pytest.mark.parametrize(("reward", "score", "expected"), [
    (ONE, failed("KeyError: 'a' (my.py, line 4)"), [("reward compute", "KeyError: 'a' (my.py, line 4)")]),
    (SUM, failed("style: HTTP 503; busy"), [("reward style", "HTTP 503; busy")]),
    (SUM, failed("exact: no; style: slow"), [("reward exact", "no"), ("reward style", "slow")]),
    (SUM, failed("no reward applies"), [("weighted sum", "no reward applies")]),
    (ONE, failed("its environment failed", latency_s=0.0), [("sample", "its environment failed")]),
    (
        SUM,
        failed("", status=ScoreStatus.OK, value=0.5, detail={"failures": {"style": "slow"}}),
        [("reward style", "slow")],
    ),
    (ONE, failed("", status=ScoreStatus.OK, value=0.5, detail={"failures": {"a": "a user's own"}}), []),
])  # fmt: skip
def test_a_failed_score_names_its_rewards_and_their_reasons(reward, score, expected) -> None:
    assert failures_in(score, make_config(reward=reward).reward) == expected


def test_a_summary_of_any_release_has_lines_for_people() -> None:
    failures = [Failure("reward a", "error", "KeyError", count=12 - n, cause=str(n)) for n in range(7)]
    lines = list(failing_lines({"failed_rewards": failure_rows(failures)}))
    assert lines[0].value == "reward a failed 12 times (error): KeyError"
    assert len(lines) == MAX_LINES + 1
    assert "2 more" in lines[-1].value
    assert not list(failing_lines({}))

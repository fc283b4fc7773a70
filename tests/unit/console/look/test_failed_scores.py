"""Which reward a failed score names, in the words of its error."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.support.trajectories import make_config
from tidemill.common.process.failures import POST_PROCESSING, Failure
from tidemill.common.wire.messages import Score, ScoreStatus
from tidemill.services.console.look.failed_scores import (
    MAX_LINES,
    FailedScores,
    failing_lines,
    failure_rows,
    failures_in,
)

SUM = {"rewards": {"exact": {"function": "my.py:exact"}, "style": {"function": "my.py:style"}}}
ONE = {"function": "my.py:compute"}


def failed(error: str, **fields: Any) -> Score:
    values = {"ticket": 1, "index": 0, "status": ScoreStatus.FAILED, "error": error, "latency_s": 0.1}
    return Score(**{**values, **fields})


@pytest.mark.parametrize(("reward", "score", "expected"), [
    (ONE, failed("KeyError: 'a' (my.py, line 4)"), [("reward compute", "KeyError: 'a' (my.py, line 4)")]),
    (SUM, failed("style: HTTP 503; busy"), [("reward style", "HTTP 503; busy")]),
    (SUM, failed("exact: no; style: slow"), [("reward exact", "no"), ("reward style", "slow")]),
    (SUM, failed("no value; style: slow"), [("weighted sum", "no value; style: slow")]),
    (SUM, failed("no reward applies"), [("weighted sum", "no reward applies")]),
    (ONE, failed(f"{POST_PROCESSING}: KeyError: 1"), [(POST_PROCESSING, "KeyError: 1")]),
    (SUM, failed(f"{POST_PROCESSING}: slow"), [(POST_PROCESSING, "slow")]),
    (SUM, failed(f"exact: {POST_PROCESSING}: no"), [("reward exact", f"{POST_PROCESSING}: no")]),
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


class Scores:
    """A history of these scores, the newest first; `then` comes behind them."""

    def __init__(self, *newest_first: Score, then: Exception | None = None) -> None:
        self._newest_first = newest_first
        self._then = then

    async def messages(self, *_: Any, newest_first: bool) -> AsyncIterator[Score]:
        assert newest_first
        for score in self._newest_first:
            yield score
        if self._then is not None:
            raise self._then


SCORES = [
    failed("KeyError: 'new' (my.py, line 4)", ticket=9),
    failed("", ticket=8, status=ScoreStatus.OK, value=1.0),
    failed("KeyError: 'old' (my.py, line 4)", ticket=7),
    failed("no answer", ticket=6, status=ScoreStatus.TIMEOUT),
]


async def counted(most: int, *scores: Score) -> FailedScores:
    failed_scores = FailedScores(make_config(reward=ONE).reward)
    await failed_scores.read(Scores(*scores), most)  # type: ignore[arg-type]
    return failed_scores


async def test_the_newest_scores_are_counted_with_the_newest_reason_of_each_cause() -> None:
    everything = await counted(4, *SCORES)
    assert everything.is_complete and everything.num_read == 4
    assert [(each.kind, each.count) for each in everything.failures] == [("error", 2), ("timeout", 1)]
    assert everything.failures[0].reason == "KeyError: 'new' (my.py, line 4)"
    assert len(everything.lines) == 2
    newest = await counted(2, *SCORES)
    assert (newest.is_complete, newest.num_read) == (False, 2)
    assert [each.count for each in newest.failures] == [1]
    assert len(newest.lines) == 2 and "newest 2 scores" in newest.lines[-1]
    assert not (await counted(1, *SCORES[1:])).lines, "nothing failed in what was read"


async def test_a_sample_that_is_there_twice_counts_once_and_by_its_first_score() -> None:
    (failure,) = (await counted(9, failed("second", ticket=7), failed("first", ticket=7))).failures
    assert (failure.count, failure.reason) == (1, "first")


async def test_what_was_read_counts_where_the_history_ends_early() -> None:
    failed_scores = FailedScores(make_config(reward=ONE).reward)
    with pytest.raises(TimeoutError):
        await failed_scores.read(Scores(*SCORES, then=TimeoutError()))  # type: ignore[arg-type]
    assert not failed_scores.is_complete and len(failed_scores.lines) == 3


def test_a_summary_of_any_release_has_lines_for_people() -> None:
    failures = [Failure("reward a", "error", "KeyError", count=12 - n, cause=str(n)) for n in range(7)]
    lines = list(failing_lines({"failed_rewards": failure_rows(failures)}))
    assert lines[0].value == "reward a failed 12 times (error): KeyError"
    assert len(lines) == MAX_LINES + 1
    assert "2 more" in lines[-1].value
    assert not list(failing_lines({}))
    rows = failure_rows(failures[:1])
    assert len(list(failing_lines({"failed_rewards": rows, "failed_rewards_among": None}))) == 1
    (_, among) = failing_lines({"failed_rewards": rows, "failed_rewards_among": 100_000})
    assert "100,000" in among.value
    assert not list(failing_lines({"failed_rewards": [], "failed_rewards_among": 100_000}))

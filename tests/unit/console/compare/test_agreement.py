"""How two rewards agree: against values computed by hand, and against the definition of the coefficients."""

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from tests.support.sessions import make_segment, make_session
from tests.support.training import make_score
from tests.support.trajectories import make_trajectory
from tidemill.common.wire.choices import Rows
from tidemill.common.wire.messages import Choices, Score, ScoreStatus, TrajectoryKey
from tidemill.services.console.compare.agreement import (
    compare,
    correlation,
    rank_correlation,
    ranks,
    rescore_tree,
)
from tidemill.services.console.look.trace import teacher_gaps
from tidemill.services.console.run.folder import RunFolder


def scores(values: dict[TrajectoryKey, float | None]) -> dict[TrajectoryKey, Score]:
    scores_by_key = {}
    for (ticket, index), value in values.items():
        status = ScoreStatus.OK if value is not None else ScoreStatus.FAILED
        error = "" if value is not None else "no answer\nat all"
        scores_by_key[ticket, index] = Score(
            ticket=ticket, index=index, status=status, value=value, error=error
        )
    return scores_by_key


def group(ticket: int, *values: float | None) -> dict[TrajectoryKey, float | None]:
    return {(ticket, index): value for index, value in enumerate(values)}


def test_rank_correlation_by_the_classic_formula() -> None:
    assert ranks(np.array([5.0, 1.0, 5.0, 2.0, 5.0])).tolist() == [4.0, 1.0, 4.0, 2.0, 4.0], "ties share"
    first = np.array([1.0, 2.0, 3.0, 4.0, 5.0])
    second = np.array([10.0, 30.0, 20.0, 90.0, 40.0])
    # Differences of ranks: 0, 1, 1, 1, 1; 1 - 6 * 4 / (5 * 24) = 0.8
    assert rank_correlation(first, second) == pytest.approx(0.8)
    assert correlation(first, -first) == pytest.approx(-1.0)
    assert correlation(np.zeros(4), np.arange(4.0)) is None, "a side that does not vary"
    assert rank_correlation(np.arange(4.0), np.ones(4)) is None


def test_a_group_flips_when_no_completion_is_the_best_on_both_sides() -> None:
    before = scores(group(1, 0.0, 1.0) | group(2, 0.0, 1.0) | group(3, 0.0, 1.0))
    now = scores(group(1, 0.0, 5.0) | group(2, 2.0, 1.0) | group(3, 4.0, 4.0))
    agreement = compare(before, now)
    assert agreement.groups_with_another_best == [2]
    assert agreement.sign_flips == 2
    assert agreement.groups == 3
    assert agreement.groups_without_variance_before == 0
    assert agreement.groups_without_variance_now == 1
    assert agreement.spearman_within_groups == pytest.approx(0.0)  # +1 and -1; the third does not vary
    assert (agreement.mean_before, agreement.equal_share) == (0.5, pytest.approx(2 / 6))


def test_failures_are_counted_and_never_compared() -> None:
    agreement = compare(scores(group(1, 1.0, None, 0.0)), scores(group(1, None, 3.0, 0.5)))
    assert (agreement.compared, agreement.failed_before, agreement.failed_now) == (1, 1, 1)
    assert agreement.failures_now == {"no answer": 1}
    assert compare({}, {}).compared == 0


def test_where_nothing_is_compared_no_number_is_shown() -> None:
    agreement = compare(scores(group(1, 1.0, 0.0)), scores(group(1, None, None)))
    assert (agreement.mean_before, agreement.mean_now, agreement.equal_share) == (None, None, None)
    cost = {
        "trajectories": 2, "scoring_s": 1.0, "scores_per_s": 2.0, "wall_s": 1.0, "attempts": 2,
        "latency_p50_s": 0.1, "latency_p95_s": 0.1, "wait_p50_s": 0.1, "wait_p95_s": 0.1, "tokens": {},
    }  # fmt: skip
    report = {"run": "a", "reward": ["b"], "agreement": asdict(agreement), "cost": cost}
    tree = rescore_tree(report, RunFolder(Path("runs"), "a"))
    values = {line.label: line.value for line in tree.children if not line.is_part}
    assert values.pop("compared") == "0 trajectories in 0 groups"
    assert values.pop("failed") == "0 before, 2 now"
    assert set(values.values()) == {None}, values


def test_those_that_moved_farthest_come_first_and_those_that_did_not_are_left_out() -> None:
    agreement = compare(scores(group(1, 1.0, 2.0, 3.0)), scores(group(1, 3.0, 2.0, 1.0)))
    assert {(ticket, index) for ticket, index, _, _ in agreement.farthest} == {(1, 0), (1, 2)}
    # The others moved past one whose score is unchanged: there is nothing to look at in it.
    before = scores(group(1, 0.5, 0.1, 0.2, 0.3))
    agreement = compare(before, scores(group(1, 0.5, 0.7, 0.8, 0.9)))
    assert {index for _, index, _, _ in agreement.farthest} <= {1, 2, 3}
    assert all(old != new for _, _, old, new in agreement.farthest)


def test_a_trace_has_the_distance_of_the_models_tokens_from_the_teacher() -> None:
    teacher = np.array([-0.25, -0.5, -1.0], np.float32)
    gaps = teacher_gaps(make_trajectory(), make_score(0, 0, teacher_logprobs=teacher))
    np.testing.assert_allclose(gaps, [-0.25, 0.0, 0.5])
    session = make_session(0, 0, make_segment((3, 4, 5), (6, 7), (8, 9, 10), (11, 12, 13)))
    of_session = teacher_gaps(session, make_score(0, 0, teacher_logprobs=np.full(5, -3.0, np.float32)))
    np.testing.assert_allclose(of_session, [0.0, -0.01, 0.0, -0.01, -0.02], atol=1e-6)
    assert teacher_gaps(make_trajectory(), make_score(0, 0)) is None
    assert teacher_gaps(session, make_score(0, 0, teacher_logprobs=teacher)) is None
    # With sampling masks the model's logprobs are over fewer ids than the teacher's.
    masked = make_trajectory(choices=Choices(rows={"kept": Rows.of_lists([[0, 1], [1], [2]])}))
    assert teacher_gaps(masked, make_score(0, 0, teacher_logprobs=teacher)) is None

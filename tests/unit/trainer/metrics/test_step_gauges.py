"""What a step tells Prometheus, computed by hand."""

import pytest
from prometheus_client import REGISTRY

from tests.support.training import make_score
from tests.unit.trainer.metrics.test_step_metrics import group_of, sample_of
from tidemill.common.wire.messages import Commit
from tidemill.services.trainer.metrics.step_metrics import observe_step
from tidemill.services.trainer.step import StepResult


def value(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"tidemill_{name}", labels) or 0.0


def commit_of(finished_at: float, **numbers: float) -> Commit:
    return Commit(
        step=4,
        version=5,
        groups=(0,),
        mini_batches=(),
        metrics={"step_time_s": 2.0, "entropy": 0.25, **numbers},
        digest="",
        finished_at=finished_at,
    )


def test_tokens_are_counted_by_the_version_that_produced_each() -> None:
    names = [("trained_tokens_total", {"staleness": str(age)}) for age in range(3)]
    before = [value(name, **labels) for name, labels in names]
    counted = ("trained_staleness_count", "trained_staleness_sum", "trained_spans_sum")
    ages = [value(name) for name in counted]
    group = group_of(
        [sample_of(0, 0, 2, ((4, 0),)), sample_of(0, 1, 6, ((2, 0), (3, 1), (4, 3)))],
        [make_score(0, 0, 1.0), make_score(0, 1, 0.0)],
    )
    observe_step(commit_of(100.0), StepResult(groups=[group]))
    after = [value(name, **labels) for name, labels in names]
    # Two tokens and three are new, two of the step before, and one is two steps old.
    assert [b - a for a, b in zip(before, after, strict=True)] == [5, 2, 1]
    # Of trajectories counts the oldest token: 0 and 2 steps.
    assert [b - a for a, b in zip(ages, map(value, counted), strict=True)] == [2, 2, 4]


def test_each_trajectory_is_timed_from_stage_to_stage() -> None:
    stages = ("generate", "reward_queue", "reward", "trainer")
    before = {stage: value("stage_seconds_sum", stage=stage) for stage in stages}
    sample = sample_of(0, 0, 2, ((4, 0),)).model_copy(update={"started_at": 10.0, "finished_at": 13.0})
    other = sample_of(0, 1, 2, ((4, 0),)).model_copy(update={"started_at": 10.0, "finished_at": 12.0})
    scores = [
        make_score(0, 0, 1.0, latency_s=4.0, scored_at=22.0),
        # By a worker whose clock is behind: no stage takes less than no time.
        make_score(0, 1, 0.0, latency_s=4.0, scored_at=15.0),
    ]
    failed = other.model_copy(update={"index": 2, "fault": "an environment failed"})
    scores.append(make_score(0, 2, None, scored_at=20.0))
    group = group_of([sample, other, failed], scores)
    group.source.trajectory_ids = dict.fromkeys(range(3), "1000-0")
    group.source.score_ids = {0: "10000-0", 1: "3000-0", 2: "2000-0"}
    observe_step(commit_of(30.0), StepResult(groups=[group]))
    spent = {stage: value("stage_seconds_sum", stage=stage) - before[stage] for stage in stages}
    assert spent == pytest.approx({"generate": 5.0, "reward_queue": 5.0, "reward": 8.0, "trainer": 23.0})


def test_the_numbers_of_the_last_step_are_gauges() -> None:
    observe_step(commit_of(30.0, reward=0.5), StepResult())
    assert value("step_metric", metric="entropy") == 0.25
    assert value("step_metric", metric="reward") == 0.5
    assert value("committed_version") == 5

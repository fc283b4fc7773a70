"""What a committed step tells Prometheus: its numbers, and where its trajectories and tokens come from."""

from collections import Counter

from common.telemetry import metrics
from common.wire.messages import Commit, Score, Trajectory
from services.trainer.metrics.step_metrics import OLDEST_BUCKET
from services.trainer.step import StepResult


def observe_step(commit: Commit, result: StepResult) -> None:
    """Once for each step, after its commit."""
    metrics.COMMITTED_VERSION.set(commit.version)
    metrics.STEP_SECONDS.observe(commit.metrics["step_time_s"])
    for name, number in commit.metrics.items():
        metrics.STEP_METRIC.labels(name).set(number)
    tokens: Counter[int] = Counter()
    for group in result.groups:
        if group.source is None:
            continue
        for index, trajectory in group.source.trajectories.items():
            _observe_staleness(trajectory, commit.step, tokens)
            if score := group.source.scores.get(index):
                _observe_stages(trajectory, score, commit.finished_at)
                if (queued_s := group.source.queued_s.get(index)) is not None:
                    metrics.STAGE_SECONDS.labels("reward_queue").observe(queued_s)
    for staleness, count in tokens.items():
        metrics.TRAINED_TOKENS.labels(staleness).inc(count)


def _observe_staleness(trajectory: Trajectory, step: int, tokens: "Counter[int]") -> None:
    """Count the tokens of each span by their staleness; what is older than the last bucket is in that."""
    metrics.TRAINED_STALENESS.observe(step - trajectory.min_version)
    metrics.TRAINED_SPANS.observe(len(trajectory.spans))
    ends = [first for _, first in trajectory.spans[1:]] + [trajectory.num_tokens]
    for (version, first), end in zip(trajectory.spans, ends, strict=True):
        tokens[min(step - version, OLDEST_BUCKET)] += end - first


def _observe_stages(trajectory: Trajectory, score: Score, committed_at: float) -> None:
    """The clocks of several machines may differ a little: no stage is shorter than nothing."""
    stages = {
        "generate": trajectory.finished_at - trajectory.started_at,
        "reward": score.latency_s,
        "trainer": committed_at - score.scored_at,
    }
    for stage, seconds in stages.items():
        metrics.STAGE_SECONDS.labels(stage).observe(max(0.0, seconds))

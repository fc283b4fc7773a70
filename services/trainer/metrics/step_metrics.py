"""The numbers of one step, under the names that users of TRL and verl know, and what it tells Prometheus.

Means over tokens are means over the whole step, never means of means.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from tidemill.common.telemetry import metrics
from tidemill.common.wire.messages import Commit, Score, Trajectory
from tidemill.services.trainer.algorithm.advantages.teaching import log_ratios
from tidemill.services.trainer.algorithm.losses.totals import loss_metrics
from tidemill.services.trainer.groups.group_filter import TrainableGroup
from tidemill.services.trainer.groups.samples import Sample, num_sampled
from tidemill.services.trainer.metrics.session_metrics import session_metrics
from tidemill.services.trainer.metrics.source_metrics import source_metrics
from tidemill.services.trainer.step import StepResult

BYTES_OF_A_TOKEN = 4
"""Of an id, and of a logprob."""
ENTRY_BYTES = 500
"""Of a trajectory and its score besides ids, logprobs and text: field names, times, Redis's own."""


def stage_metrics(
    trajectories: Sequence[Trajectory], scores: Sequence[Score], queued: Sequence[float] = ()
) -> dict[str, float]:
    """Times and sizes of one step, of samples that were generated; `scores` may be fewer than those.

    `queued` says how long trajectories waited for their rewards, by one clock; a step that is replayed from
    records alone has none of that.
    """
    failed = {trajectory.key for trajectory in trajectories if trajectory.fault}
    trajectories = [trajectory for trajectory in trajectories if trajectory.key not in failed]
    scores = [score for score in scores if score.key not in failed]
    if not trajectories or not scores:
        return {}
    latencies = np.array([score.latency_s for score in scores])
    generations = np.array([max(0.0, t.finished_at - t.started_at) for t in trajectories])
    waiting = {"stages/reward_queue_s": float(np.mean(queued))} if queued else {}
    return waiting | {
        "stages/generation_s": float(generations.mean()),
        "stages/generation_p95_s": float(np.quantile(generations, 0.95)),
        "stages/rollout_workers": float(len({trajectory.worker for trajectory in trajectories})),
        "stages/rollout_busy_s": _busy_s((t.worker, t.started_at, t.finished_at) for t in trajectories),
        "stages/score_s": float(latencies.mean()),
        "stages/score_p95_s": float(np.quantile(latencies, 0.95)),
        "stages/scores": float(len(scores)),
        "stages/reward_workers": float(len({score.worker for score in scores})),
        "stages/reward_busy_s": _busy_s((s.worker, s.scored_at - s.latency_s, s.scored_at) for s in scores),
        "stages/record_bytes": float(np.mean([record_bytes(t) for t in trajectories]))
        + _teacher_bytes(scores),
    }


def _teacher_bytes(scores: Sequence[Score]) -> float:
    """Of a teacher's logprobs, on average; 0 without one."""
    taught = [score.teacher_logprobs for score in scores if score.teacher_logprobs is not None]
    return BYTES_OF_A_TOKEN * sum(map(len, taught)) / len(scores)


def record_bytes(trajectory: Trajectory) -> int:
    """What Redis holds for one trajectory and its score, about."""
    ids = sum(len(s.prompt_ids) + 2 * len(s.completion_ids) for s in trajectory.segments)
    text = len(trajectory.text.encode()) + len(trajectory.prompt_text.encode())
    said = len(repr(trajectory.session.messages)) if trajectory.session else 0
    return BYTES_OF_A_TOKEN * ids + text + said + ENTRY_BYTES


def _busy_s(intervals: Iterable[tuple[str, float, float]]) -> float:
    """Seconds in which each worker had at least one of its intervals going, summed over the workers."""
    by_worker: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for worker, begun, ended in intervals:
        by_worker[worker].append((begun, ended))
    total_s = 0.0
    for spans in by_worker.values():
        covered_until = -np.inf
        for begun, ended in sorted(spans):
            total_s += max(0.0, ended - max(begun, covered_until))
            covered_until = max(covered_until, ended)
    return float(total_s)


SUCCESS_THRESHOLD = 0.5
"""The default of `trainer.algorithm.success_threshold`."""
OLDEST_BUCKET = 8
"""The last bucket of the staleness histogram: so many steps or more."""


def step_metrics(
    step: int,
    result: StepResult,
    num_dropped: int,
    step_time_s: float,
    success_threshold: float = SUCCESS_THRESHOLD,
) -> dict[str, float]:
    """All metrics of a step; every value is a finite number except where the policy's own is not."""
    trajectories = [t for group in result.groups for t in group.source.trajectories.values()]
    scores = [s for group in result.groups for s in group.source.scores.values()]
    queued = [s for group in result.groups for s in group.source.queued_s.values()]
    sampled = [t for group in result.groups for t in group.sampled]
    lengths = np.array([num_sampled(t) for t in sampled])
    versions = [versions for group in result.groups for versions in group.trained_versions()]
    staleness = step - np.concatenate(versions) if versions else np.empty(0, dtype=np.int64)
    segments = [segment for t in trajectories for segment in t.segments]
    metrics = {
        **_reward_metrics(result.groups),
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": float(np.mean([t.finish == "length" for t in sampled])),
        "completion_tokens": float(lengths.sum()),
        "step_tokens": float(sum(len(s.prompt_ids) + len(s.completion_ids) for s in segments)),
        "staleness/max": float(staleness.max()) if staleness.size else 0.0,
        "staleness/mean": float(staleness.mean()) if staleness.size else 0.0,
        **staleness_shares(staleness),
        "groups_dropped": float(num_dropped),
        "groups_dropped_ratio": num_dropped / (num_dropped + len(result.groups)),
        "step_time_s": step_time_s,
        **stage_metrics(trajectories, scores, queued),
        **session_metrics(trajectories),
        **source_metrics(step, result.groups, success_threshold),
        **_teacher_metrics(result.samples),
    }
    return metrics | _policy_metrics(result)


def staleness_shares(staleness: NDArray[np.signedinteger]) -> dict[str, float]:
    """A histogram: `staleness/share_<n>`, the share of trained tokens n steps old; what is older than the
    last bucket is in that. Buckets up to the oldest token are there, also empty ones. A token of a version
    after its step, which no step trains on, would count as new."""
    counts = np.bincount(np.clip(staleness, 0, OLDEST_BUCKET)) if staleness.size else ()
    return {f"staleness/share_{age}": float(count / staleness.size) for age, count in enumerate(counts)}


def _reward_metrics(groups: Sequence[TrainableGroup]) -> dict[str, float]:
    rewards = np.concatenate([group.rewards for group in groups])
    stds = np.array([np.std(group.rewards, ddof=1) if len(group.rewards) > 1 else 0.0 for group in groups])
    scores = [score for group in groups for score in group.source.scores.values()]
    return {
        "reward": float(rewards.mean()),
        "reward_std": _std(rewards),
        "reward_group_std": float(stds.mean()),
        "frac_reward_zero_std": float(np.mean([_teaches_nothing(group) for group in groups])),
        "scores/failed_ratio": float(np.mean([score.value is None for score in scores])),
        "scores/latency_s": float(np.mean([score.latency_s for score in scores])),
        **_component_metrics(scores),
    }


def _teaches_nothing(group: TrainableGroup) -> bool:
    """Whether all its rewards are equal, and no teacher counts."""
    has_teacher = any(sample.teaching and sample.teaching.weight for sample in group.samples)
    return len(set(group.rewards)) == 1 and not has_teacher


def _component_metrics(scores: Sequence[Score]) -> dict[str, float]:
    """`rewards/<name>/mean` and `/std` of each component, over the samples that it applied to."""
    values: dict[str, list[float]] = {}
    for score in scores:
        for name, value in score.components.items():
            if value is not None:
                values.setdefault(name, []).append(value)
    means = {f"rewards/{name}/mean": float(np.mean(items)) for name, items in values.items()}
    return means | {f"rewards/{name}/std": _std(items) for name, items in values.items()}


def _teacher_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """`teacher/<name>/reverse_kl` of each teacher: the mean of log p_rollout - log p_teacher over the trained
    tokens of its samples, an estimate of KL(rollout || teacher) a token; and how many tokens that were."""
    gaps: dict[str, list[NDArray[np.float64]]] = {}
    for sample in samples:
        if sample.teaching is not None:
            gaps.setdefault(sample.teaching.teacher, []).append(log_ratios(sample, sample.teaching))
    found: dict[str, float] = {}
    for name, parts in sorted(gaps.items()):
        gap_N = np.concatenate(parts)
        found[f"teacher/{name}/reverse_kl"] = float(gap_N.mean()) if len(gap_N) else 0.0
        found[f"teacher/{name}/tokens"] = float(len(gap_N))
    return found


def _policy_metrics(result: StepResult) -> dict[str, float]:
    sums, updates = result.sums, result.updates
    return {
        **loss_metrics(sums),
        **result.coefficients,
        "grad_norm": float(np.mean([update.grad_norm for update in updates])),
        "learning_rate": updates[-1].lr,
        "update_skipped": float(np.mean([update.skipped for update in updates])),
        "mini_batches": float(len(result.mini_batches)),
        "micro_batches": float(sum(len(mini.micro_batches) for mini in result.mini_batches)),
    }


def _std(values: Sequence[float] | NDArray[np.float64]) -> float:
    """Unbiased standard deviation, as TRL logs it; 0 of fewer than two values."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def observe_step(commit: Commit, result: StepResult) -> None:
    """Once for each step, after its commit."""
    metrics.COMMITTED_VERSION.set(commit.version)
    metrics.STEP_SECONDS.observe(commit.metrics["step_time_s"])
    for name, number in commit.metrics.items():
        metrics.STEP_METRIC.labels(name).set(number)
    tokens: Counter[int] = Counter()
    for group in result.groups:
        for versions_A in group.trained_versions():
            _observe_staleness(commit.step - versions_A, tokens)
        for index, trajectory in group.source.trajectories.items():
            if not trajectory.fault and (score := group.source.scores.get(index)):
                _observe_stages(trajectory, score, commit.finished_at)
                if (queued_s := group.source.queued_s.get(index)) is not None:
                    metrics.STAGE_SECONDS.labels("reward_queue").observe(queued_s)
    for staleness, count in tokens.items():
        metrics.TRAINED_TOKENS.labels(staleness).inc(count)


def _observe_staleness(staleness_A: NDArray[np.int32], tokens: "Counter[int]") -> None:
    """Count a sample's trained tokens by their staleness; what is older than the last bucket is in that."""
    if not len(staleness_A):
        return
    ages, counts = np.unique(staleness_A, return_counts=True)
    metrics.TRAINED_STALENESS.observe(int(ages[-1]))
    metrics.TRAINED_SPANS.observe(len(ages))
    for age, count in zip(ages.tolist(), counts.tolist(), strict=True):
        tokens[min(age, OLDEST_BUCKET)] += count


def _observe_stages(trajectory: Trajectory, score: Score, committed_at: float) -> None:
    """The clocks of several machines may differ a little: no stage is shorter than nothing."""
    stages = {
        "generate": trajectory.finished_at - trajectory.started_at,
        "reward": score.latency_s,
        "trainer": committed_at - score.scored_at,
    }
    for stage, seconds in stages.items():
        metrics.STAGE_SECONDS.labels(stage).observe(max(0.0, seconds))

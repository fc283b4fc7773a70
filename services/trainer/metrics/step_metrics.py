"""The metrics of one step, under the names that users of TRL and verl know, and their report to Prometheus.

Means over tokens are means over the whole step, never means of means.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import structlog
from numpy.typing import NDArray

from tidemill.common.config.trainer import TrainerConfig
from tidemill.common.telemetry import metrics
from tidemill.common.wire.messages import Commit, Score, Trajectory
from tidemill.services.trainer.algorithm.losses.sums import loss_metrics
from tidemill.services.trainer.groups.group import Group
from tidemill.services.trainer.groups.sample import num_sampled
from tidemill.services.trainer.policy.usage import Usage
from tidemill.services.trainer.step import StepResult

log = structlog.get_logger(__name__)

BYTES_OF_A_TOKEN = 4
"""Bytes of an id, and of a logprob."""
ENTRY_BYTES = 500
"""Bytes of a trajectory and its score besides ids, logprobs and text: field names, times, Redis's own."""
OLDEST_BUCKET = 8
"""The last bucket of the staleness histogram: so many steps or more."""


def step_metrics(
    step: int, result: StepResult, num_dropped: int, step_time_s: float, success_threshold: float = 0.5
) -> dict[str, float]:
    """All metrics of a step; every value is a finite number except where the policy's own is not."""
    groups = result.groups
    rewarded = [group for group in groups if not group.is_demonstration]
    trajectories = [t for group in rewarded for t in group.trajectories.values()]
    demonstrations = [t for g in groups if g.is_demonstration for t in g.trajectories.values()]
    scores = [s for group in rewarded for s in group.scores.values()]
    queued = [s for group in rewarded for s in group.queued_s.values()]
    sampled = [t for group in groups for t in group.sampled]
    lengths = np.array([num_sampled(trajectory) for trajectory in sampled])
    staleness = count_staleness(step, groups)
    rows = [row for t in (*trajectories, *demonstrations) for row in t.token_rows]
    sums = result.sums
    updates = result.updates
    return {
        **(_reward_metrics(rewarded) | _length_metrics(sampled, lengths) if rewarded else {}),
        "completion_tokens": float(lengths.sum() + sum(map(num_sampled, demonstrations))),
        "step_tokens": float(sum(len(row.prompt_ids) + len(row.completion_ids) for row in rows)),
        "staleness/max": float(max(staleness, default=0)),
        "staleness/mean": mean_staleness(staleness),
        **staleness_shares(staleness),
        "groups_dropped": float(num_dropped),
        "groups_dropped_ratio": num_dropped / (num_dropped + len(groups)),
        "step_time_s": step_time_s,
        **stage_metrics(trajectories, scores, queued),
        **_metrics_of_options(step, result, trajectories, success_threshold),
        **loss_metrics(sums),
        **result.coefficients,
        "grad_norm": float(np.mean([update.grad_norm for update in updates])),
        "learning_rate": updates[-1].lr,
        "update_skipped": float(np.mean([update.skipped for update in updates])),
        "mini_batches": float(len(result.mini_batches)),
        "micro_batches": float(sum(len(mini.micro_batches) for mini in result.mini_batches)),
    }


def _metrics_of_options(
    step: int, result: StepResult, trajectories: Sequence[Trajectory], success_threshold: float
) -> dict[str, float]:
    """Of sessions, sources and teachers, where the step has them."""
    has_sessions = any(trajectory.session for trajectory in trajectories)
    has_sources = any(t.source for group in result.groups for t in group.trajectories.values())
    has_teachers = any(sample.teacher for sample in result.samples)
    if not (has_sessions or has_sources or has_teachers):
        return {}
    from tidemill.services.trainer.metrics.option_metrics import (
        session_metrics,
        source_metrics,
        teacher_metrics,
    )

    return {
        **session_metrics(trajectories),
        **source_metrics(step, result.groups, success_threshold),
        **teacher_metrics(result.samples),
    }


def _length_metrics(sampled: Sequence[Trajectory], lengths: NDArray[np.int64]) -> dict[str, float]:
    return {
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": float(np.mean([t.finish == "length" for t in sampled])),
    }


def stage_metrics(
    trajectories: Sequence[Trajectory], scores: Sequence[Score], queued: Sequence[float] = ()
) -> dict[str, float]:
    """Times and sizes of one step, over samples that were generated; there may be fewer `scores`.

    `queued` are the seconds that trajectories waited for their rewards, by one clock; empty for a step that
    is replayed from records alone.
    """
    failed = {trajectory.key for trajectory in trajectories if trajectory.fault}
    if failed:
        trajectories = [trajectory for trajectory in trajectories if trajectory.key not in failed]
        scores = [score for score in scores if score.key not in failed]
    if not trajectories or not scores:
        return {}
    latencies = np.array([score.latency_s for score in scores])
    generations = np.array([max(0.0, t.finished_at - t.started_at) for t in trajectories])
    taught = [score.teacher_logprobs for score in scores if score.teacher_logprobs is not None]
    record_bytes = float(np.mean([_record_bytes(t) for t in trajectories]))
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
        "stages/record_bytes": record_bytes + BYTES_OF_A_TOKEN * sum(map(len, taught)) / len(scores),
    }


def usage_metrics(
    numbers: Mapping[str, float], result: StepResult, usage: Usage, config: TrainerConfig
) -> dict[str, float]:
    """How much of its devices a step used, by its other numbers. FLOPs are over the time in forward, backward
    and update, tokens over the whole step; a micro-batch is full with a bin for each rank."""
    sums = result.sums
    ranks = len(usage.peak_bytes)
    if not sums.positions or not ranks:
        return {}
    busy_s = numbers.get("time/train_s", 0.0) + numbers.get("time/update_s", 0.0)
    flops = usage.flops.of(sums) / busy_s / ranks if busy_s else 0.0
    room = numbers["micro_batches"] * result.passes * config.bin_tokens * config.num_bins
    return {
        "forward/fill": sums.positions / room,
        "perf/tokens_per_s_per_rank": numbers["step_tokens"] / numbers["step_time_s"] / ranks,
        "perf/tflops_per_rank": flops / 1e12,
        "perf/peak_gib": max(usage.peak_bytes) / (1 << 30),
        "perf/peak_gib_rank": float(np.argmax(usage.peak_bytes)),
        **({"perf/mfu": flops / usage.peak_flops} if usage.peak_flops else {}),
    }


def _record_bytes(trajectory: Trajectory) -> int:
    """About how many bytes Redis holds for one trajectory and its score."""
    ids = sum(len(row.prompt_ids) + 2 * len(row.completion_ids) for row in trajectory.token_rows)
    text = len(f"{trajectory.text}{trajectory.thought or ''}{trajectory.prompt_text}".encode())
    said = len(repr(trajectory.session.messages)) if trajectory.session else 0
    return BYTES_OF_A_TOKEN * ids + text + said + ENTRY_BYTES


def _busy_s(intervals: Iterable[tuple[str, float, float]]) -> float:
    """Seconds in which each worker had at least one of its intervals going, summed over the workers."""
    total_s = 0.0
    covered_until: dict[str, float] = {}
    for worker, begun, ended in sorted(intervals):
        covered = covered_until.get(worker, -np.inf)
        total_s += max(0.0, ended - max(begun, covered))
        covered_until[worker] = max(covered, ended)
    return float(total_s)


def count_staleness(step: int, groups: Sequence[Group]) -> Counter[int]:
    """How many trained tokens of these groups are so many steps old: {0: 900, 1: 50}."""
    staleness: Counter[int] = Counter()
    for group in groups:
        for versions in group.trained_versions():
            for version, num_tokens in versions.items():
                staleness[step - version] += num_tokens
    return staleness


def mean_staleness(staleness: Counter[int]) -> float:
    total = sum(age * num_tokens for age, num_tokens in staleness.items())
    return total / max(staleness.total(), 1)


def staleness_shares(staleness: Counter[int]) -> dict[str, float]:
    """A histogram: `staleness/share_<n>`, the share of trained tokens n steps old; what is older than the
    last bucket is in that. Buckets up to the oldest token are there, also empty ones. A token of a version
    after its step, which no step trains on, would count as new."""
    buckets: Counter[int] = Counter()
    for age, num_tokens in staleness.items():
        buckets[min(max(age, 0), OLDEST_BUCKET)] += num_tokens
    num_buckets = max(buckets, default=-1) + 1
    return {f"staleness/share_{age}": buckets[age] / staleness.total() for age in range(num_buckets)}


def _reward_metrics(groups: Sequence[Group]) -> dict[str, float]:
    rewards = np.concatenate([group.rewards for group in groups])
    scores = [score for group in groups for score in group.scores.values()]
    # With a teacher whose weight is not 0, samples of equal rewards are trained too.
    teaches_nothing = [_teaches_nothing(group) for group in groups]
    components = component_values(scores).items()
    return {
        "reward": float(rewards.mean()),
        "reward_std": _std(rewards),
        "reward_group_std": float(np.mean([_std(group.rewards) for group in groups])),
        "frac_reward_zero_std": float(np.mean(teaches_nothing)),
        "scores/failed_ratio": float(np.mean([score.value is None for score in scores])),
        "scores/latency_s": float(np.mean([score.latency_s for score in scores])),
        **{f"rewards/{name}/mean": float(np.mean(values)) for name, values in components},
        **{f"rewards/{name}/std": _std(values) for name, values in components},
    }


def _teaches_nothing(group: Group) -> bool:
    has_teacher = any(sample.teacher_weight for sample in group.samples)
    return len(set(group.rewards)) == 1 and not has_teacher


def component_values(scores: Iterable[Score]) -> dict[str, list[float]]:
    """The values of each component of the reward, over the samples that it applied to."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for score in scores:
        for name, value in score.components.items():
            if value is not None:
                values[name].append(value)
    return values


def _std(values: Sequence[float] | NDArray[np.float64]) -> float:
    """Unbiased standard deviation, as TRL logs it; 0 for fewer than two values."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def observe_step(commit: Commit, result: StepResult) -> None:
    """Report a step to Prometheus and the log; once for each step, after its commit."""
    metrics.COMMITTED_VERSION.set(commit.version)
    metrics.STEP_SECONDS.observe(commit.metrics["step_time_s"])
    for name, number in commit.metrics.items():
        metrics.STEP_METRIC.labels(name).set(number)
    tokens: Counter[int] = Counter()
    for group in result.groups:
        for versions in group.trained_versions():
            if versions:
                metrics.TRAINED_STALENESS.observe(commit.step - min(versions))
                metrics.TRAINED_SPANS.observe(len(versions))
            for version, num_tokens in versions.items():
                tokens[min(commit.step - version, OLDEST_BUCKET)] += num_tokens
        queued_s = group.queued_s
        for index, trajectory in group.trajectories.items():
            if not trajectory.fault and (score := group.scores.get(index)):
                _observe_stages(trajectory, score, commit.finished_at)
                if index in queued_s:
                    metrics.STAGE_SECONDS.labels("reward_queue").observe(queued_s[index])
    for staleness, count in tokens.items():
        metrics.TRAINED_TOKENS.labels(staleness).inc(count)
    numbers = {name: round(commit.metrics[name], 4) for name in ("reward", "loss") if name in commit.metrics}
    log.info(
        "step committed",
        step=commit.step,
        **numbers,
        staleness=commit.metrics["staleness/max"],
        seconds=round(commit.metrics["step_time_s"], 2),
    )


def _observe_stages(trajectory: Trajectory, score: Score, committed_at: float) -> None:
    """The clocks of several machines may differ a little: no stage is shorter than nothing."""
    stages = {
        "generate": trajectory.finished_at - trajectory.started_at,
        "reward": score.latency_s,
        "trainer": committed_at - score.scored_at,
    }
    for stage, seconds in stages.items():
        metrics.STAGE_SECONDS.labels(stage).observe(max(0.0, seconds))

"""The numbers of one step, under the names that users of TRL and verl know.

Means over tokens are means over the whole step, never means of means.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from common.messages import Score
from services.trainer.judgement import TrainableGroup
from services.trainer.loss_metrics import loss_metrics
from services.trainer.stage_metrics import stage_metrics
from services.trainer.step import StepResult

OLDEST_BUCKET = 8
"""The last bucket of the staleness histogram: so many steps or more."""


def step_metrics(step: int, result: StepResult, num_dropped: int, step_time_s: float) -> dict[str, float]:
    """All metrics of a step; every value is a finite number except where the policy's own is not."""
    trajectories = [t for group in result.groups if group.source for t in group.source.trajectories.values()]
    scores = [s for group in result.groups if group.source for s in group.source.scores.values()]
    queued = [s for group in result.groups if group.source for s in group.source.queued_s.values()]
    lengths = np.array([t.num_tokens for t in trajectories])
    staleness = np.concatenate([step - t.token_versions() for t in trajectories])
    metrics = {
        **_reward_metrics(result.groups),
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": float(np.mean([t.finish == "length" for t in trajectories])),
        "completion_tokens": float(lengths.sum()),
        "step_tokens": float(sum(len(t.prompt_ids) + t.num_tokens for t in trajectories)),
        "staleness/max": float(staleness.max()) if staleness.size else 0.0,
        "staleness/mean": float(staleness.mean()) if staleness.size else 0.0,
        **staleness_shares(staleness),
        "groups_dropped": float(num_dropped),
        "groups_dropped_ratio": num_dropped / (num_dropped + len(result.groups)),
        "step_time_s": step_time_s,
        **stage_metrics(trajectories, scores, queued),
    }
    return metrics | _policy_metrics(result)


def staleness_shares(staleness: NDArray[np.int64]) -> dict[str, float]:
    """A histogram: `staleness/share_<n>`, the share of trained tokens n steps old; what is older than the
    last bucket is in that. Buckets up to the oldest token are there, also empty ones. A token of a version
    after its step, which no step trains on, would count as new."""
    counts = np.bincount(np.clip(staleness, 0, OLDEST_BUCKET)) if staleness.size else ()
    return {f"staleness/share_{age}": float(count / staleness.size) for age, count in enumerate(counts)}


def _reward_metrics(groups: Sequence[TrainableGroup]) -> dict[str, float]:
    rewards = np.concatenate([group.rewards for group in groups])
    stds = np.array([np.std(group.rewards, ddof=1) if len(group.rewards) > 1 else 0.0 for group in groups])
    scores = [score for group in groups if group.source for score in group.source.scores.values()]
    return {
        "reward": float(rewards.mean()),
        "reward_std": _std(rewards),
        "reward_group_std": float(stds.mean()),
        "frac_reward_zero_std": float(np.mean([len(set(group.rewards)) == 1 for group in groups])),
        "scores/failed_ratio": float(np.mean([score.value is None for score in scores])),
        "scores/latency_s": float(np.mean([score.latency_s for score in scores])),
        **_component_metrics(scores),
    }


def _component_metrics(scores: Sequence[Score]) -> dict[str, float]:
    """`rewards/<name>/mean` and `/std` of each component, over the samples that it applied to."""
    values: dict[str, list[float]] = {}
    for score in scores:
        for name, value in score.components.items():
            if value is not None:
                values.setdefault(name, []).append(value)
    means = {f"rewards/{name}/mean": float(np.mean(items)) for name, items in values.items()}
    return means | {f"rewards/{name}/std": _std(items) for name, items in values.items()}


def _policy_metrics(result: StepResult) -> dict[str, float]:
    sums, updates = result.sums, result.updates
    return loss_metrics(sums) | {
        "grad_norm": float(np.mean([update.grad_norm for update in updates])),
        "learning_rate": updates[-1].lr,
        "update_skipped": float(np.mean([update.skipped for update in updates])),
        "mini_batches": float(len(result.mini_batches)),
        "micro_batches": float(sum(len(mini.micro_batches) for mini in result.mini_batches)),
    }


def _std(values: Sequence[float] | NDArray[np.float64]) -> float:
    """Unbiased standard deviation, as TRL logs it; 0 of fewer than two values."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0

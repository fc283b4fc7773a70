"""The numbers of a step by source, `source/<name>/*`; a run of one training set without a name has none."""

from collections.abc import Sequence

import numpy as np

from tidemill.services.trainer.groups.group_filter import TrainableGroup
from tidemill.services.trainer.groups.samples import num_sampled


def source_metrics(step: int, groups: Sequence[TrainableGroup], success_threshold: float) -> dict[str, float]:
    """Of each source that the step trained on: groups, means over completions, staleness of trained tokens.

    A pass rate is the share of rewards of at least `success_threshold`, over the samples that have one.
    """
    by_source: dict[str, list[TrainableGroup]] = {}
    for group in groups:
        if name := next(iter(group.source.trajectories.values())).source:
            by_source.setdefault(name, []).append(group)
    return {
        f"source/{name}/{metric}": value
        for name in sorted(by_source)
        for metric, value in _metrics(step, by_source[name], success_threshold).items()
    }


def _metrics(step: int, groups: Sequence[TrainableGroup], success_threshold: float) -> dict[str, float]:
    rewards = np.concatenate([group.rewards for group in groups])
    versions = [versions for group in groups for versions in group.trained_versions()]
    staleness = step - np.concatenate(versions) if versions else np.empty(0, dtype=np.int64)
    return {
        "groups": float(len(groups)),
        "reward": float(rewards.mean()),
        "pass_rate": float((rewards >= success_threshold).mean()),
        "mean_length": float(np.mean([num_sampled(t) for group in groups for t in group.sampled])),
        "staleness": float(staleness.mean()) if staleness.size else 0.0,
    }

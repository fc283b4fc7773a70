"""Analytic pass@k advantages, arXiv 2508.10751."""

from math import comb
from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field

from tidemill.common.config.algorithms.advantage import (
    Advantage,
    GroupRewards,
    Rewards,
    finite_rewards,
    of_groups,
)
from tidemill.common.config.algorithms.settings import Settings
from tidemill.common.wire.arrays import Float64

if TYPE_CHECKING:
    from tidemill.common.config.algorithm import AlgorithmConfig


class PassAtKSettings(Settings):
    """Settings of `pass_at_k`."""

    pass_k: int = Field(4, ge=1, le=4096)
    """k of `pass_at_k`."""


def pass_at_k(rewards: Rewards, k: int, threshold: float = 0.5) -> Float64:
    """The share of sets of k that hold a success, normalised. Shape [G], float64.

    With n of G rewards below `threshold`, a set of k succeeds with probability p = 1 - C(n, k) / C(G, k), and
    rewards of sets have the deviation s = sqrt(p (1 - p)). A success belongs to sets that all succeed: (1 -
    p) / s. A failure belongs to sets that fail where the other k - 1 do: (1 - p - C(n - 1, k - 1) / C(G - 1,
    k - 1)) / s. Where every set has one outcome (p is 0 or 1), all are zero. k = 1 is GRPO with the biased
    deviation. A group that has lost samples and is smaller than k counts as one set.

    G = 4, k = 2, one success: n = 3, p = 1 - 3/6 = 0.5, s = 0.5; the success gets 1, a failure (0.5 - 2/3) /
    0.5 = -1/3.

    Raises:
        ValueError: a reward is not finite, or k is below 1.
    """
    if k < 1:
        raise ValueError(f"k is {k}; pass@k needs at least 1")
    rewards_G = finite_rewards(rewards)
    size = len(rewards_G)
    k = min(k, size)
    is_success_G = rewards_G >= threshold
    failures = int((~is_success_G).sum())
    if size < 2 or failures in (0, size) or failures < k:
        return np.zeros_like(rewards_G)
    # Whole numbers, divided once: a product of ratios would round at each of them.
    fail = comb(failures, k) / comb(size, k)
    deviation = (fail * (1.0 - fail)) ** 0.5
    fail_given_failure = comb(failures - 1, k - 1) / comb(size - 1, k - 1)
    return np.where(is_success_G, fail / deviation, (fail - fail_given_failure) / deviation)


def estimate(group: GroupRewards, algorithm: "AlgorithmConfig") -> Float64:
    k = PassAtKSettings.of(algorithm).pass_k
    return pass_at_k(group.rewards, k, algorithm.success_threshold)


def set_size(algorithm: "AlgorithmConfig") -> tuple[str, int]:
    return "pass_k", PassAtKSettings.of(algorithm).pass_k


ADVANTAGES = (
    Advantage(
        name="pass_at_k",
        estimate=of_groups(estimate),
        summary="share in sets of `pass_k` completions that hold a success, a reward of at least "
        "`success_threshold` (arXiv 2508.10751)",
        is_binary=True,
        set_size=set_size,
        settings=PassAtKSettings,
    ),
)

"""Group-relative advantages: how much better a completion did than its siblings.

Guarantees: advantages of a group sum to zero up to rounding; equal rewards give exactly zero, not
rounding noise blown up by a tiny deviation; a group of one gives zero, for it has nothing to compare with.
"""

from math import comb

import numpy as np
from numpy.typing import NDArray

from services.trainer.algorithm.advantages.episode import Rewards, finite_rewards

STD_EPSILON = 1e-4
"""Added to the standard deviation; TRL's value."""


def dr_grpo(rewards: Rewards) -> NDArray[np.float64]:
    """r - mean(r). Shape [G], float64. Dr. GRPO, arXiv 2503.20783.

    Without the division by the deviation, which weighs very easy and very hard prompts more. Rewards 2, 0,
    1, 1 give 1, -1, 0, 0.

    Raises:
        ValueError: a reward is not finite.
    """
    rewards_G = finite_rewards(rewards)
    # Compared exactly: the mean of equal floats may be off by one rounding, and 1e-17 / 1e-4 is not zero.
    if len(rewards_G) < 2 or (rewards_G == rewards_G[0]).all():
        return np.zeros_like(rewards_G)
    return rewards_G - rewards_G.mean()  # type: ignore[no-any-return]


def grpo(rewards: Rewards) -> NDArray[np.float64]:
    """(r - mean(r)) / (std(r) + 1e-4). Shape [G], float64. GRPO, arXiv 2402.03300, outcome supervision.

    The standard deviation is the unbiased one (divisor G - 1), as in TRL; the paper does not say which.
    Rewards 1, 0, 0, 1 have mean 0.5 and std 0.57735, which gives +-0.86588.

    Raises:
        ValueError: a reward is not finite.
    """
    centred_G = dr_grpo(rewards)
    if not centred_G.any():
        return centred_G
    scaled_G: NDArray[np.float64] = centred_G / (finite_rewards(rewards).std(ddof=1) + STD_EPSILON)
    return scaled_G


def rloo(rewards: Rewards) -> NDArray[np.float64]:
    """r_i - mean of the other rewards = G / (G - 1) * (r_i - mean(r)). Shape [G], float64.

    RLOO, arXiv 2402.14740: a baseline that does not depend on the completion itself, so the policy
    gradient stays unbiased. Rewards 1, 0, 0, 1 give 2/3, -2/3, -2/3, 2/3. Equal rewards and a group of one
    give exactly zero.

    Raises:
        ValueError: a reward is not finite.
    """
    centred_G = dr_grpo(rewards)
    num_rewards = len(centred_G)
    return centred_G * (num_rewards / (num_rewards - 1)) if num_rewards > 1 else centred_G


def pass_at_k(rewards: Rewards, k: int, threshold: float = 0.5) -> NDArray[np.float64]:
    """Analytic pass@k advantages. Shape [G], float64.

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
    fail = comb(failures, k) / comb(size, k)
    deviation = (fail * (1.0 - fail)) ** 0.5
    fail_given_failure = comb(failures - 1, k - 1) / comb(size - 1, k - 1)
    return np.where(is_success_G, fail / deviation, (fail - fail_given_failure) / deviation)

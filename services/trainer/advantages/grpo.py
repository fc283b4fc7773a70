"""Group-relative advantages: how much better a completion did than its siblings.

Guarantees: advantages of a group sum to zero up to rounding; equal rewards give exactly zero, not
rounding noise blown up by a tiny deviation; a group of one gives zero, for it has nothing to compare with.
"""

import numpy as np
from numpy.typing import NDArray

from services.trainer.advantages.rewards import Rewards, finite_rewards

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

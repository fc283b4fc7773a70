"""Dr. GRPO, arXiv 2503.20783."""

import numpy as np

from tidemill.common.config.algorithms.advantage import Advantage, Rewards, finite_rewards, of_rewards
from tidemill.common.wire.arrays import Float64


def dr_grpo(rewards: Rewards) -> Float64:
    """r - mean(r). Shape [G], float64.

    Without the division by the deviation, which weighs very easy and very hard prompts more. Rewards 2, 0, 1,
    1 give 1, -1, 0, 0.
    """
    rewards_G = finite_rewards(rewards)
    # Compared exactly: the mean of equal floats may be off by one rounding, and 1e-17 / 1e-4 is not zero.
    if len(rewards_G) < 2 or (rewards_G == rewards_G[0]).all():
        return np.zeros_like(rewards_G)
    return rewards_G - rewards_G.mean()  # type: ignore[no-any-return]


ADVANTAGES = (Advantage(name="dr_grpo", estimate=of_rewards(dr_grpo), summary="r - mean"),)

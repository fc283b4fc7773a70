"""GRPO, arXiv 2402.03300, outcome supervision."""

from tidemill.common.config.algorithms.advantage import (
    Advantage,
    Rewards,
    finite_rewards,
    of_rewards,
    scaled,
)
from tidemill.common.config.algorithms.advantages.dr_grpo import dr_grpo
from tidemill.common.wire.arrays import Float64


def grpo(rewards: Rewards) -> Float64:
    """(r - mean(r)) / (std(r) + 1e-4). Shape [G], float64.

    The standard deviation is the unbiased one (divisor G - 1), as in TRL; the paper does not say which.
    Rewards 1, 0, 0, 1 have mean 0.5 and std 0.57735, which gives +-0.86588.
    """
    return scaled(dr_grpo(rewards), finite_rewards(rewards))


ADVANTAGES = (
    Advantage(name="grpo", estimate=of_rewards(grpo), summary="(r - mean) / (std + 1e-4) in the group"),
)

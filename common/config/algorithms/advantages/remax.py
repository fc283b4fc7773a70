"""ReMax, arXiv 2310.10505."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tidemill.common.config.algorithms.advantage import (
    Advantage,
    GroupRewards,
    Rewards,
    Values,
    finite_rewards,
)
from tidemill.common.wire.arrays import Float64

if TYPE_CHECKING:
    from tidemill.common.config.algorithm import AlgorithmConfig


def remax(rewards: Rewards, baseline: float) -> Float64:
    """r - reward of the greedy completion. Shape [G], float64. Eq. 4.

    The baseline needs no siblings and no value head, only one more completion a prompt, which is not trained.
    Rewards 1, 0 beside a greedy one of 0.25 give 0.75, -0.25.
    """
    rewards_G: Float64 = finite_rewards(rewards) - finite_rewards([baseline])
    return rewards_G


def estimate(groups: Sequence[GroupRewards], algorithm: "AlgorithmConfig") -> Values:
    return [float(value) for group in groups for value in remax(group.rewards, group.greedy_reward)]


ADVANTAGES = (
    Advantage(
        name="remax",
        estimate=estimate,
        summary="r - reward of a greedy completion, the first sample of each group, which is never trained "
        "(arXiv 2310.10505)",
        has_greedy_baseline=True,
    ),
)

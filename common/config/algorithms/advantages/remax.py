"""ReMax, arXiv 2310.10505."""

from tidemill.common.config.algorithms.advantage import Advantage, Rewards, finite_rewards, of_groups
from tidemill.common.wire.arrays import Float64


def remax(rewards: Rewards, baseline: float) -> Float64:
    """r - reward of the greedy completion. Shape [G], float64. Eq. 4.

    The baseline needs no siblings and no value head, only one more completion a prompt, which is not trained.
    Rewards 1, 0 beside a greedy one of 0.25 give 0.75, -0.25.
    """
    rewards_G: Float64 = finite_rewards(rewards) - finite_rewards([baseline])
    return rewards_G


ADVANTAGES = (
    Advantage(
        name="remax",
        estimate=of_groups(lambda group, _: remax(group.rewards, group.greedy_reward)),
        summary="r - reward of a greedy completion, the first sample of each group, which is never trained "
        "(arXiv 2310.10505)",
        has_greedy_baseline=True,
    ),
)

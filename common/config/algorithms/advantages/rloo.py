"""RLOO, arXiv 2402.14740."""

from tidemill.common.config.algorithms.advantage import Advantage, Rewards, of_rewards
from tidemill.common.config.algorithms.advantages.dr_grpo import dr_grpo
from tidemill.common.wire.arrays import Float64


def rloo(rewards: Rewards) -> Float64:
    """r_i - mean of the other rewards = G / (G - 1) * (r_i - mean(r)). Shape [G], float64.

    A baseline that does not depend on the completion itself, so the policy gradient stays unbiased. Rewards
    1, 0, 0, 1 give 2/3, -2/3, -2/3, 2/3. Equal rewards and a group of one give exactly zero.
    """
    centred_G = dr_grpo(rewards)
    num_rewards = len(centred_G)
    return centred_G * (num_rewards / (num_rewards - 1)) if num_rewards > 1 else centred_G


ADVANTAGES = (Advantage(name="rloo", estimate=of_rewards(rloo), summary="r - mean of the others"),)

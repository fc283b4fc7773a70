"""REINFORCE leave-one-out: each completion against the mean of the others."""

import numpy as np
from numpy.typing import NDArray

from services.trainer.advantages.grpo import dr_grpo
from services.trainer.advantages.rewards import Rewards


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

"""MaxRL, arXiv 2602.02710."""

import numpy as np

from tidemill.common.config.algorithms.advantage import Advantage, Rewards, finite_rewards, of_rewards
from tidemill.common.config.algorithms.advantages.dr_grpo import dr_grpo
from tidemill.common.wire.arrays import Float64


def max_rl(rewards: Rewards) -> Float64:
    """(r - mean(r)) / m with m = max(mean(r), max(|r|) / G). Shape [G], float64.

    With rewards of 0 and 1 the mean over a group is the gradient of the likelihood of a success, to the order
    G, in place of that of its probability: a prompt that is solved once in ten counts ten times as much. Made
    for rewards that are not negative, whose mean is at least the largest over G, so that m is the paper's
    mean. With rewards below 0 (a length penalty, KL in the reward) the mean may be as small as it likes, and
    m bounds advantages by 2 G. Where the mean is not above 0, all are zero. Rewards 1, 0, 0, 0 give 3, -1,
    -1, -1; rewards 1, -0.75, 0 have the mean 1/12 and m = 1/3: 2.75, -2.5, -0.25.
    """
    centred_G = dr_grpo(rewards)
    rewards_G = finite_rewards(rewards)
    if not len(rewards_G):
        return np.zeros_like(centred_G)
    mean = rewards_G.mean()
    if mean <= 0.0:
        return np.zeros_like(centred_G)
    scaled_G: Float64 = centred_G / max(mean, np.abs(rewards_G).max() / len(rewards_G))
    return scaled_G


ADVANTAGES = (
    Advantage(
        name="max_rl",
        estimate=of_rewards(max_rl),
        summary="(r - mean) / mean (arXiv 2602.02710): the gradient of log-likelihood, so a rarely solved "
        "prompt counts for more. For rewards that are not negative; else the divisor is at least the largest "
        r"\|r\| over G",
    ),
)

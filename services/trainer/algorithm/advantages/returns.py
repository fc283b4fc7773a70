"""Generalised advantage estimation, arXiv 1506.02438, with a token as the action."""

from collections.abc import Sequence

import numpy as np

from services.trainer.algorithm.advantages.episode import Float64s, whiten
from services.trainer.algorithm.advantages.group_relative import dr_grpo


def gae(
    rewards_A: Float64s, values_A: Float64s, gamma: float = 1.0, gae_lambda: float = 1.0
) -> tuple[Float64s, Float64s]:
    """Advantages and returns of one sequence's A trained tokens. Shapes [A], float64.

    Eq. 16 as a recursion: d_t = r_t + gamma V_{t+1} - V_t and A_t = d_t + gamma lambda A_{t+1}; the value
    after the last token is 0, for the sequence is over (also one that was cut off at its limit). Returns, the
    value head's targets, are A_t + V_t. `values_A[t]` is the estimate before token t is chosen; tokens that
    are not trained (a tool's output) are no actions and are passed over.

    Rewards 0, 1, values 0.5, 0.25, gamma 1, lambda 0.5: d = -0.25, 0.75; A = 0.125, 0.75; returns 0.625, 1.

    Raises:
        ValueError: as many values as rewards are needed.
    """
    if rewards_A.shape != values_A.shape:
        raise ValueError(f"{len(rewards_A)} rewards but {len(values_A)} values")
    advantages = [0.0] * len(rewards_A)
    following_value = following_advantage = 0.0
    pairs = list(zip(rewards_A.tolist(), values_A.tolist(), strict=True))
    for t, (reward, value) in reversed(list(enumerate(pairs))):
        delta = reward + gamma * following_value - value
        following_advantage = delta + gamma * gae_lambda * following_advantage
        advantages[t], following_value = following_advantage, value
    advantages_A = np.array(advantages, dtype=np.float64)
    return advantages_A, advantages_A + values_A


def reinforce_plus_plus(token_rewards: Sequence[Float64s], gamma: float = 1.0) -> list[Float64s]:
    """whiten(G_t) with G_t = r_t + gamma G_{t+1}. N arrays [A], float64.

    Token rewards hold the KL penalty of each token (k1, by `kl.place: reward`), and the sequence's reward at
    its last token. Rewards 1 and 0 of sequences of 1 and 2 tokens: returns [1], [0, 0], mean 1/3, variance
    1/3; advantages [1.1547], [-0.57735, -0.57735].
    """
    return whiten([returns(rewards_A, gamma) for rewards_A in token_rewards])


def reinforce_plus_plus_baseline(
    groups: Sequence[Sequence[float]], lengths: Sequence[Sequence[int]]
) -> list[Float64s]:
    """whiten(r - mean of the group). N arrays [A], one value repeated, float64.

    `lengths` are the numbers of trained tokens, which weigh the mean and the deviation.

    Raises:
        ValueError: a reward is not finite.
    """
    centred = [dr_grpo(rewards) for rewards in groups]
    return whiten(
        [
            np.full(length, value)
            for values, counts in zip(centred, lengths, strict=True)
            for value, length in zip(values, counts, strict=True)
        ]
    )


def returns(rewards_A: Float64s, gamma: float) -> Float64s:
    """Discounted sums of a token's reward and all later ones. Shape [A].

    Without a discount, rewards 0, 0, 1 give exactly 1, 1, 1.
    """
    result, following = [0.0] * len(rewards_A), 0.0
    for t, reward in reversed(list(enumerate(rewards_A.tolist()))):
        following = reward + gamma * following
        result[t] = following
    return np.array(result, dtype=np.float64)

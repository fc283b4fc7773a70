"""Generalised advantage estimation, arXiv 1506.02438, with a token as the action."""

import numpy as np

from services.trainer.advantages.whitening import Float64s


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

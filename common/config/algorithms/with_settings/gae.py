"""Generalised advantage estimation, arXiv 1506.02438. A token is the action."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field

from tidemill.common.config.algorithms.advantage import Advantage, Discount, GroupRewards, Values
from tidemill.common.config.algorithms.settings import Settings
from tidemill.common.wire.arrays import Float64

if TYPE_CHECKING:
    from tidemill.common.config.algorithm import AlgorithmConfig


class GaeSettings(Settings):
    """Settings of `gae`."""

    gae_lambda: float = Field(1.0, ge=0.0, le=1.0)
    """Lambda of GAE. 1: later rewards count alone; 0: the next value in their place."""


def gae(
    rewards_A: Float64, values_A: Float64, gamma: Discount = 1.0, gae_lambda: float = 1.0
) -> tuple[Float64, Float64]:
    """Advantages and returns of one sequence's A trained tokens. Shapes [A], float64.

    Eq. 16 as a recursion: d_t = r_t + gamma V_{t+1} - V_t and A_t = d_t + gamma lambda A_{t+1}. Returns, the
    value head's targets, are A_t + V_t.

    `values_A[t]` is the estimate before token t is chosen. After the last token the value is 0, because the
    sequence is over, also one that was cut off at its limit. Tokens that are not trained (a tool's output)
    are no actions: neither array has them. `gamma` is one number, or [A], one for the step from each token to
    the next.

    Rewards 0, 1, values 0.5, 0.25, gamma 1, lambda 0.5: d = -0.25, 0.75; A = 0.125, 0.75; returns 0.625, 1.

    Raises:
        ValueError: as many values as rewards are needed.
    """
    if rewards_A.shape != values_A.shape:
        raise ValueError(f"{len(rewards_A)} rewards but {len(values_A)} values")
    advantages = [0.0] * len(rewards_A)
    following_value = 0.0
    following_advantage = 0.0
    gammas = np.broadcast_to(gamma, rewards_A.shape).tolist()
    # Python's floats are the same float64, and a loop over them is faster than over numpy's.
    steps = list(zip(rewards_A.tolist(), values_A.tolist(), gammas, strict=True))
    for t, (reward, value, discount) in reversed(list(enumerate(steps))):
        delta = reward + discount * following_value - value
        following_advantage = delta + discount * gae_lambda * following_advantage
        advantages[t] = following_advantage
        following_value = value
    advantages_A = np.array(advantages, dtype=np.float64)
    return advantages_A, advantages_A + values_A


def estimate(groups: Sequence[GroupRewards], algorithm: "AlgorithmConfig") -> Values:
    """The advantages of every sample, by token. They are not whitened yet: `Advantages.assign` first adds the
    values to them, which gives the returns."""
    gae_lambda = GaeSettings.of(algorithm).gae_lambda
    advantages: Values = []
    for group in groups:
        for rewards_A, values_A, gamma in zip(
            group.token_rewards, group.values, group.discounts, strict=True
        ):
            advantages_A, _ = gae(rewards_A, values_A, gamma, gae_lambda)
            advantages.append(advantages_A)
    return advantages


ADVANTAGES = (
    Advantage(
        name="gae",
        estimate=estimate,
        summary="generalised advantage estimation (arXiv 1506.02438), `gamma`, `gae_lambda`",
        scope="batch",
        compares_siblings=False,
        has_discount=True,
        needs_values=True,
        settings=GaeSettings,
    ),
)

"""REINFORCE++, arXiv 2501.03262. A token is the action."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tidemill.common.config.algorithms.advantage import (
    Advantage,
    Discount,
    GroupRewards,
    Values,
    of_sequences,
    returns,
    whiten,
)
from tidemill.common.wire.arrays import Float64

if TYPE_CHECKING:
    from tidemill.common.config.algorithm import AlgorithmConfig


def reinforce_plus_plus(
    token_rewards: Sequence[Float64], gammas: Sequence[Discount] | None = None
) -> list[Float64]:
    """whiten(G_t) with G_t = r_t + gamma G_{t+1}. N arrays [A], float64.

    Token rewards hold the KL penalty of each token (k1, by `kl.place: reward`), rewards of single turns at
    their last tokens, and the rest of the sequence's at its own. `gammas` has a discount for each sequence,
    1 without. Rewards 1 and 0 of sequences of 1 and 2 tokens: returns [1], [0, 0], mean 1/3, variance
    1/3; advantages [1.1547], [-0.57735, -0.57735].
    """
    discounts = gammas or [1.0] * len(token_rewards)
    return whiten(
        [returns(rewards_A, gamma) for rewards_A, gamma in zip(token_rewards, discounts, strict=True)]
    )


def estimate(groups: Sequence[GroupRewards], algorithm: "AlgorithmConfig") -> Values:
    token_rewards: list[Float64] = []
    gammas: list[Discount] = []
    for group in groups:
        token_rewards += group.token_rewards
        gammas += group.discounts
    advantages = reinforce_plus_plus(token_rewards, gammas)
    if algorithm.has_token_advantages or any(group.has_turn_rewards for group in groups):
        return list(advantages)
    return of_sequences(advantages)


ADVANTAGES = (
    Advantage(
        name="reinforce_plus_plus",
        estimate=estimate,
        summary="return of each token, normalised over the mini-batch",
        scope="batch",
        compares_siblings=False,
        has_discount=True,
    ),
)

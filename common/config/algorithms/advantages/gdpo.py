"""GDPO, arXiv 2601.05242."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tidemill.common.config.algorithms.advantage import Advantage, GroupRewards, Values, joined, scaled
from tidemill.common.config.algorithms.advantages.grpo import grpo
from tidemill.common.wire.arrays import Float64

if TYPE_CHECKING:
    from tidemill.common.config.algorithm import AlgorithmConfig


def gdpo(groups: Sequence[Sequence[Sequence[float | None]]], weights: Sequence[float]) -> Float64:
    """whiten(sum over rewards of w_k * grpo(r_k in the group)). Shape [N].

    Eq. 4 to 6: `groups` has the K rewards of each completion. Each reward is normalised within its group by
    itself, so that one with a large spread does not hide the others; the weighted sums x are then brought to
    (x - mean) / (std + 1e-4) over the mini-batch. A reward that does not apply to a completion (None) is left
    out of its sum and of the group's mean and deviation, as in TRL; a completion without any gets 0.

    One group, two completions with rewards (1, 0) and (0, 0), weights 1 and 2: the first reward gives
    +-0.70701, the second 0; mean 0, deviation 0.99986: +-0.70704.
    """
    sums = joined(_weighted(rewards, weights) for rewards in groups)
    is_scored: list[bool] = []
    for group in groups:
        for rewards in group:
            is_scored.append(any(reward is not None for reward in rewards))
    is_scored_N = np.array(is_scored, dtype=np.bool_)
    scored = sums[is_scored_N]
    advantages_N = np.zeros_like(sums)
    if len(scored) > 1 and not (scored == scored[0]).all():
        advantages_N[is_scored_N] = scaled(scored - scored.mean(), scored)
    return advantages_N


def _weighted(rewards: Sequence[Sequence[float | None]], weights: Sequence[float]) -> Float64:
    """The weighted sum of a group's normalised rewards. Shape [G]."""
    total_G = np.zeros(len(rewards))
    for k, weight in enumerate(weights):
        positions: list[int] = []
        column: list[float] = []
        for position, of_completion in enumerate(rewards):
            reward = of_completion[k]
            if reward is not None:
                positions.append(position)
                column.append(reward)
        if column:
            # A reward that only one completion has gives 0 here: `grpo` has nothing to compare it with.
            total_G[positions] += weight * grpo(column)
    return total_G


def estimate(groups: Sequence[GroupRewards], algorithm: "AlgorithmConfig") -> Values:
    """Rewards are read from the scores, before any shaping."""
    weights = groups[0].weights if groups else ()
    return list(map(float, gdpo([group.components for group in groups], weights)))


ADVANTAGES = (
    Advantage(
        name="gdpo",
        estimate=estimate,
        summary="each reward of `reward.rewards` as in `grpo`, summed by weight, then normalised over the "
        "mini-batch (arXiv 2601.05242)",
        scope="batch",
        compares_rewards=True,
    ),
)

"""REINFORCE++ with the mean of the group, arXiv 2501.03262. A token is the action."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tidemill.common.config.algorithms.advantage import Advantage, GroupRewards, Values, of_sequences, whiten
from tidemill.common.config.algorithms.advantages.dr_grpo import dr_grpo
from tidemill.common.wire.arrays import Float64

if TYPE_CHECKING:
    from tidemill.common.config.algorithm import AlgorithmConfig


def reinforce_plus_plus_baseline(
    groups: Sequence[Sequence[float]], lengths: Sequence[Sequence[int]]
) -> list[Float64]:
    """whiten(r - mean of the group). N arrays [A], one value repeated, float64.

    `lengths` are the numbers of trained tokens, which weigh the mean and the deviation.
    """
    repeated: list[Float64] = []
    for rewards, group_lengths in zip(groups, lengths, strict=True):
        for value, length in zip(dr_grpo(rewards), group_lengths, strict=True):
            repeated.append(np.full(length, value))
    return whiten(repeated)


def estimate(groups: Sequence[GroupRewards], algorithm: "AlgorithmConfig") -> Values:
    rewards = [group.rewards for group in groups]
    lengths = [group.lengths for group in groups]
    return of_sequences(reinforce_plus_plus_baseline(rewards, lengths))


ADVANTAGES = (
    Advantage(
        name="reinforce_plus_plus_baseline",
        estimate=estimate,
        summary="r - mean of the group, normalised over the mini-batch",
        scope="batch",
    ),
)

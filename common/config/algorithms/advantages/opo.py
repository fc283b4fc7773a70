"""OPO, arXiv 2505.23585: the baseline of least variance where a gradient's norm grows with the length."""

from collections.abc import Sequence

import numpy as np

from tidemill.common.config.algorithms.advantage import Advantage, Rewards, finite_rewards, of_groups
from tidemill.common.wire.arrays import Float64


def opo(rewards: Rewards, lengths: Sequence[int]) -> Float64:
    """r - sum(l r) / sum(l), with l the number of trained tokens. Shape [G], float64.

    Rewards 1, 0, 0 of lengths 2, 1, 1 have the baseline 2/4: 0.5, -0.5, -0.5. Where no completion has a
    trained token, all lengths count as 1.

    Raises:
        ValueError: a reward is not finite, or there is no length for it.
    """
    rewards_G = finite_rewards(rewards)
    if len(lengths) != len(rewards_G):
        raise ValueError(f"{len(rewards_G)} rewards but {len(lengths)} lengths")
    if len(rewards_G) < 2 or (rewards_G == rewards_G[0]).all():
        return np.zeros_like(rewards_G)
    lengths_G = np.asarray(lengths, dtype=np.float64) if any(lengths) else np.ones(len(rewards_G))
    baseline = (lengths_G * rewards_G).sum() / lengths_G.sum()
    return rewards_G - baseline  # type: ignore[no-any-return]


ADVANTAGES = (
    Advantage(
        name="opo",
        estimate=of_groups(lambda group, _: opo(group.rewards, group.lengths)),
        summary="r - mean in the group, weighted by trained tokens: the baseline of least variance "
        "(arXiv 2505.23585)",
    ),
)

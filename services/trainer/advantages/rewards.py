"""What every function of rewards starts with: finite numbers in float64."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Rewards = Sequence[float | None] | NDArray[np.floating]


def finite_rewards(rewards: Rewards) -> NDArray[np.float64]:
    """The rewards as an array [G] of float64.

    Raises:
        ValueError: a reward is None, NaN or infinite. Failed scores are dropped before, never guessed.
    """
    values = [float("nan") if reward is None else float(reward) for reward in rewards]
    rewards_G = np.asarray(values, dtype=np.float64)
    bad = np.flatnonzero(~np.isfinite(rewards_G))
    if len(bad):
        raise ValueError(
            f"reward {int(bad[0])} of {len(values)} is {rewards[int(bad[0])]}; all must be finite: "
            "leave out trajectories without one"
        )
    return rewards_G

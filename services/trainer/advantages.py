"""Group-relative advantages: how much better a completion did than its siblings.

`group` is GRPO (arXiv 2402.03300, outcome supervision), `none` is Dr. GRPO (arXiv 2503.20783),
which leaves out the division by the standard deviation because it weighs very easy and very hard
prompts more. Guarantees: advantages of a group sum to zero up to rounding; equal rewards give exactly
zero, not rounding noise blown up by a tiny deviation.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

STD_EPSILON = 1e-4
"""Added to the standard deviation; TRL's value."""


def group_advantages(
    rewards: Sequence[float | None] | NDArray[np.floating], scale: Literal["group", "none"] = "group"
) -> NDArray[np.float64]:
    """Advantages of one group's rewards. Shape [G], float64.

    `group`: (r - mean) / (std + 1e-4) with the unbiased standard deviation (divisor G - 1), as TRL
    computes it; the paper does not say which. `none`: r - mean. A group of one gets 0: it has nothing
    to compare with. Rewards 1, 0, 0, 1 have mean 0.5 and std 0.57735, so `group` gives +-0.86588.

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
    # Compared exactly: the mean of equal floats may be off by one rounding, and 1e-17 / 1e-4 is not zero.
    if len(rewards_G) < 2 or (rewards_G == rewards_G[0]).all():
        return np.zeros_like(rewards_G)
    centred_G: NDArray[np.float64] = rewards_G - rewards_G.mean()
    if scale == "group":
        centred_G /= rewards_G.std(ddof=1) + STD_EPSILON
    return centred_G

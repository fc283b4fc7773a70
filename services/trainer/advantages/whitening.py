"""Normalisation over all trained tokens of a batch, wherever its groups and micro-batches end."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

VARIANCE_EPSILON = 1e-8
"""Added to the variance; verl's value."""

Float64s = NDArray[np.float64]


def whiten(values: Sequence[Float64s]) -> list[Float64s]:
    """(x - mean) / sqrt(var + 1e-8) over all entries of all arrays, which keep their shapes.

    The variance is the unbiased one, as in verl. Fewer than two entries, or equal ones, give exactly zero.
    Arrays [1, 1] and [4] have mean 2 and variance 3: -0.57735, -0.57735 and 1.1547.
    """
    joined = np.concatenate([np.zeros(0), *values])
    if len(joined) < 2 or (joined == joined[0]).all():
        return [np.zeros_like(value) for value in values]
    mean, deviation = joined.mean(), np.sqrt(joined.var(ddof=1) + VARIANCE_EPSILON)
    return [(value - mean) / deviation for value in values]

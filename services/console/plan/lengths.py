"""Lengths of completions: log-normal with median 1, where what is above `cut` is `cut`. And what the later
of two stages takes, where one of them differs from step to step."""

import math


def mean_of_lengths(sigma: float, cut: float) -> float:
    """The mean.

    >>> round(mean_of_lengths(0.99, 16.0), 2)
    1.61
    """
    if not sigma:
        return min(1.0, cut)
    edge = math.log(cut) / sigma
    return math.exp(sigma**2 / 2) * _below(edge - sigma) + cut * (1.0 - _below(edge))


def mean_of_later(varying_s: float, share: float, other_s: float) -> float:
    """E[max(X, other)] of a normal X with the mean `varying_s` and a standard deviation of `share` of it.

    C. E. Clark, The greatest of a finite set of random variables (1961), equation 2 with one variance of 0.
    """
    deviation = share * varying_s
    if deviation <= 0.0:
        return max(varying_s, other_s)
    z = (varying_s - other_s) / deviation
    density = math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    return other_s + deviation * (density + z * _below(z))


def _below(x: float) -> float:
    """The share of a standard normal that lies below x."""
    return 0.5 * (1.0 + math.erf(x / math.sqrt(2.0)))

"""Random numbers of a request: the same for the same seed and name, on every worker and in every batch."""

import hashlib

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def request_key(seed: int, request_id: str) -> int:
    """64 bits that differ between requests and between seeds."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{request_id}".encode(), digest_size=8).digest(), "little")


def uniforms(keys_B: NDArray[np.uint64], draw: int | NDArray[np.uint64]) -> NDArray[np.float64]:
    """The `draw`-th random number of each key, in [0, 1). Shape [B], float64. The mixer is SplitMix64."""
    # The mixer is defined modulo 2^64: wrapping around is meant.
    with np.errstate(over="ignore"):
        state = keys_B + (np.asarray(draw, dtype=np.uint64) + np.uint64(1)) * _GOLDEN
        state = (state ^ (state >> np.uint64(30))) * _MIX_1
        state = (state ^ (state >> np.uint64(27))) * _MIX_2
        state = state ^ (state >> np.uint64(31))
    # 53 bits, as many as a float64 holds: no fraction is rounded up to 1.
    fractions: NDArray[np.float64] = (state >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return fractions

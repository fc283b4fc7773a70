"""The digest of a version: a 128-bit xxh3 over all parameter bytes, in the order of their names.

Guarantee: two models have one digest exactly when their parameters hold the same bytes (master
precision), up to hash collisions. Memory stays bounded: a tensor on a GPU crosses in pieces.
"""

from collections.abc import Iterable

import torch
import xxhash
from torch import Tensor

from services.trainer.export import whole_tensor

PIECE_BYTES = 1 << 26
"""Bytes hashed at once; what a GPU tensor needs of host memory."""


def digest_parameters(parameters: Iterable[tuple[str, Tensor]]) -> str:
    """32 hexadecimal digits for `(name, tensor)` pairs given in any order."""
    hasher = xxhash.xxh3_128()
    for _, tensor in sorted(parameters, key=lambda pair: pair[0]):
        flat = whole_tensor(tensor.detach()).contiguous().reshape(-1).view(torch.uint8)
        for piece in flat.split(PIECE_BYTES):
            hasher.update(piece.cpu().numpy())
    return hasher.hexdigest()

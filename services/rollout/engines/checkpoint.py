"""The tensors of a version from its files: those of a full one, with later deltas written over them."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tidemill.common.errors import WeightsError, WeightsMismatchError
from tidemill.common.weights.bits import Bits, TensorInfo, read_safetensors
from tidemill.common.weights.delta import merge
from tidemill.common.weights.digest import Digest

if TYPE_CHECKING:
    from torch import Tensor


def read_tensors(files: Sequence[Path]) -> dict[str, tuple[TensorInfo, Bits]]:
    """Every tensor of a full version, flat; views of the mapped files.

    Raises:
        WeightsError: a file is missing or incomplete, or two of them have the same tensor.
    """
    tensors: dict[str, tuple[TensorInfo, Bits]] = {}
    for file in files:
        # Copy on write: torch wants memory that it may write, and the file must stay as it is.
        for info, bits in read_safetensors(file, "c"):
            if info.name in tensors:
                raise WeightsError(f"{file}: {info.name} is in another file of the version too.")
            tensors[info.name] = (info, bits)
    return tensors


def patched_tensors(
    base: Mapping[str, tuple[TensorInfo, Bits]], deltas: Sequence[Sequence[Path]]
) -> Iterator[tuple[TensorInfo, Bits]]:
    """Every tensor of a full version with the deltas written over it, flat and in the order of names; only
    one at a time is copied into memory.

    Raises:
        WeightsError: a delta is damaged, or is not one of these tensors.
    """
    patches = merge(deltas)
    patch = next(patches, None)
    # In the order of names, as deltas come merged: one pass over both is enough.
    for name in sorted(base):
        info, bits = base[name]
        flat = np.array(bits) if deltas else bits
        while patch is not None and patch.info.name == name:
            if patch.info != info:
                raise WeightsError(f"a delta has {patch.info}, the full version before it {info}.")
            patch.apply(flat)
            patch = next(patches, None)
        yield info, flat
    if patch is not None:
        raise WeightsError(f"a delta changes {patch.info.name}, which the full version before it has not.")


def checkpoint_tensors(
    base: Mapping[str, tuple[TensorInfo, Bits]], deltas: Sequence[Sequence[Path]]
) -> "Iterator[tuple[str, Tensor]]":
    """`patched_tensors` as pairs of name and torch tensor."""
    from tidemill.services.rollout.engines.held_weights import as_tensor

    for info, flat in patched_tensors(base, deltas):
        yield info.name, as_tensor(info, flat)


def check_files(files: Sequence[Path], deltas: Sequence[Sequence[Path]]) -> None:
    """Raises WeightsError: there is nothing to load, or a file is not there."""
    every = [*files, *(file for delta in deltas for file in delta)]
    missing = [str(file) for file in every if not file.is_file()]
    if missing or not every:
        raise WeightsError(f"weight files missing: {', '.join(missing) or 'none were given'}")


def prove(held: Digest | None, change: Digest, expected: str) -> Digest:
    """The digest of what an engine holds, after a change that it computed from its own values.

    Raises:
        WeightsMismatchError: it is not the one that was expected. Nothing has been changed yet.
    """
    if held is None:
        raise WeightsMismatchError("it is not known what the engine holds, so no delta can be proven")
    proven = held + change
    if proven != Digest.parse(expected):
        raise WeightsMismatchError(f"with the delta the engine would hold {proven}, expected is {expected}")
    return proven

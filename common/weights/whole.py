"""A version from its chain, as one set of full files: for exports, and to see that a chain is right."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tidemill.common.errors import WeightsError
from tidemill.common.weights.bits import Bits, TensorInfo, read_safetensors
from tidemill.common.weights.delta import merge
from tidemill.common.weights.digest import digest_of, is_additive
from tidemill.common.wire.messages import WeightManifest


def write_whole(base: Sequence[Path], deltas: Sequence[Sequence[Path]], folder: Path) -> list[Path]:
    """Copy the files of a full version and change them by the deltas, oldest first. One window of one tensor
    is in memory at a time.

    Raises:
        WeightsError: a file is damaged, or a delta changes what the full version does not have.
    """
    copies = [Path(shutil.copyfile(path, folder / path.name)) for path in base]
    if not deltas:
        return copies
    tensors: dict[str, tuple[TensorInfo, Bits]] = {}
    for path in copies:
        tensors |= {info.name: (info, bits) for info, bits in read_safetensors(path, "r+")}
    for patch in merge(deltas):
        info, bits = tensors.get(patch.info.name, (None, np.empty(0)))
        if info != patch.info:
            raise WeightsError(f"a delta changes {patch.info}; the full version has {info}.")
        patch.apply(bits)
    return copies


def check_whole(paths: Sequence[Path], manifest: WeightManifest) -> None:
    """Hold full files against their version's digest, where it is over weights. Raises WeightsError: they are
    other weights."""
    if not is_additive(manifest.digest):
        return
    found = str(digest_of(tensor for path in paths for tensor in read_safetensors(path)))
    if found != manifest.digest:
        raise WeightsError(
            f"weights of version {manifest.version}: their digest is {found}, the manifest says "
            f"{manifest.digest}: the chain of deltas does not lead to them."
        )

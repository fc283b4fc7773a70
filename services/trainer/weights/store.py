"""Writes a version's weights, so that a manifest exists only for bytes that are complete and on the disk.

Layout: `weights/v00000012/{model.safetensors, ..., manifest.json}` below the run's folder. A version appears
there by one rename. Subfolders, such as its adapters, are for people: no manifest names them. `write` returns
the manifest that the trainer announces; the reading side is `tidemill.common.run.weight_files`.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

import structlog
import torch
import xxhash
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from tidemill.common.files import (
    aside_folder,
    clear_aside,
    file_checksum,
    publish_folder,
    retire_folder,
    write_atomically,
)
from tidemill.common.run.weight_files import MANIFEST_FILE, WEIGHTS_FOLDER, folder_versions, version_name
from tidemill.common.wire.messages import WeightFile, WeightManifest

log = structlog.get_logger(__name__)


class WeightSource(Protocol):
    """What the store needs of a policy."""

    def save_weights(self, folder: Path) -> object:
        """Write safetensors files with Hugging Face names into an existing folder."""

    def digest(self) -> str:
        """128-bit hash over all parameter bytes, 32 hexadecimal digits."""


class WeightStore:
    """The `weights` folder of one run. One trainer writes it; constructing it clears what a crash left."""

    def __init__(self, run_dir: Path) -> None:
        self.folder = run_dir / WEIGHTS_FOLDER
        if leftovers := clear_aside(self.folder):
            log.info("removed unfinished weights of an earlier process", names=leftovers)

    def write(self, version: int, policy: WeightSource) -> WeightManifest:
        """Publish the policy's weights as `version`.

        A version that is there already, after a restart, stays untouched where its bytes are the same, so
        that a worker that reads it now is not disturbed; otherwise the new bytes replace it.

        Raises:
            StorageError: the disk is full or read-only. No half version is visible; call again.
        """
        target = self.folder / version_name(version)
        with aside_folder(target, f"the weights of version {version}") as aside:
            policy.save_weights(aside)
            files = _list_files(aside)
            manifest = WeightManifest(
                version=version, folder=target.name, files=files, digest=policy.digest()
            )
            if not _holds(target, manifest):
                write_atomically(aside / MANIFEST_FILE, manifest.model_dump_json(indent=1))
                publish_folder(aside, target)
        return manifest

    def versions(self) -> list[int]:
        """The versions on the disk, in ascending order."""
        return folder_versions(self.folder)

    def prune(self, keep: int, in_use: Collection[int] = (), newest: int | None = None) -> list[int]:
        """Remove all but the newest `keep` versions and those `in_use`; returns what was removed. The run
        stands at `newest`: what is above it belongs to a history that Redis has lost, and goes first."""
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        versions = self.versions()
        lost = [version for version in versions if newest is not None and version > newest]
        standing = [version for version in versions if version not in lost]
        old = [*lost, *(version for version in standing[:-keep] if version not in in_use)]
        for version in old:
            retire_folder(self.folder / version_name(version))
        return old


def _list_files(folder: Path) -> tuple[WeightFile, ...]:
    """Name, size and checksum of every file except the manifest and those in subfolders, sorted by name."""
    paths = sorted(path for path in folder.iterdir() if path.is_file() and path.name != MANIFEST_FILE)
    if not paths:
        raise ValueError(f"save_weights wrote no file into {folder}")
    return tuple(
        WeightFile(name=path.name, num_bytes=path.stat().st_size, checksum=file_checksum(path))
        for path in paths
    )


def _holds(folder: Path, manifest: WeightManifest) -> bool:
    """Whether a published folder has the manifest's digest and exactly its files, byte for byte."""
    try:
        stored = WeightManifest.model_validate_json((folder / MANIFEST_FILE).read_bytes())
        return stored.digest == manifest.digest and _list_files(folder) == manifest.files
    except (OSError, ValueError):
        return False


WEIGHTS_FILE = "model.safetensors"


def whole_tensor(tensor: Tensor) -> Tensor:
    """The tensor, or where it is sharded its rows from every rank, on the CPU; all ranks must call this."""
    return tensor.full_tensor().cpu() if isinstance(tensor, DTensor) else tensor


def model_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Parameters, tied ones once, and the buffers that belong to a checkpoint, by name; views."""
    tensors: dict[str, Tensor] = {name: parameter.detach() for name, parameter in model.named_parameters()}
    saved = model.state_dict().keys()
    tensors.update((name, buffer) for name, buffer in model.named_buffers() if name in saved)
    return tensors


def export_tensors(
    model: PreTrainedModel, dtype: torch.dtype, tensors: Mapping[str, Tensor] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Weights under their published names, floating point ones in `dtype`. `tensors`, by the names of
    `model_tensors`, take the place of the model's own."""
    given = model_tensors(model) if tensors is None else tensors
    whole = {name: whole_tensor(tensor) for name, tensor in given.items()}
    for name, tensor in revert_weight_conversion(model, whole).items():
        yield name, tensor.detach().to(dtype) if tensor.is_floating_point() else tensor.detach()


def save_model(
    model: PreTrainedModel, dtype: torch.dtype, folder: Path, tensors: Mapping[str, Tensor] | None = None
) -> list[Path]:
    """Write `model.safetensors` into the folder, nothing else; the same weights give the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    exported = {name: tensor.contiguous() for name, tensor in export_tensors(model, dtype, tensors)}
    path = folder / WEIGHTS_FILE
    save_file(exported, path, metadata={"format": "pt"})
    return [path]


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

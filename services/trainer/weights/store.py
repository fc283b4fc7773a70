"""Writes versions, so that a manifest exists only for bytes that are complete and on the disk.

Layout: `weights/v00000012/{model.safetensors or delta-*.safetensors, ..., manifest.json}` below the run's
folder. A version appears there by one rename. Its subfolders, such as that of its adapters, are for people:
no manifest names them. A version is full, or a delta to the one before it (`begin` decides). While a delta is
kept, the versions that it needs are kept too. `finish` returns the manifest that the trainer announces; the
reading side is `common/run/weight_files.py`.
"""

import time
from collections.abc import Collection, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import structlog
import torch
import xxhash
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from tidemill.common.config.weights import WeightsConfig
from tidemill.common.errors import WeightsError
from tidemill.common.files import (
    begin_folder,
    clear_aside,
    file_checksum,
    publish_folder,
    remove_folder,
    retire_folder,
    storage_errors,
    write_atomically,
)
from tidemill.common.run.weight_files import (
    MANIFEST_FILE,
    WEIGHTS_FOLDER,
    folder_versions,
    needed_versions,
    read_chain,
    read_manifest,
    verified_files,
    version_name,
)
from tidemill.common.wire.messages import DELTA_ENCODING, WeightFile, WeightManifest

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class WeightState:
    """The weights of a policy at one moment, as it compared them with those before.

    Example: 2 % of the weights have changed: `share_changed` 0.02, `before` the digest of the last state.
    With adapters, `committed` is not `digest`.
    """

    digest: str
    """Digest of the exported weights."""
    committed: str
    """Digest for the commit: also of trained weights that are not exported."""
    before: str = ""
    """Digest of the state before, if the policy can write this one as a delta to it; else empty."""
    share_changed: float = -1.0
    """Share of the elements that are not as in the state before; -1: it is not known."""
    num_bytes: int = 0
    """Size of a full version."""


class WeightSource(Protocol):
    """What the store needs of a policy."""

    def compare_weights(self) -> WeightState:
        """State of the current weights, and what has changed since the last call."""

    def begin_writing(self, folder: Path, version: int, parent: int) -> Future[tuple[WeightFile, ...]]:
        """Start to write the weights of the last comparison into an existing folder, in full or, where
        `parent` is not -1, as a delta. The weights may change meanwhile."""


class Publisher(Protocol):
    """Gives versions to workers that do not see the run's folder."""

    def publish(self, manifest: WeightManifest, folder: Path) -> None:
        """Copy a version. Raises StorageError: it did not work now; call again."""

    def remove(self, version: int) -> None:
        """Remove a version that is no longer needed. What cannot be removed stays."""


@dataclass(slots=True)
class BegunVersion:
    """A version that is being written into a folder aside.

    Example: `version` 8 as a delta to 7: `parent` is the manifest of 7, and `files` the files once they are
    written.
    """

    state: WeightState
    version: int
    parent: WeightManifest | None
    folder: Path
    files: Future[tuple[WeightFile, ...]]
    begun_at: float


class WeightStore:
    """The `weights` folder of one run. One trainer writes it; constructing it clears what a crash left."""

    max_chain_share = 0.5
    """When the deltas since the last full version exceed this share of its bytes, the next is full."""

    def __init__(
        self, run_dir: Path, config: WeightsConfig | None = None, publisher: Publisher | None = None
    ) -> None:
        self.run_dir = run_dir
        self.folder = run_dir / WEIGHTS_FOLDER
        self.config = config or WeightsConfig()
        self.last: WeightManifest | None = None
        """The version that was written, or found whole, last."""
        self._publisher = publisher
        leftovers = clear_aside(self.folder)
        if leftovers:
            log.info("removed unfinished weights of an earlier process", names=leftovers)

    def begin(
        self, version: int, policy: WeightSource, state: WeightState, may_reuse: bool = True
    ) -> BegunVersion | WeightManifest:
        """Start to write `state`, which the policy has just compared; in the policy's thread.

        After a restart the version may be there already. If it is whole and of the same weights, its manifest
        is returned and nothing is written: a worker may be reading it. Otherwise, and always without
        `may_reuse`, the new bytes replace it.

        Raises:
            StorageError: the disk is full or read-only. Nothing of it is visible; call again.
        """
        target = self.folder / version_name(version)
        standing = self.standing(version, state.digest) if may_reuse else None
        if standing is not None:
            self.last = standing
            return standing
        parent = self._parent(version, state)
        content = f"the weights of version {version}"
        aside = begin_folder(target, content)
        try:
            with storage_errors(content, target):
                files = policy.begin_writing(aside, version, parent.version if parent else -1)
        except BaseException:
            # Also where it is interrupted: gigabytes would stay there until the next start.
            remove_folder(aside)
            raise
        return BegunVersion(state, version, parent, aside, files, time.monotonic())

    def distrust(self) -> None:
        """Write the next version in full: a file that the last one needs is damaged."""
        self.last = None

    def begin_again(self, manifest: WeightManifest, policy: WeightSource) -> BegunVersion:
        """Start to replace a version by the same one in full; in the policy's thread.

        The policy must still have its weights. Raises StorageError: as `begin`.
        """
        self.distrust()  # without a version that was written last, this one is written in full
        # What is written is what was compared last, and a trainer that has just started has compared nothing.
        policy.compare_weights()
        # No digest for the commit, which is made.
        state = WeightState(manifest.digest, committed="", share_changed=manifest.share_changed)
        begun = self.begin(manifest.version, policy, state, may_reuse=False)
        assert isinstance(begun, BegunVersion), "nothing is reused"
        return begun

    def finish(self, begun: BegunVersion | WeightManifest) -> WeightManifest:
        """Wait for the files of a version and publish it; in any thread.

        Raises:
            StorageError: the disk is full or read-only. No half version is visible; begin again.
        """
        if isinstance(begun, WeightManifest):
            self._publish(begun)
            return begun
        target = self.folder / version_name(begun.version)
        try:
            with storage_errors(f"the weights of version {begun.version}", target):
                manifest = self._manifest(begun, target.name, begun.files.result())
                # The manifest last, then the rename: under the version's name there is never half of it.
                write_atomically(begun.folder / MANIFEST_FILE, manifest.model_dump_json(indent=1))
                publish_folder(begun.folder, target)
        finally:
            remove_folder(begun.folder)
        self._publish(manifest)
        # Last: where publishing fails, the next try has the same parent as this one.
        self.last = manifest
        return manifest

    def _publish(self, manifest: WeightManifest) -> None:
        if self._publisher is not None:
            self._publisher.publish(manifest, self.folder / manifest.folder)

    def standing(self, version: int, digest: str) -> WeightManifest | None:
        """The version's manifest, where it is of these weights and all that it needs is there and whole."""
        try:
            manifest = read_manifest(self.run_dir, version)
            if manifest is None or manifest.digest != digest:
                return None
            present = {path.name for path in (self.folder / manifest.folder).iterdir() if path.is_file()}
            if present != {MANIFEST_FILE, *(file.name for file in manifest.files)}:
                return None
            for link in read_chain(self.run_dir, manifest):
                verified_files(self.run_dir, link)
        except (OSError, WeightsError):
            return None
        return manifest

    def _parent(self, version: int, state: WeightState) -> WeightManifest | None:
        """The version that this one is to be a delta to; None where it is to be full."""
        last = self.last
        config = self.config
        if last is None or last.version != version - 1:
            return None
        base = last.base if last.is_delta else last.version
        is_worth_it = (
            # The policy's delta is to the state that it compared before: that must be the last version.
            state.before == last.digest
            and state.share_changed <= config.max_share_changed
            # A worker that starts reads the whole chain: its length is bounded here, and its bytes below.
            and version - base < config.base_every
            and last.chain_bytes <= self.max_chain_share * state.num_bytes
        )
        return last if is_worth_it else None

    def _manifest(self, begun: BegunVersion, folder: str, files: tuple[WeightFile, ...]) -> WeightManifest:
        if not files:
            raise ValueError(f"begin_writing wrote no file into {begun.folder}")
        state = begun.state
        parent = begun.parent
        manifest = WeightManifest(
            version=begun.version,
            folder=folder,
            files=files,
            digest=state.digest,
            share_changed=state.share_changed,
            encode_s=time.monotonic() - begun.begun_at,
        )
        if parent is None:
            return manifest
        return manifest.model_copy(
            update={
                "encoding": DELTA_ENCODING,
                "parent": parent.version,
                "parent_digest": parent.digest,
                "base": parent.base if parent.is_delta else parent.version,
                "chain_bytes": parent.chain_bytes + manifest.num_bytes,
                "full_bytes": state.num_bytes,
            }
        )

    def versions(self) -> list[int]:
        return folder_versions(self.folder)

    def prune(self, keep: int, in_use: Collection[int] = (), newest: int | None = None) -> list[int]:
        """Remove all but the newest `keep` versions, those `in_use`, and what they are deltas to; returns
        what was removed. The run stands at `newest`: what is above it belongs to a history that Redis has
        lost, and goes first."""
        versions = self.versions()
        lost = [version for version in versions if newest is not None and version > newest]
        current = [version for version in versions if version not in lost]
        wanted = [*current[-keep:], *(version for version in current if version in in_use)]
        needed = needed_versions(self.run_dir, wanted)
        # The newest go first, so that a crash leaves no delta without its base.
        old = [*lost[::-1], *(version for version in current[::-1] if version not in needed)]
        for version in old:
            retire_folder(self.folder / version_name(version))
            if self._publisher is not None:
                self._publisher.remove(version)
        return sorted(old)


def list_files(folder: Path) -> tuple[WeightFile, ...]:
    """Name, size and checksum of every file except the manifest and those in subfolders, sorted by name."""
    paths = sorted(path for path in folder.iterdir() if path.is_file() and path.name != MANIFEST_FILE)
    return tuple(
        WeightFile(name=path.name, num_bytes=path.stat().st_size, checksum=file_checksum(path))
        for path in paths
    )


WEIGHTS_FILE = "model.safetensors"


def whole_tensor(tensor: Tensor) -> Tensor:
    """The whole tensor: a sharded one gathered on the CPU, another as it is. All ranks must call this."""
    return tensor.full_tensor().cpu() if isinstance(tensor, DTensor) else tensor


def model_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Parameters, tied ones once, and the buffers that belong to a checkpoint, by name; views."""
    tensors: dict[str, Tensor] = {name: parameter.detach() for name, parameter in model.named_parameters()}
    saved = model.state_dict().keys()
    tensors.update((name, buffer) for name, buffer in model.named_buffers() if name in saved)
    return tensors


PIECE_BYTES = 1 << 26
"""Bytes hashed at once. Of a tensor on a GPU no more than these are in host memory."""


def digest_parameters(parameters: Iterable[tuple[str, Tensor]]) -> str:
    """32 hexadecimal digits for whole `(name, tensor)` pairs given in any order; identifies the base of
    adapters."""
    ordered = sorted(parameters, key=lambda pair: pair[0])
    return digest_in_order(whole_tensor(tensor.detach()) for _, tensor in ordered)


def digest_in_order(tensors: Iterable[Tensor]) -> str:
    """The same digest for tensors, or pieces of them, one after the other."""
    hasher = xxhash.xxh3_128()
    for tensor in tensors:
        for piece in tensor.contiguous().reshape(-1).view(torch.uint8).split(PIECE_BYTES):
            hasher.update(piece.cpu().numpy())
    return hasher.hexdigest()

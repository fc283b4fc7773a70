"""Writes a version from the shadows of all ranks, each its own shard, beside the next step's work.

A delta is one file of each rank. A full version is one safetensors file, into which each rank writes its rows
where they belong: no rank gathers or holds a whole model. All ranks must see the same folder. What they wrote
is on the disk before rank 0 gets the receipts.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from tidemill.common.weights.bits import safetensors_layout
from tidemill.common.weights.digest import Digest
from tidemill.common.wire.messages import WeightFile
from tidemill.services.trainer.weights.exported import plan_export
from tidemill.services.trainer.weights.peers import Peers, pack, unpack, write_together
from tidemill.services.trainer.weights.shadow import Comparison, Shadow
from tidemill.services.trainer.weights.store import WEIGHTS_FILE, list_files, whole_tensor


def sum_over_ranks(digest: Digest, peers: Peers) -> Digest:
    """The sum of all ranks' parts. A call of all ranks."""
    return sum((unpack(packed, Digest) for packed in peers.gather(pack(digest))), Digest())


class ShardWriter:
    """One rank's part of every version. All ranks make the same calls in the same order."""

    def __init__(
        self,
        model: PreTrainedModel,
        tensors: Mapping[str, Tensor],
        dtype: torch.dtype,
        peers: Peers,
        max_share: float = 1.0,
    ) -> None:
        self._model = model
        self._peers = peers
        self.shadow = Shadow(plan_export(model, tensors, dtype), dtype, peers.rank == 0, max_share)
        if self.shadow.is_held:
            # Versions of other models are all full. Loaded now: a rank that cannot load it ends before it
            # trains a step, and not as the first delta is written.
            import tidemill.common.weights.delta  # noqa: F401
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights")
        self._pending: Future[tuple[WeightFile, ...]] | None = None

    def compare(self, tensors: Mapping[str, Tensor]) -> Comparison:
        """The comparison over all ranks. First waits for a write in progress, which reads the shadow."""
        self.wait()
        comparison = self.shadow.compare(tensors, self._converted(tensors))
        parts: list[Comparison] = [
            unpack(packed, Comparison, Digest) for packed in self._peers.gather(pack(comparison))
        ]
        return sum(parts[1:], parts[0])

    def measure(self, tensors: Mapping[str, Tensor]) -> Digest:
        """The digest of the weights as they are, over all ranks."""
        return sum_over_ranks(self.shadow.measure(tensors, self._converted(tensors)), self._peers)

    def begin(
        self, sources: Callable[[], Mapping[str, Tensor]], folder: Path, version: int, parent: int
    ) -> Future[tuple[WeightFile, ...]]:
        """Start to write what the last comparison took in, as a delta to `parent`, or in full where that is
        -1. The weights may change as soon as this returns.

        Of weights of more than two bytes no copy is held. They are read from `sources`, and this returns once
        they are written.

        The result on rank 0 is the files; it raises StorageError where a rank's disk did not take its own.
        """
        self.wait()
        if not self.shadow.is_held:
            tensors = sources()
            self.shadow.hold(tensors, self._converted(tensors))
        self.shadow.follow()
        self._pending = self._thread.submit(self._write, folder, version, parent)
        if not self.shadow.is_held:
            self.wait()
            self.shadow.hold({}, {})  # releases them
        return self._pending

    def wait(self) -> None:
        if self._pending is not None:
            wait([self._pending])

    def _write(self, folder: Path, version: int, parent: int) -> tuple[WeightFile, ...]:
        write = partial(self._write_full if parent < 0 else self._write_delta, folder)
        written = write_together(self._peers, "weights", f"the weights of version {version}", folder, write)
        if parent < 0:
            # No rank has written all of its bytes: rank 0 reads them once more for the checksum.
            return list_files(folder) if self._peers.rank == 0 else ()
        return tuple(WeightFile.model_validate(file) for file in written)

    def _write_delta(self, folder: Path) -> dict[str, Any]:
        from tidemill.common.weights.delta import DeltaWriter, delta_name  # `__init__` has loaded it

        writer = DeltaWriter(folder / delta_name(self._peers.rank, self._peers.size))
        self.shadow.write_changes(writer)
        file = writer.write()
        # Opened again for the fsync at the end: a receipt says that the bytes are on the disk.
        with _opened(writer.path):
            return file.model_dump()

    def _write_full(self, folder: Path) -> None:
        """This rank's elements, at their places in the one file; rank 0 writes its head too."""
        head, offsets = safetensors_layout(self.shadow.plan.infos)
        with _opened(folder / WEIGHTS_FILE) as file:
            if self._peers.rank == 0:
                _write_at(file, head, 0)
            for info, start, values in self.shadow.runs():
                _write_at(file, values.data.cast("B"), offsets[info.name] + start * values.dtype.itemsize)

    def _converted(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The published tensors that are no slices: gathered by all, converted and held by rank 0."""
        plan = self.shadow.plan
        # Sorted: a set of names has another order in each process, and all ranks must gather in the same one.
        whole = {name: whole_tensor(tensors[name].detach()) for name in sorted(plan.sources_of_converted)}
        if not whole or self._peers.rank:
            return {}
        wanted = {info.name for info in plan.converted}
        converted = revert_weight_conversion(self._model, whole).items()
        return {name: tensor for name, tensor in converted if name in wanted}


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """The file, made where it is not there; flushed to the disk at the end."""
    # Not truncated: other ranks may have written their rows by now. And not for reading: over NFS whole pages
    # would be written then, with what they held before ranks on other hosts wrote theirs.
    file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        yield file
        os.fsync(file)
    finally:
        os.close(file)


def _write_at(file: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, offset)
        view = view[written:]
        offset = offset + written

"""The shadow: weights of the version before, on each rank for its own shard, in the dtype of the export.

After an update the shadow is compared with the weights bit by bit: NaN equals itself, 0.0 and -0.0 differ.
What changed is kept until it is written, and the digest follows from it. A shadow is a version: only
`compare` changes it, so files can be written from it while the weights change.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tidemill.common.weights.bits import Bits, TensorInfo
from tidemill.common.weights.digest import Digest, DigestSum, header_digest
from tidemill.services.trainer.weights.exported import ExportPlan, exported_dtype

if TYPE_CHECKING:
    from tidemill.common.weights.delta import DeltaWriter

NUM_BUFFERS = 2
"""One is filled while the other is used."""


class HostCopies:
    """Reads tensors of one device into host memory, beside what it computes.

    On a stream of their own, into page-locked buffers. On the stream of training a copy would wait for all
    work that is enqueued there, and later work of training for the copy.
    """

    def __init__(self) -> None:
        self._stream: Any = None
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * NUM_BUFFERS

    def follow(self, tensors: Iterable[Tensor]) -> None:
        """Have later reads wait for the work on these tensors that is enqueued by now. Called by the thread
        that has enqueued it."""
        for device in {tensor.device for tensor in tensors if _is_on_device(tensor)}:
            self._stream = self._stream or torch.cuda.Stream(device)
            self._stream.wait_stream(torch.cuda.current_stream(device))

    def read(self, tensors: Iterable[Tensor]) -> Iterator[Tensor]:
        """The flat tensors in host memory, in their order; each is valid until the next one is read."""
        arrived: Callable[[], Tensor] | None = None
        for number, tensor in enumerate(tensors):
            # Begun before the tensor ahead of it is yielded: it is copied while that one is used.
            coming = self._begin(tensor, number % NUM_BUFFERS)
            if arrived is not None:
                yield arrived()
            arrived = coming
        if arrived is not None:
            yield arrived()

    def _begin(self, tensor: Tensor, number: int) -> Callable[[], Tensor]:
        """Start to copy; what is returned waits for the copy."""
        if not _is_on_device(tensor):
            return lambda: tensor
        num_bytes = tensor.numel() * tensor.element_size()
        # Never made smaller: to lock pages takes longer than to copy.
        if len(self._buffers[number]) < num_bytes:
            self._buffers[number] = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        host = self._buffers[number][:num_bytes].view(tensor.dtype)
        with torch.cuda.stream(self._stream):
            host.copy_(tensor, non_blocking=True)
            event = self._stream.record_event()
        # Keeps the source until it has been read: else its memory could be given to another stream.
        return partial(_after, event, host, tensor)


def _after(event: Any, host: Tensor, _source: Tensor) -> Tensor:
    event.synchronize()
    return host


CHUNK = 1 << 20
DEVICE_CHUNK = 1 << 24
"""Elements compared at once, in the CPU's memory and on a GPU. The CPU's chunk stays in its cache. A GPU's is
larger, because each chunk waits once for the GPU, for the number of changes."""
DENSE_SHARE = 0.4
"""Share of a chunk: where more has changed, all its values are written, without positions."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A version compared with the one before, over the parts of one rank, or of all."""

    digest: Digest
    before: Digest | None
    """The shadow's digest before; None for the first comparison of a process."""
    num_changed: int
    num_elements: int
    num_bytes: int
    """Bytes of the version in full, without its header."""

    @property
    def share_changed(self) -> float:
        return self.num_changed / max(self.num_elements, 1)

    def __add__(self, other: "Comparison") -> "Comparison":
        before = None
        if self.before is not None and other.before is not None:
            before = self.before + other.before
        return Comparison(
            digest=self.digest + other.digest,
            before=before,
            num_changed=self.num_changed + other.num_changed,
            num_elements=self.num_elements + other.num_elements,
            num_bytes=self.num_bytes + other.num_bytes,
        )


@dataclass(frozen=True, slots=True)
class ShardPiece:
    """Consecutive elements of a published tensor, which this rank owns.

    Example: elements 12 to 23 of the model's tensor `source` are published as a tensor of their own. Of
    `source` this rank has elements 16 to 31 as its shard. Its piece are elements 16 to 23: `start` 4,
    `shard_start` 0, `count` 8.
    """

    info: TensorInfo
    """The published tensor."""
    start: int
    """Position of the first element in the published tensor."""
    source: str
    shard_start: int
    """Position of the first element in this rank's shard of `source`."""
    count: int


@dataclass(slots=True)
class Change:
    """What changed in a chunk of a piece; `values` is None where all of the chunk is to be written."""

    piece: ShardPiece
    offset: int
    count: int
    positions: Bits | None = None
    values: Bits | None = None


@dataclass(slots=True)
class Shadow:
    """One rank's shadow. Weights of two bytes are held; wider ones are measured again each time, and written
    in full. `max_share`: once a larger share has changed since the last comparison, the version will be full,
    and changes are no longer kept."""

    plan: ExportPlan
    dtype: torch.dtype
    is_leader: bool = True
    max_share: float = 1.0
    pieces: list[ShardPiece] = field(default_factory=list)
    num_changed: int = 0
    _held: dict[str, Tensor] = field(default_factory=dict)
    _digest: Digest | None = None
    _buffers: dict[torch.dtype, Tensor] = field(default_factory=dict)
    """Memory for the weights of a chunk in the dtype of the export, made once."""
    _changes: list[Change] = field(default_factory=list)
    _copies: HostCopies = field(default_factory=HostCopies)

    @property
    def is_held(self) -> bool:
        """Whether files can be written from it."""
        return self.dtype.itemsize == 2

    def compare(self, tensors: Mapping[str, Tensor], converted: Mapping[str, Tensor]) -> Comparison:
        """Take in the current weights: `tensors` by the names of the model, local or sharded by rows, and on
        rank 0 the published tensors that are no slices (`converted`)."""
        self._changes = []
        before = self._digest
        if before is None or not self.is_held:
            digest = self.measure(tensors, converted)
            self.num_changed = self._num_elements
            if self.is_held:
                self._hold_copies(tensors, converted)
        else:
            digest = before + self._take_changes(tensors, converted)
        self._digest = digest
        num_bytes = sum(piece.count * piece.info.bits_dtype.itemsize for piece in self.pieces)
        return Comparison(digest, before, self.num_changed, self._num_elements, num_bytes)

    def _hold_copies(self, tensors: Mapping[str, Tensor], converted: Mapping[str, Tensor]) -> None:
        sources = {piece.source for piece in self.pieces}
        for name, flat in _flats(tensors, converted).items():
            if name in sources:
                # A copy in any case: else the shadow would move with weights of its dtype.
                self._held[name] = flat.to(exported_dtype(flat, self.dtype), copy=True)

    def _take_changes(self, tensors: Mapping[str, Tensor], converted: Mapping[str, Tensor]) -> Digest:
        """Bring what is held to the current weights; returns how that changes the digest."""
        self.num_changed = 0
        flats = _flats(tensors, converted)
        total = DigestSum()
        for piece in self.pieces:
            flat = flats[piece.source]
            for offset, count in _chunks(piece, flat):
                self._compare_chunk(piece, offset, count, flat, total)
        return total.read()

    def measure(self, tensors: Mapping[str, Tensor], converted: Mapping[str, Tensor]) -> Digest:
        """The digest of this rank's part of the current weights; the shadow stays as it is."""
        if not self.pieces:
            self._begin(tensors)
        flats = _flats(tensors, converted)
        total = DigestSum()
        for piece in self.pieces:
            flat = flats[piece.source]
            for offset, count in _chunks(piece, flat):
                values = flat[piece.shard_start + offset :][:count]
                bits = _as_bits(values.to(exported_dtype(values, self.dtype)))
                total.add_run(piece.info, piece.start + offset, bits)
        headers = (header_digest(info) for info in self.plan.infos if self.is_leader)
        return sum(headers, total.read())

    def _compare_chunk(
        self, piece: ShardPiece, offset: int, count: int, flat: Tensor, total: DigestSum
    ) -> None:
        begin = piece.shard_start + offset
        values = self._held[piece.source]
        if values.dtype not in self._buffers:
            self._buffers[values.dtype] = values.new_empty(DEVICE_CHUNK if _is_on_device(values) else CHUNK)
        held = _as_bits(values[begin : begin + count])
        # Rounded by the copy, as an export rounds.
        now = _as_bits(self._buffers[values.dtype][:count].copy_(flat[begin : begin + count]))
        places = _unlike(now, held)
        if not len(places):
            return
        self.num_changed += len(places)
        start = piece.start + offset
        change = Change(piece, offset, count)
        if len(places) > DENSE_SHARE * count:
            total.add_run(piece.info, start, held, sign=-1)
            total.add_run(piece.info, start, now)
        else:
            new = now[places]
            total.add_change(piece.info, places + start, held[places], new)
            if self.num_changed <= self.max_share * self._num_elements:
                # Within a chunk 32 bits are enough; the chunk's own place is added in 64 when it is written.
                change.positions = places.to(torch.int32).cpu().numpy()
                change.values = _numpy(new, piece.info)
        self._changes.append(change)
        # After the digest, which takes away the old values and adds the new ones.
        held.copy_(now)

    @property
    def _num_elements(self) -> int:
        return sum(piece.count for piece in self.pieces)

    def hold(self, tensors: Mapping[str, Tensor], converted: Mapping[str, Tensor]) -> None:
        """Have these weights written without a copy: they must not change meanwhile."""
        flats = _flats(tensors, converted).items()
        self._held = {name: flat.to(exported_dtype(flat, self.dtype)) for name, flat in flats}

    def move(self, moved: Callable[[Tensor], Tensor]) -> None:
        """Hold copies in place of what is held. A file that is being written is read from either."""
        for name in list(self._held):
            self._held[name] = moved(self._held[name])

    def follow(self) -> None:
        """Have later writes wait for the last `compare`; called by the thread that called it."""
        self._copies.follow(self._held.values())

    def write_changes(self, writer: "DeltaWriter") -> None:
        # `runs` has the values of each change that lacks its own, in the order of the changes.
        dense = (self._bits(c.piece, c.offset, c.count) for c in self._changes if c.values is None)
        runs = self._copies.read(dense)
        for change in self._changes:
            info = change.piece.info
            start = change.piece.start + change.offset
            if change.positions is None or change.values is None:
                writer.add_run(info, start, _numpy(next(runs), info))
            else:
                writer.add(info, change.positions.astype(np.int64) + start, change.values)

    def runs(self) -> Iterator[tuple[TensorInfo, int, Bits]]:
        """All that this rank holds, chunk by chunk: tensor, first position, values, which are valid until the
        next chunk is read."""
        chunks = [
            (piece, offset, min(DEVICE_CHUNK, piece.count - offset))
            for piece in self.pieces
            for offset in range(0, piece.count, DEVICE_CHUNK)
        ]
        values = self._copies.read(self._bits(*chunk) for chunk in chunks)
        for (piece, offset, _), bits in zip(chunks, values, strict=True):
            yield piece.info, piece.start + offset, _numpy(bits, piece.info)

    def _begin(self, tensors: Mapping[str, Tensor]) -> None:
        """Find out which elements of the published tensors this rank holds."""
        for published in self.plan.slices:
            low, high = owned_range(tensors[published.source], self.is_leader)
            begin = max(low, published.first)
            end = min(high, published.end)
            if begin < end:
                piece = ShardPiece(
                    published.info,
                    start=begin - published.first,
                    source=published.source,
                    shard_start=begin - low,
                    count=end - begin,
                )
                self.pieces.append(piece)
        if self.is_leader:
            for info in self.plan.converted:
                whole = ShardPiece(info, 0, _own_name(info.name), 0, info.num_elements)
                self.pieces.append(whole)

    def _bits(self, piece: ShardPiece, offset: int, count: int) -> Tensor:
        return _as_bits(self._held[piece.source][piece.shard_start + offset :][:count])


def _is_on_device(tensor: Tensor) -> bool:
    return tensor.device.type != "cpu"


def _chunks(piece: ShardPiece, flat: Tensor) -> Iterator[tuple[int, int]]:
    """Offset and number of elements of what is compared at once."""
    size = DEVICE_CHUNK if _is_on_device(flat) else CHUNK
    for offset in range(0, piece.count, size):
        yield offset, min(size, piece.count - offset)


def _unlike(now: Tensor, held: Tensor) -> Tensor:
    """Positions where they differ, ascending. In the CPU's memory numpy takes half of torch's time."""
    if _is_on_device(now):
        return torch.nonzero(now != held).squeeze(1)
    return torch.from_numpy(np.flatnonzero(now.numpy() != held.numpy()))


def _own_name(name: str) -> str:
    """The name under which a converted tensor is held, because a source may have its own name."""
    return f"exported:{name}"


def _flats(tensors: Mapping[str, Tensor], converted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """This rank's elements of each tensor as a vector."""
    named = dict(tensors) | {_own_name(name): tensor for name, tensor in converted.items()}
    local = {name: t.to_local() if isinstance(t, DTensor) else t for name, t in named.items()}
    return {name: tensor.detach().contiguous().reshape(-1) for name, tensor in local.items()}


def owned_range(tensor: Tensor, is_leader: bool) -> tuple[int, int]:
    """Which flat elements of the whole tensor this rank owns, so that each has one owner.

    Rank 0 owns a tensor that all ranks have; the first copy of the model owns what several copies have.
    """
    if not isinstance(tensor, DTensor):
        return (0, tensor.numel()) if is_leader else (0, 0)
    axes = enumerate(tensor.placements)
    is_copy = any(
        placement.is_replicate() and tensor.device_mesh.get_local_rank(axis) for axis, placement in axes
    )
    return (0, 0) if is_copy else held_range(tensor)


def held_range(tensor: Tensor) -> tuple[int, int]:
    """Which flat elements of the whole tensor this process has: rows where ranks share it, else all."""
    if not isinstance(tensor, DTensor):
        return 0, tensor.numel()
    first, end = held_rows(tensor)
    width = tensor.numel() // max(tensor.shape[0], 1)
    return first * width, end * width


def held_rows(tensor: DTensor) -> tuple[int, int]:
    """The tensor's first row in this process, and the row after its last. The last axis of the mesh divides
    all rows, the one before it each of these shares, and so on; copies of the model have the same rows."""
    mesh = tensor.device_mesh
    first = 0
    end = tensor.shape[0]
    for axis in reversed(range(mesh.ndim)):
        if not tensor.placements[axis].is_replicate():
            start, stop = rows_of(end - first, mesh.get_local_rank(axis), mesh.size(axis))
            # `stop` counts from the same row as `start`.
            end = first + stop
            first += start
    return first, end


def rows_of(num_rows: int, rank: int, size: int) -> tuple[int, int]:
    """First row and end of a rank's share. 5 rows over 2 ranks are (0, 3) and (3, 5)."""
    # Rounded up, as FSDP2 splits rows: the last ranks may have fewer, or none.
    count = -(-num_rows // size)
    return min(num_rows, rank * count), min(num_rows, (rank + 1) * count)


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _as_bits(tensor: Tensor) -> Tensor:
    return tensor.view(_INTEGERS[tensor.element_size()])


def _numpy(bits: Tensor, info: TensorInfo) -> Any:
    return bits.cpu().numpy().view(info.bits_dtype)

"""Where a checkpoint's values lie in the parameters that an engine computes with.

The model's own loader shows it: it is called with tensors that have a shape and no memory. Every slice and
view that it makes of them on the way to a `copy_` keeps its offset and strides, and so names the positions of
the checkpoint's tensor that the parameter gets. So the engine's weights can be read in the checkpoint's
coordinates, however the engine splits and fuses them. A loader that does more than view and copy cannot be
followed: then `trace` raises, and such a model is updated with full versions only.
"""

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tidemill.common.errors import WeightsError
from tidemill.common.weights.bits import TORCH_NAMES, Bits, TensorInfo
from tidemill.common.weights.delta import Patch, merge
from tidemill.common.weights.digest import Digest, DigestSum

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, torch_name) for name, torch_name in TORCH_NAMES.items()
}
"""Name in safetensors -> dtype."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Width in bytes -> integer dtype, to compare bits."""

DEVICE_RESERVE_BYTES = 1 << 30
"""Left free on a GPU: changes that do not fit beside it are staged in host memory."""
ALIGNMENT = 256
CHUNK = 1 << 24
"""Elements of a part of a staged version that are on the device at once for its digest."""


def as_bits(values: Tensor) -> Tensor:
    return values.view(BITS[values.element_size()])


def as_tensor(info: TensorInfo, flat: Bits) -> Tensor:
    """The bits as a tensor of its own dtype and shape, in the same memory."""
    if not flat.flags.writeable:
        flat = flat.copy()  # of a file's bytes; torch has no tensors that cannot be written
    signed = torch.from_numpy(flat.view(f"i{flat.dtype.itemsize}" if flat.dtype.itemsize > 1 else "u1"))
    assert signed.dtype == BITS[flat.dtype.itemsize]
    return signed.view(DTYPES[info.dtype]).reshape(info.shape)


class Key(NamedTuple):
    """Positions of a checkpoint's tensor: `offset` plus any multiples of `strides` below `sizes`.

    Example: the last two columns of a matrix [3, 4]: `offset` 2, `sizes` (3, 2), `strides` (4, 1).
    """

    name: str
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """Positions of a checkpoint's tensor, and the part of a parameter that has their values."""

    key: Key
    info: TensorInfo
    tensor: Tensor
    """[`key.sizes`]: a view of the parameter."""

    def local(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Which of the flat checkpoint positions (int64) are in this piece [bool], and where in `memory`
        those lie.

        Example: the piece of `Key`, in a parameter [3, 2] of its own. Of the positions 2, 4 and 7 the first
        and the last are in it, at 0 and 3.
        """
        remaining = positions - self.key.offset
        inside = remaining >= 0
        places = torch.zeros_like(remaining)
        for axis in _by_stride(self.key):
            index = remaining // self.key.strides[axis]
            inside &= index < self.key.sizes[axis]
            remaining = remaining - index * self.key.strides[axis]
            places += index * self.tensor.stride(axis)
        inside &= remaining == 0
        return inside, places[inside]

    def memory(self) -> Tensor:
        """The parameter's memory from the first value to the last, flat."""
        span = 1 + sum(
            (size - 1) * step for size, step in zip(self.tensor.shape, self.tensor.stride(), strict=True)
        )
        return self.tensor.as_strided((span,), (1,))

    def values(self, places: Tensor) -> Tensor:
        """What lies there in `memory`, as bits of the checkpoint's dtype."""
        return as_bits(self.memory()[places].to(DTYPES[self.info.dtype]))

    def part(self, whole: Tensor) -> Tensor:
        """The piece of the checkpoint's tensor, a view where that is contiguous."""
        whole = whole.contiguous()
        _, offset, sizes, strides = self.key
        return whole.as_strided(sizes, strides, whole.storage_offset() + offset)

    def num_wrong(self, whole: Tensor) -> int:
        """How many of its values differ from the checkpoint's tensor, in the parameter's precision."""
        expected = self.part(whole).to(self.tensor.device).to(self.tensor.dtype)
        return int((as_bits(expected) != as_bits(self.tensor)).sum())


class StagedChange(NamedTuple):
    """New values (bits, as the parameter has them) at places of a piece's memory.

    Example: `places` [0, 7] and `values` of two elements: the first and the eighth element of the memory
    change.
    """

    piece: Piece
    places: Tensor
    """[N], int32 or int64: positions in the piece's memory."""
    values: Tensor
    """[N], integers as wide as the parameter's dtype."""

    def write(self) -> None:
        as_bits(self.piece.memory())[self._here(self.places)] = self._here(self.values)

    def num_wrong(self) -> Tensor:
        """How many differ from what the parameter holds now: one number, on its device."""
        return (as_bits(self.piece.memory())[self._here(self.places)] != self._here(self.values)).sum()

    def _here(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.piece.tensor.device, non_blocking=True)


class _Staging:
    """Collects the change of one piece, patch by patch, and joins the patches at the end. Once its device is
    full, all of the change goes to host memory."""

    def __init__(self, piece: Piece, total: DigestSum | None) -> None:
        """`total` adds up how digests change."""
        self._piece = piece
        self._total = total
        self._is_full = False
        self._places: list[Tensor] = []
        self._values: list[Tensor] = []

    def add(self, patch: Patch) -> None:
        """Add the part of a patch that lies in the piece."""
        piece = self._piece
        if patch.info != piece.info:
            raise WeightsError(f"a delta has {patch.info}, the engine {piece.info}")
        device = piece.tensor.device
        positions = torch.from_numpy(patch.all_positions()).to(device)
        inside, places = piece.local(positions)
        flat = replace(patch.info, shape=(len(patch.values),))
        values = as_tensor(flat, patch.values).to(device)[inside]
        if self._total is not None:
            positions = positions[inside]
            self._total.add_change(piece.info, positions, piece.values(places), as_bits(values))
        if piece.memory().numel() <= torch.iinfo(torch.int32).max:
            # Halves the memory of what waits for the pause, and the time to copy it.
            places = places.int()
        self._is_full = self._is_full or not _has_room(device)
        self._places.append(self._placed(places))
        self._values.append(self._placed(as_bits(values.to(piece.tensor.dtype))))

    def change(self) -> StagedChange:
        return StagedChange(self._piece, self._together(self._places), self._together(self._values))

    def _placed(self, tensor: Tensor) -> Tensor:
        return _to_host(tensor) if self._is_full else tensor

    def _together(self, tensors: Sequence[Tensor]) -> Tensor:
        whole = torch.cat([self._placed(tensor) for tensor in tensors])
        is_far = self._is_full and self._piece.tensor.is_cuda
        return whole.pin_memory() if is_far else whole  # so that writing need not wait for its copy


def _to_host(tensor: Tensor) -> Tensor:
    return tensor.cpu()


def _has_room(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.mem_get_info(device)[0] >= DEVICE_RESERVE_BYTES


def apply(changes: Sequence[StagedChange]) -> int:
    """Write changes; returns how many values the parameters do not hold afterwards. A device is waited for
    once, in the end."""
    counts: dict[torch.device, Tensor] = {}
    for change in changes:
        change.write()
    for change in changes:
        number = change.num_wrong()
        counts[number.device] = counts.get(number.device, 0) + number
    return sum(int(count) for count in counts.values())


class HeldWeights:
    """All pieces that one process holds."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self.pieces: dict[str, list[Piece]] = {}
        seen: set[tuple[Key, int]] = set()
        for piece in pieces:
            if (piece.key, piece.tensor.data_ptr()) not in seen:  # a tied tensor may be loaded twice
                seen.add((piece.key, piece.tensor.data_ptr()))
                self.pieces.setdefault(piece.key.name, []).append(piece)

    def __iter__(self) -> Iterator[Piece]:
        for pieces in self.pieces.values():
            yield from pieces

    def stage(
        self, deltas: Sequence[Sequence[Path]], disowned: Collection[int] = ()
    ) -> tuple[Digest, list[StagedChange]]:
        """Read what deltas change here. Returns the change of the digest of the held weights, without the
        pieces `disowned` (by their order), and the changes to write.

        Raises:
            WeightsError: a delta is damaged, or of another model.
        """
        is_counted = {id(piece): index not in disowned for index, piece in enumerate(self)}
        total = DigestSum()
        changes = []
        for name, patches in groupby(merge(deltas), key=lambda patch: patch.info.name):
            pieces = self.pieces.get(name, [])
            parts = [_Staging(piece, total if is_counted[id(piece)] else None) for piece in pieces]
            for patch in patches:
                for staging in parts:
                    staging.add(patch)
            changes += [staging.change() for staging in parts]
        return total.read(), [change for change in changes if len(change.places)]

    def reason_not_to_patch(self) -> str:
        """Why the checkpoint's values cannot be read from the parameters: one is less precise, or holds two
        tensors; empty if they can."""
        homes: dict[tuple[int, Any], str] = {}
        for piece in self:
            dtype = DTYPES[piece.info.dtype]
            if torch.promote_types(dtype, piece.tensor.dtype) != piece.tensor.dtype:
                return f"{piece.key.name} is {dtype} in the files and {piece.tensor.dtype} in the engine"
            home = homes.setdefault((piece.tensor.data_ptr(), piece.tensor.stride()), piece.key.name)
            if home != piece.key.name:
                return f"{home} and {piece.key.name} share one parameter"
        return ""


class HostMemory:
    """Page-locked memory of exactly the size asked for. It is kept: locking takes longer than filling."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int, is_locked: bool) -> Tensor:
        """`num_bytes` of it; what was taken before is overwritten."""
        if len(self._memory) < num_bytes:
            if is_locked and len(self._memory):
                # Before the memory is freed: CUDA would go on taking its addresses for locked ones.
                torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr()))
            # Torch's own page-locked memory is rounded up to a power of two.
            self._memory = torch.empty(num_bytes, dtype=torch.uint8)
            if is_locked:
                cudart = torch.cuda.cudart()
                torch.cuda.check_error(cudart.cudaHostRegister(self._memory.data_ptr(), num_bytes, 0))
        return self._memory[:num_bytes]


class StagedVersion:
    """Every part of one full version that a rank holds, in page-locked host memory as its parameters have it.

    Everything that takes long is done before generation pauses: files are read, deltas merged, dtypes
    converted, parts cut out, and their digest taken. In the pause parts are copied, and the digest of what
    the parameters hold is summed on the device beside the copies that follow; one number is read.
    """

    def __init__(self, held: HeldWeights, tensors: Iterable[tuple[str, Tensor]], memory: HostMemory) -> None:
        """Called on a stream of its own where the parameters are on a GPU."""
        self._parts: list[tuple[Piece, Tensor]] = []
        self._is_on_gpu = any(_is_on_gpu(piece.tensor) for piece in held)
        starts = dict[int, int]()  # where each part begins, by the piece's identity
        end = 0
        for piece in held:
            starts[id(piece)] = end
            # Aligned, for a view of a wider dtype has to begin at a multiple of its size.
            end += -(-piece.tensor.numel() * piece.tensor.element_size() // ALIGNMENT) * ALIGNMENT
        buffer = memory.take(end, is_locked=self._is_on_gpu)
        for name, whole in tensors:
            for piece in held.pieces.get(name, []):
                size = piece.tensor.numel() * piece.tensor.element_size()
                host = buffer[starts[id(piece)] :][:size].view(piece.tensor.dtype).view(piece.tensor.shape)
                self._parts.append((piece, host.copy_(piece.part(whole))))
        self._expected = self._digest(host for _, host in self._parts)

    def write(self) -> bool:
        """Copy all of it, and read it back; returns whether the parameters hold it now."""
        return self._digest(self._copied()) == self._expected

    def _copied(self) -> Iterator[Tensor]:
        """Copy, and yield each parameter's part once its values are there for this thread's stream."""
        if not self._is_on_gpu:
            for piece, host in self._parts:
                yield piece.tensor.copy_(host)
            return
        device = self._parts[0][0].tensor.device
        mine = torch.cuda.current_stream(device)
        copying = torch.cuda.Stream(device)
        # The last batch of the old weights may still read what is written over now.
        copying.wait_stream(mine)
        arrivals = []
        with torch.cuda.stream(copying):
            for piece, host in self._parts:
                piece.tensor.copy_(host, non_blocking=True)
                arrivals.append(copying.record_event())
        for (piece, _), arrived in zip(self._parts, arrivals, strict=True):
            mine.wait_event(arrived)
            yield piece.tensor

    def _digest(self, tensors: Iterable[Tensor]) -> Digest:
        total = DigestSum()
        for index, ((piece, _), tensor) in enumerate(zip(self._parts, tensors, strict=True)):
            # Named by its place, so that mixed-up parts give another digest.
            info = TensorInfo(str(index), NAMES[tensor.dtype], tuple(tensor.shape))
            flat = tensor.reshape(-1)
            for start in range(0, len(flat), CHUNK):
                chunk = flat[start : start + CHUNK].to(piece.tensor.device, non_blocking=True)
                total.add_run(info, start, as_bits(chunk))
        return total.read()


def _is_on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda


def trace(
    load: Callable[[Iterable[tuple[str, Tensor]]], Any], infos: Iterable[TensorInfo]
) -> tuple[HeldWeights, set[str]]:
    """Follow `load` (a model's `load_weights`); returns the pieces, and the names that it says it loaded.

    No parameter changes. Raises ValueError: the loader does more than view and copy. AssertionErrors pass.
    """
    # Keyed by address: `tensors` keeps all of them alive, so that no address is reused.
    by_memory: dict[int, TensorInfo] = {}
    tensors = []
    for info in infos:
        tensor = torch.empty(info.shape, dtype=DTYPES[info.dtype], device="meta")
        by_memory[tensor.untyped_storage()._cdata] = info
        tensors.append((info.name, tensor))
    pieces: list[Piece] = []

    def record(target: Tensor, source: Tensor) -> None:
        info = by_memory.get(source.untyped_storage()._cdata) if source.is_meta else None
        if info is None or target.shape != source.shape:
            raise ValueError("the model's loader computes with what it loads")
        key = Key(info.name, int(source.storage_offset()), tuple(source.shape), tuple(source.stride()))
        _check_nested(key)
        pieces.append(Piece(key, info, target.detach()))

    try:
        with torch.no_grad(), _writes_go_to(record):
            loaded = load(tensors)
    # What torch raises where code reads a value of a tensor that has none.
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"the model's loader cannot be followed: {error}") from error
    return HeldWeights(pieces), set(loaded or ())


class _Item(float):
    """The value of a tensor of one element that has no memory."""

    tensor: Tensor


@contextmanager
def _writes_go_to(record: Callable[[Tensor, Tensor], None]) -> Iterator[None]:
    """In this thread `copy_` calls `record(target, source)` and writes nothing, and so does a `fill_` with
    the `item` of a tensor without memory. vLLM's own patches take hold in the same place.
    """
    mine = threading.get_ident()
    originals = (torch.Tensor.copy_, torch.Tensor.fill_, torch.Tensor.item)
    copy, fill, item = originals

    def copy_(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if threading.get_ident() != mine:
            return copy(target, source, non_blocking)
        record(target, source)
        return target

    def fill_(target: Tensor, value: Any) -> Tensor:
        if isinstance(value, _Item):
            record(target, value.tensor.reshape(target.shape))
            return target
        return target if threading.get_ident() == mine else fill(target, value)

    def item_(tensor: Tensor) -> Any:
        if not tensor.is_meta or tensor.numel() != 1:
            return item(tensor)
        value = _Item()
        value.tensor = tensor
        return value

    patched: Any = torch.Tensor
    # Patched for the whole process: copies by other threads are told apart by the thread's id.
    patched.copy_ = copy_
    patched.fill_ = fill_
    patched.item = item_
    try:
        yield
    finally:
        patched.copy_, patched.fill_, patched.item = originals


def _by_stride(key: Key) -> list[int]:
    """Axes that matter, the widest stride first."""
    axes = [axis for axis, size in enumerate(key.sizes) if size > 1]
    return sorted(axes, key=lambda axis: -key.strides[axis])


def _check_nested(key: Key) -> None:
    """Raises ValueError: positions are not unique, or not in the nested strides of slices and transposes."""
    axes = _by_stride(key)
    for outer, inner in pairwise(axes):
        if key.strides[outer] < key.strides[inner] * key.sizes[inner]:
            raise ValueError(f"{key} is not a part of a tensor")
    if axes and key.strides[axes[-1]] < 1:
        raise ValueError(f"{key} repeats a value")

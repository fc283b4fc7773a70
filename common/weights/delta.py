"""Delta files: the changed elements of one rank's shard, with their new values. Names and positions are those
of the checkpoint, whatever the rank's shard looks like.

A delta is a safetensors file. Each of its tensors is one record, a zlib stream of bytes; the metadata have
its `Header`. A record lies within one window of `WINDOW` flat positions of one tensor, so a reader holds one
window, never a tensor.

A sparse record holds gaps, then values: a gap counts from the position before it, and the first one is 0. A
dense record holds the values of consecutive elements. The positions 7, 9 and 14: start 7, gaps 0, 2, 5.

Gaps and values are written as byte planes (all low bytes, then the next ones): their upper bytes repeat, so
they compress to little. Values overwrite: applying a record twice does no harm.
"""

import json
import shutil
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from tidemill.common.errors import WeightsError
from tidemill.common.weights.bits import (
    WIDTHS,
    Bits,
    TensorInfo,
    read_metadata,
    read_safetensors,
    safetensors_layout,
)
from tidemill.common.weights.digest import digest_of, is_additive
from tidemill.common.wire.messages import WeightFile, WeightManifest

WINDOW = 1 << 22
"""Positions that a record may span: it lies within [n * WINDOW, (n + 1) * WINDOW)."""
GAP = np.dtype("<u4")
Positions = np.ndarray[Any, np.dtype[np.int64]]
Header = tuple[str, str, tuple[int, ...], int, int, bool]
"""Name, dtype and shape of a record's tensor, then `start`, `count` and `is_sparse` as `Record` has them:
("model.norm.weight", "BF16", (576,), 7, 3, True)."""


def delta_name(rank: int, size: int) -> str:
    return f"delta-{rank:05}-of-{size:05}.safetensors"


@dataclass(frozen=True, slots=True)
class Patch:
    """New values of one tensor, within one window. `positions`: flat, ascending; None where the values are of
    consecutive elements from `start` on.

    Example: of a tensor of shape (2, 3), the elements [0, 1] and [1, 2]: `start` 1, `positions` [1, 5], and
    two values. All of its second row: `start` 3, three values, no positions.
    """

    info: TensorInfo
    start: int
    values: Bits
    """[N], the bits of each element as an unsigned integer."""
    positions: Positions | None = None
    """[N], int64."""

    def all_positions(self) -> Positions:
        if self.positions is not None:
            return self.positions
        return np.arange(self.start, self.start + len(self.values), dtype=np.int64)

    def apply(self, flat: Bits, first: int = 0) -> None:
        """Overwrite elements of a flat tensor, of which `flat` begins at position `first`."""
        if self.positions is None:
            flat[self.start - first : self.start - first + len(self.values)] = self.values
        else:
            flat[self.positions - first] = self.values


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """The place of a record in its tensor; `payload` is mapped, so its bytes stay on disk until `decode`.

    Example: `start` 1, `count` 2, sparse: two elements from position 1 on; the payload has their gaps and
    values.
    """

    path: Path
    info: TensorInfo
    start: int
    count: int
    is_sparse: bool
    payload: Bits
    """[bytes of the record], uint8."""

    @property
    def window(self) -> int:
        return self.start // WINDOW

    @property
    def end(self) -> int:
        """First position after its window, or after the tensor."""
        return min(self.info.num_elements, (self.window + 1) * WINDOW)

    def decode(self) -> Patch:
        """Its values and positions. Raises WeightsError: they are damaged."""
        try:
            return self._unpacked()
        except (ValueError, zlib.error) as error:
            raise WeightsError(f"delta file {self.path}, {self.info.name}: {error}.") from None

    def _unpacked(self) -> Patch:
        dtype = self.info.bits_dtype
        num_gap_bytes = self.count * GAP.itemsize if self.is_sparse else 0
        num_bytes = num_gap_bytes + self.count * dtype.itemsize
        unpacker = zlib.decompressobj()
        # At most one byte more than expected: memory is bounded for a damaged stream.
        data = np.frombuffer(unpacker.decompress(self.payload.tobytes(), num_bytes + 1), np.uint8)
        if not unpacker.eof or len(data) != num_bytes:
            raise ValueError(f"it unpacks to {len(data):,} bytes, which are not {self.count:,} elements")
        values = _from_planes(data[num_gap_bytes:], dtype)
        if not self.is_sparse:
            return Patch(self.info, self.start, values)
        gaps = _from_planes(data[:num_gap_bytes], GAP)
        positions = np.cumsum(gaps, dtype=np.int64) + self.start
        # The first position is `start` itself, and a gap of 0 would name an element twice.
        if gaps[0] or not gaps[1:].all() or positions[-1] >= self.end:
            raise ValueError("its positions are not ascending, or lie outside")
        return Patch(self.info, self.start, values, positions)


class DeltaWriter:
    """Collects the compressed records of one file in memory, because the file's header lists them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._headers: list[Header] = []
        self._payloads: list[bytes] = []

    def add(self, info: TensorInfo, positions: Positions, values: Bits) -> None:
        """Changed elements anywhere in a tensor: flat positions, strictly ascending, and their values."""
        if not len(positions):
            return
        first_window = int(positions[0]) // WINDOW
        last_window = int(positions[-1]) // WINDOW
        # Where in `positions` each window after the first begins.
        begins = np.searchsorted(positions, np.arange(first_window + 1, last_window + 1) * WINDOW)
        pairs = zip(np.split(positions, begins), np.split(values, begins), strict=True)
        for window_positions, window_values in pairs:
            if len(window_positions):
                start = int(window_positions[0])
                # Below WINDOW, so 32 bits hold them.
                gaps = np.diff(window_positions, prepend=start).astype(GAP)
                content = _planes(gaps) + _planes(window_values)
                self._add(info, start, len(window_positions), content, is_sparse=True)

    def add_run(self, info: TensorInfo, start: int, values: Bits) -> None:
        """The values of consecutive elements, changed or not."""
        end = start + len(values)
        first = start
        # One record for each window that the run reaches into.
        while first < end:
            stop = min(end, (first // WINDOW + 1) * WINDOW)
            content = _planes(values[first - start : stop - start])
            self._add(info, first, stop - first, content, is_sparse=False)
            first = stop

    def write(self) -> WeightFile:
        """Write the file; the caller flushes it to disk when it publishes the folder."""
        records = json.dumps(self._headers, separators=(",", ":"))
        metadata = {"records": records, "checksum": _checksum(records)}
        infos = [TensorInfo(_name(i), "U8", (len(data),)) for i, data in enumerate(self._payloads)]
        head, _ = safetensors_layout(infos, metadata)
        checksum = xxhash.xxh3_128()
        num_bytes = 0
        with self.path.open("wb") as file:
            for data in (head, *self._payloads):
                file.write(data)
                checksum.update(data)
                num_bytes += len(data)
        return WeightFile(name=self.path.name, num_bytes=num_bytes, checksum=checksum.hexdigest())

    def _add(self, info: TensorInfo, start: int, count: int, content: bytes, *, is_sparse: bool) -> None:
        self._headers.append((info.name, info.dtype, info.shape, start, count, is_sparse))
        # Planes have few repeats other than runs: Huffman codes and runs alone (Z_RLE) are 3 times as fast.
        packer = zlib.compressobj(level=1, memLevel=9, strategy=zlib.Z_RLE)
        self._payloads.append(packer.compress(content) + packer.flush())


def read_delta(path: Path) -> list[Record]:
    """The records of one file, in order. Raises WeightsError, with file and fault: no delta, or damaged."""
    try:
        metadata = read_metadata(path)
        if not metadata.keys() >= {"records", "checksum"}:
            raise ValueError("it is no delta: its metadata lack records and their checksum")
        if metadata["checksum"] != _checksum(metadata["records"]):
            raise ValueError("the headers of its records are damaged")
        payloads = {info.name: bits for info, bits in read_safetensors(path)}
        headers = json.loads(metadata["records"])
        if payloads.keys() != {_name(number) for number in range(len(headers))}:
            raise ValueError(f"records and headers do not match: {len(payloads)} and {len(headers)}")
        return [_record(path, payloads[_name(number)], header) for number, header in enumerate(headers)]
    except (ValueError, TypeError) as error:
        raise WeightsError(f"delta file {path}: {error}.") from None


def _record(path: Path, payload: Bits, header: list[Any]) -> Record:
    name, dtype, shape, start, count, is_sparse = header
    record = Record(path, TensorInfo(name, dtype, tuple(shape)), start, count, is_sparse, payload)
    if dtype not in WIDTHS or min(shape, default=0) < 0:
        raise ValueError(f"{record.info} is not a tensor that can be read")
    if not 0 <= start < record.end or not 0 < count <= record.end - start:
        raise ValueError(f"{count} elements of {record.info} from {start} on reach beyond it or its window")
    return record


def merge(deltas: Sequence[Sequence[Path]]) -> Iterator[Patch]:
    """Merge deltas: the last written value of each changed element. Patches come sorted by tensor name and
    window; `deltas` are the files of each, oldest delta first. One window is in memory at a time.

    Raises:
        WeightsError: a file is damaged, or two deltas disagree about a tensor's shape or dtype.
    """
    windows: dict[tuple[str, int], list[Record]] = defaultdict(list)
    infos: dict[str, TensorInfo] = {}
    for path in chain.from_iterable(deltas):
        for record in read_delta(path):
            earlier = infos.setdefault(record.info.name, record.info)
            if earlier != record.info:
                raise WeightsError(f"{path}: {record.info} was {earlier} in an earlier delta.")
            windows[record.info.name, record.window].append(record)
    for key in sorted(windows):
        yield _merged([record.decode() for record in windows[key]])


def _merged(patches: Sequence[Patch]) -> Patch:
    if len(patches) == 1:
        return patches[0]
    info = patches[0].info
    first = patches[0].start // WINDOW * WINDOW
    length = min(WINDOW, info.num_elements - first)
    values = np.empty(length, info.bits_dtype)
    is_written = np.zeros(length, np.bool_)
    # Oldest delta first: the last value that was written stays.
    for patch in patches:
        patch.apply(values, first)
        # Elements that were not written stay undefined in `values`, and are not read.
        is_written[patch.all_positions() - first] = True
    changed = np.flatnonzero(is_written)
    return Patch(info, first + int(changed[0]), values[changed], changed + first)


def _name(number: int) -> str:
    """Name of a record's tensor: safetensors sorts tensors by name, which keeps records in order."""
    return f"{number:08}"


def _checksum(records: str) -> str:
    return xxhash.xxh3_64_hexdigest(records.encode())


def _planes(values: Bits) -> bytes:
    """Byte planes: 0x0102 and 0x0304 are the bytes 02, 04, 01, 03."""
    little = np.ascontiguousarray(values, values.dtype.newbyteorder("<"))
    return little.view(np.uint8).reshape(-1, little.dtype.itemsize).T.tobytes()


def _from_planes(data: Bits, dtype: np.dtype[Any]) -> Bits:
    planes = data.reshape(dtype.itemsize, -1)
    return np.ascontiguousarray(planes.T).view(dtype).reshape(-1)


def write_whole(base: Sequence[Path], deltas: Sequence[Sequence[Path]], folder: Path) -> list[Path]:
    """Copy the files of a full version and change them by the deltas, oldest first. One window of one tensor
    is in memory at a time.

    Raises:
        WeightsError: a file is damaged, or a delta changes what the full version does not have.
    """
    # Copies, never the base itself: other chains begin with it.
    copies = [Path(shutil.copyfile(path, folder / path.name)) for path in base]
    if not deltas:
        return copies
    tensors: dict[str, tuple[TensorInfo, Bits]] = {}
    for path in copies:
        # Mapped: what `apply` writes to `bits` goes to the copy.
        for info, bits in read_safetensors(path, "r+"):
            tensors[info.name] = (info, bits)
    for patch in merge(deltas):
        if patch.info.name not in tensors:
            raise WeightsError(f"a delta changes {patch.info}, which the full version does not have.")
        info, bits = tensors[patch.info.name]
        if info != patch.info:
            raise WeightsError(f"a delta changes {patch.info}; the full version has {info}.")
        patch.apply(bits)
    return copies


def check_whole(paths: Sequence[Path], manifest: WeightManifest) -> None:
    """Check full files against their version's digest. Raises WeightsError."""
    if not is_additive(manifest.digest):
        return  # of an older release, over weights that these files do not have
    digest = str(digest_of(tensor for path in paths for tensor in read_safetensors(path)))
    if digest != manifest.digest:
        raise WeightsError(
            f"weights of version {manifest.version}: their digest is {digest}, the manifest says "
            f"{manifest.digest}: the chain of deltas does not lead to them."
        )

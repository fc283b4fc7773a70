"""Delta files: the changed elements of one rank's shard, with their new values, in checkpoint coordinates.

    file    = "TMDELTA1", head block, record blocks, end block
    block   = header length (u32), payload length (u32), CRC-32 of header and payload (u32), header, payload
    header  = msgpack map; of the head: version, parent, rank, size; of the end: the number of records
    record  = name, dtype, shape, start, count, kind; its payload is one zlib stream

A record lies within one window of `WINDOW` flat positions of one tensor, so a reader holds one window, never
a tensor. `sparse`: gaps, then values. The first gap counts from `start`, each other from the position before
it; they are u16, and 0xffff stands for 65,535 positions without an element. `dense`: values from `start` on.
Both are written as byte planes (all low bytes, then the next ones), which compress better. Values overwrite:
applying a record twice does no harm.
"""

import struct
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgpack
import numpy as np
import xxhash

from tidemill.common.errors import WeightsError
from tidemill.common.weights.bits import WIDTHS, Bits, TensorInfo
from tidemill.common.wire.messages import WeightFile

MAGIC = b"TMDELTA1"
ENCODING = "delta-1"
"""Of a version in such files, in its manifest."""
WINDOW = 1 << 22
"""Positions that a record may span: it lies within [n * WINDOW, (n + 1) * WINDOW)."""
_ESCAPE = 0xFFFF
_BLOCK = struct.Struct("<III")
_MAX_HEADER_BYTES = 1 << 16
_MAX_PAYLOAD_BYTES = 1 << 26
Positions = np.ndarray[Any, np.dtype[np.int64]]


def delta_name(rank: int, size: int) -> str:
    return f"delta-{rank:05}-of-{size:05}.tmd"


@dataclass(frozen=True, slots=True)
class Patch:
    """New values of one tensor, within one window. `positions`: flat, ascending; None where the values are of
    consecutive elements from `start` on."""

    info: TensorInfo
    start: int
    values: Bits
    positions: Positions | None = None

    @property
    def window(self) -> int:
        """Which window of the tensor it lies in."""
        return self.start // WINDOW

    def all_positions(self) -> Positions:
        if self.positions is not None:
            return self.positions
        return np.arange(self.start, self.start + len(self.values), dtype=np.int64)

    def apply(self, flat: Bits) -> None:
        """Overwrite the elements of a whole flat tensor."""
        if self.positions is None:
            flat[self.start : self.start + len(self.values)] = self.values
        else:
            flat[self.positions] = self.values


class DeltaWriter:
    """Writes one file, block by block, and its checksum as it goes; `close` makes it a whole one."""

    def __init__(self, path: Path, version: int, parent: int, rank: int = 0, size: int = 1) -> None:
        self.path, self.num_records, self.num_changed = path, 0, 0
        self._file, self._hash, self._num_bytes = path.open("wb"), xxhash.xxh3_128(), 0
        self._write(MAGIC)
        self._block({"version": version, "parent": parent, "rank": rank, "size": size})

    def add(self, info: TensorInfo, positions: Positions, values: Bits) -> None:
        """Changed elements anywhere in a tensor: flat positions, strictly ascending, and their values."""
        if not len(positions):
            return
        first, last = int(positions[0]) // WINDOW, int(positions[-1]) // WINDOW
        bounds = np.searchsorted(positions, np.arange(first + 1, last + 1) * WINDOW)
        pairs = zip(np.split(positions, bounds), np.split(values, bounds), strict=True)
        for part, new in pairs:
            if len(part):
                data = _planes(_to_gaps(part, int(part[0]))) + _planes(new)
                self._record(info, int(part[0]), len(part), "sparse", data)

    def add_run(self, info: TensorInfo, start: int, values: Bits) -> None:
        """The values of consecutive elements, changed or not."""
        end = start + len(values)
        for first in [start, *range((start // WINDOW + 1) * WINDOW, end, WINDOW)] if end > start else []:
            stop = min(end, (first // WINDOW + 1) * WINDOW)
            self._record(info, first, stop - first, "dense", _planes(values[first - start : stop - start]))

    def close(self) -> WeightFile:
        """Write the end; flushing to the disk is left to who publishes the folder."""
        self._block({"end": self.num_records})
        self._file.close()
        return WeightFile(name=self.path.name, num_bytes=self._num_bytes, checksum=self._hash.hexdigest())

    def abandon(self) -> None:
        """Close the file as it is: without an end no reader takes it."""
        self._file.close()

    def _record(self, info: TensorInfo, start: int, count: int, kind: str, data: bytes) -> None:
        # Planes have no repeats worth looking for except runs: Huffman codes and runs are 3 times as fast.
        packer = zlib.compressobj(1, zlib.DEFLATED, zlib.MAX_WBITS, 9, zlib.Z_RLE)
        payload = packer.compress(data) + packer.flush()
        head = {"name": info.name, "dtype": info.dtype, "shape": info.shape}
        self._block(head | {"start": start, "count": count, "kind": kind}, payload)
        self.num_records += 1
        self.num_changed += count

    def _block(self, header: Mapping[str, object], payload: bytes = b"") -> None:
        head: bytes = msgpack.packb(header)
        check = zlib.crc32(payload, zlib.crc32(head))
        self._write(_BLOCK.pack(len(head), len(payload), check) + head)
        self._write(payload)

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self._hash.update(data)
        self._num_bytes += len(data)


@dataclass(frozen=True, slots=True)
class Record:
    """Where a record lies, without its values."""

    path: Path
    offset: int
    info: TensorInfo
    start: int
    count: int
    kind: str

    @property
    def window(self) -> int:
        """Which window of the tensor it lies in."""
        return self.start // WINDOW


class DeltaReader:
    """Reads one file; use as a context. Raises WeightsError, which says file, place and fault: it is no delta
    file, is cut short or damaged, or names what cannot be."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._faults("at its head"):
            self._file: BinaryIO = path.open("rb")
            if self._file.read(len(MAGIC)) != MAGIC:
                raise ValueError("it does not begin as a delta file does")
            head, _ = self._block()
            self.version, self.parent = int(head["version"]), int(head["parent"])
            self.rank, self.size = int(head["rank"]), int(head["size"])
        self._first = self._file.tell()

    def __enter__(self) -> "DeltaReader":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def records(self, check: bool = True) -> Iterator[Record]:
        """All records in order, up to the end. Without `check` their payloads are passed over."""
        offset, count = self._first, 0
        while True:
            with self._faults(f"record {count} at byte {offset}"):
                self._file.seek(offset)
                header, next_offset = self._block(check)
                if "end" in header:
                    if header["end"] != count or self._file.read(1):
                        raise ValueError(f"the end tells of {header['end']} records, there are {count}")
                    return
                record = Record(self.path, offset, *_checked(header))
            yield record
            offset, count = next_offset, count + 1

    def read(self, record: Record) -> Patch:
        """The values of a record."""
        with self._faults(f"{record.info.name} at byte {record.offset}"):
            self._file.seek(record.offset)
            lengths = _BLOCK.unpack(self._exactly(_BLOCK.size))
            head, payload = self._exactly(lengths[0]), self._exactly(min(lengths[1], _MAX_PAYLOAD_BYTES))
            if zlib.crc32(payload, zlib.crc32(head)) != lengths[2]:
                raise ValueError("its bytes are not those that were written")
            return _unpack(record, payload)

    def patches(self) -> Iterator[Patch]:
        """All patches in order; one is in memory at a time."""
        for record in self.records(check=False):
            yield self.read(record)

    def _block(self, check: bool = True) -> tuple[dict[str, Any], int]:
        num_head, num_payload, crc = _BLOCK.unpack(self._exactly(_BLOCK.size))
        if num_head > _MAX_HEADER_BYTES or num_payload > _MAX_PAYLOAD_BYTES:
            raise ValueError(f"a block of {num_head:,} + {num_payload:,} bytes is no block")
        head = self._exactly(num_head)
        end = self._file.tell() + num_payload
        if (check or not num_payload) and zlib.crc32(self._exactly(num_payload), zlib.crc32(head)) != crc:
            raise ValueError("its bytes are not those that were written")
        return msgpack.unpackb(head), end

    def _exactly(self, num_bytes: int) -> bytes:
        data = self._file.read(num_bytes)
        if len(data) != num_bytes:
            raise ValueError("the file is cut short")
        return data

    @contextmanager
    def _faults(self, where: str) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, KeyError, TypeError, zlib.error, msgpack.UnpackException) as error:
            raise WeightsError(f"delta file {self.path}, {where}: {error}.") from None


def _checked(header: Mapping[str, Any]) -> tuple[TensorInfo, int, int, str]:
    info = TensorInfo(str(header["name"]), header["dtype"], tuple(map(int, header["shape"])))
    start, count, kind = int(header["start"]), int(header["count"]), header["kind"]
    if info.dtype not in WIDTHS or min(info.shape, default=0) < 0 or kind not in ("sparse", "dense"):
        raise ValueError(f"{info} as {kind} is not a tensor that can be read")
    end = min(info.num_elements, (start // WINDOW + 1) * WINDOW)
    if not 0 <= start < end or not 0 < count <= end - start:
        raise ValueError(f"{count} elements of {info} from {start} on reach beyond it or its window")
    return info, start, count, kind


def _unpack(record: Record, payload: bytes) -> Patch:
    width = WIDTHS[record.info.dtype]
    num_values = record.count * width
    # A gap has an escape for each 65,535 positions at most: what is longer is no record.
    limit = num_values + 2 * (record.count + WINDOW // _ESCAPE + 1) * (record.kind == "sparse")
    unpacker = zlib.decompressobj()
    data = np.frombuffer(unpacker.decompress(payload, limit + 1), np.uint8)
    if not unpacker.eof or not num_values <= len(data) <= limit or (len(data) - num_values) % 2:
        raise ValueError(f"it unpacks to {len(data):,} bytes, which are not {record.count:,} elements")
    values = _from_planes(data[len(data) - num_values :], record.info.bits_dtype)
    if record.kind == "dense":
        return Patch(record.info, record.start, values)
    positions = _from_gaps(_from_planes(data[: len(data) - num_values], np.dtype("<u2")), record.start)
    last = min(record.info.num_elements, (record.window + 1) * WINDOW)
    if len(positions) != record.count or positions[-1] >= last or (np.diff(positions) <= 0).any():
        raise ValueError("its positions are not ascending, or lie outside")
    return Patch(record.info, record.start, values, positions)


def _to_gaps(positions: Positions, start: int) -> Bits:
    gaps = np.diff(positions, prepend=start)
    num_escapes = gaps // _ESCAPE
    if not num_escapes.any():
        return gaps.astype("<u2")
    coded = np.full(len(gaps) + int(num_escapes.sum()), _ESCAPE, "<u2")
    coded[np.cumsum(num_escapes + 1) - 1] = gaps % _ESCAPE
    return coded


def _from_gaps(gaps: Bits, start: int) -> Positions:
    ends = np.cumsum(gaps, dtype=np.int64) + start
    return ends[gaps != _ESCAPE] if (gaps == _ESCAPE).any() else ends


def _planes(values: Bits) -> bytes:
    little = np.ascontiguousarray(values, values.dtype.newbyteorder("<"))
    return little.view(np.uint8).reshape(-1, little.dtype.itemsize).T.tobytes()


def _from_planes(data: Bits, dtype: np.dtype[Any]) -> Bits:
    planes = data.reshape(dtype.itemsize, -1)
    return np.ascontiguousarray(planes.T).view(dtype).reshape(-1)

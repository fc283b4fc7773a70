"""Writes what a stream holds beyond its archive into further segments.

Guarantees: each entry is archived once, wherever this is killed. A segment's file is complete and flushed
before the manifest lists it; what is not listed does not exist, and the next writer removes it. One process
at a time writes. Memory is bounded by a row group, whatever the stream's length.
"""

import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from common.archive import LOCK_FILE, archive_folder, stream_folder
from common.archive.columns import ID_MS, RawEntry, bounds_of, columns_of, derived_of, schema_of, table_of
from common.archive.manifest import MANIFEST_FILE, SUFFIX, Manifest, Segment, segment_name
from common.broker import Broker
from common.codec import PAYLOAD_FIELD
from common.entries import START, id_order
from common.files import aside_file, clear_aside, file_checksum, locked, publish_file
from common.history.selection import StreamName, time_of
from common.keys import Keys
from common.messages import Commit, Message, Trajectory
from common.streams import read_raw

ROW_GROUP_BYTES = 4 << 20
"""Payload of a row group: what a lookup reads at least, and what a writer holds beside one message."""
ROW_GROUP_ROWS = 4096
READ_BYTES = 2 << 20
"""Payload asked for at once; the number of entries is adapted to their size."""
MAX_READ_COUNT = 1024
COMPRESSION_LEVEL = 3

OnSegment = Callable[[StreamName, Segment], None]


@contextmanager
def writing(run_dir: Path) -> Iterator[None]:
    """Be the one who writes into the run's archive.

    Raises:
        LockedError: another process is.
    """
    with locked(archive_folder(run_dir) / LOCK_FILE, f"the archive of {run_dir.name} is being written"):
        yield


async def archive_stream(
    broker: Broker,
    keys: Keys,
    run_dir: Path,
    stream: StreamName,
    *,
    segment_bytes: int,
    until: str = "+",
    is_last: bool = False,
    on_segment: OnSegment = lambda stream, segment: None,
) -> int:
    """Archive entries up to `until`, in segments of `segment_bytes` of payload; returns how many.

    What does not fill a segment is left for later, unless `is_last`. Call within `writing`.
    """
    key = stream.key(keys)
    return await write_segments(
        run_dir,
        stream,
        lambda last_id: _entries(broker, key, last_id, until),
        segment_bytes=segment_bytes,
        is_last=is_last,
        on_segment=on_segment,
    )


async def write_segments(
    run_dir: Path,
    stream: StreamName,
    entries_after: Callable[[str], AsyncIterator[RawEntry]],
    *,
    segment_bytes: int,
    is_last: bool,
    on_segment: OnSegment = lambda stream, segment: None,
) -> int:
    """Archive what comes after the last archived entry, wherever it comes from; returns how many."""
    folder = stream_folder(run_dir, stream)
    manifest, total = sweep(folder), 0
    while True:
        entries = entries_after(manifest.last_id)
        segment = await _write_segment(folder, stream.message_type, entries, segment_bytes, is_last)
        if segment is None:
            return total
        manifest = manifest.appended(segment)
        on_segment(stream, segment)
        total += segment.entries


def sweep(folder: Path) -> Manifest:
    """Remove what a killed writer left in a stream's folder; returns what is there for good."""
    if not folder.is_dir():
        return Manifest(folder)
    clear_aside(folder)
    manifest = Manifest.load(folder)
    listed = {segment.file for segment in manifest.segments} | {MANIFEST_FILE}
    for path in folder.iterdir():
        if path.suffix == SUFFIX and path.name not in listed:
            path.unlink()
    return manifest


async def _entries(broker: Broker, key: str, after: str, until: str) -> AsyncIterator[RawEntry]:
    """What the stream holds after an entry, some at a time by their size."""
    first, count = "-" if after == START else f"({after}", 16
    while found := await read_raw(broker, key, first, until, count):
        num_bytes = 1
        for entry in found:
            num_bytes += payload_bytes(entry)
            yield entry
        first = f"({found[-1][0]}"
        count = max(1, min(MAX_READ_COUNT, 2 * count, READ_BYTES * len(found) // num_bytes))


def payload_bytes(entry: RawEntry) -> int:
    """Bytes of an entry's values."""
    fields = entry[1]
    return len(fields[PAYLOAD_FIELD]) if PAYLOAD_FIELD in fields else sum(map(len, fields.values()))


async def _write_segment(
    folder: Path,
    message_type: type[Message],
    entries: AsyncIterator[RawEntry],
    segment_bytes: int,
    is_last: bool,
) -> Segment | None:
    """The next segment, in its place but not listed yet; None where there is not enough for one."""
    building = SegmentFile(message_type)
    with aside_file(folder / f"segment{SUFFIX}", "a segment of the archive") as aside:
        async for entry in entries:
            building.add(entry, aside)
            if building.payload_bytes >= segment_bytes:
                break
        is_enough = building.payload_bytes >= segment_bytes or (is_last and building.entries > 0)
        if not is_enough:
            building.close()
            return None
        return building.publish(aside, folder)


class SegmentFile:
    """A Parquet file that grows by row groups, and what is known of its entries."""

    def __init__(self, message_type: type[Message]) -> None:
        self.message_type = message_type
        self.entries = self.payload_bytes = 0
        self.first_id = self.last_id = START
        self._bounds: dict[str, tuple[float, float]] = {}
        self._held: list[RawEntry] = []
        self._held_bytes = 0
        self._file: pq.ParquetWriter | None = None

    def add(self, entry: RawEntry, path: Path) -> None:
        """Take one more entry; `path` is where the file is written."""
        if not self.entries:
            self.first_id = entry[0]
        assert id_order(entry[0]) > id_order(self.last_id), "entries come in the order of their stream"
        self.last_id, num_bytes = entry[0], payload_bytes(entry)
        self.entries += 1
        self.payload_bytes += num_bytes
        self._held_bytes += num_bytes
        self._held.append(entry)
        if self._held_bytes >= ROW_GROUP_BYTES or len(self._held) >= ROW_GROUP_ROWS:
            self._flush(path)

    def publish(self, path: Path, folder: Path) -> Segment:
        """Complete the file and give it its name in the folder."""
        self._flush(path)
        self.close()
        name = segment_name(self.first_id, self.last_id)
        checksum, num_bytes = file_checksum(path), path.stat().st_size
        publish_file(path, folder / name)
        return Segment(
            file=name,
            first_id=self.first_id,
            last_id=self.last_id,
            entries=self.entries,
            num_bytes=num_bytes,
            payload_bytes=self.payload_bytes,
            checksum=checksum,
            archived_at=time.time(),
            bounds=self._bounds,
        )

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _flush(self, path: Path) -> None:
        """Write what is held as one row group."""
        if not self._held:
            return
        table, messages = table_of(self._held, self.message_type)
        if self._file is None:
            self._file = _open(path, self.message_type)
        self._file.write_table(table, row_group_size=len(table))
        self._widen(messages)
        self._held, self._held_bytes = [], 0

    def _widen(self, messages: Sequence[Message]) -> None:
        """Let the bounds hold these messages too."""
        for name, values in _measures(messages).items():
            known = self._bounds.get(name, (None, None))
            if (bounds := bounds_of([*values, *known])) is not None:
                self._bounds[name] = bounds


def _measures(messages: Sequence[Message]) -> Mapping[str, list[float | None]]:
    """What segments are searched by, over some messages of one type."""
    found: dict[str, list[float | None]] = {"ticket": [], "step": [], "version": [], "time": []}
    for message in messages:
        found["time"].append(time_of(message))
        found["step"].append(getattr(message, "step", None))
        if isinstance(message, Trajectory):
            found["version"] += [version for version, _ in message.spans]
        else:
            found["version"].append(getattr(message, "version", None))
        if isinstance(message, Commit):
            found["ticket"] += [*message.groups, *(ticket for ticket, _, _ in message.dropped)]
        else:
            found["ticket"].append(getattr(message, "ticket", None))
    return found


def _open(path: Path, message_type: type[Message]) -> pq.ParquetWriter:
    schema = schema_of(message_type)
    columns = (*columns_of(message_type), *derived_of(message_type))
    leaves = {column.name: column.name for column in columns}
    leaves |= {column.name: f"{column.name}.list.element" for column in columns if column.dtype is not None}
    floats = [leaves[column.name] for column in columns if pa.types.is_list(column.type) and column.dtype]
    return pq.ParquetWriter(
        path,
        schema,
        compression="zstd",
        compression_level=COMPRESSION_LEVEL,
        use_dictionary=[leaves[column.name] for column in columns if column.repeats],
        # Exponents beside exponents: logprobs compress a fifth better.
        use_byte_stream_split=[leaf for leaf in floats if leaf.startswith("logprobs")],
        write_statistics=[ID_MS, *(column.name for column in columns if column.has_statistics)],
    )

"""Writes what a stream holds beyond its archive into further segments.

Guarantees: each entry is archived once, wherever this is killed. A segment's file is complete and flushed
before the manifest lists it. One process at a time writes. Memory is bounded by a row group.

A file that no manifest lists may be the only copy of its entries, because Redis was trimmed. So the next
writer reads it whole, with the checksums of its pages, and lists it where its entries continue the others;
otherwise it keeps the file under another name, and says so. Only what retention has removed already goes.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import structlog

from tidemill.common.archive import LOCK_FILE, archive_folder, stream_folder
from tidemill.common.archive.manifest import (
    PREVIOUS_ID,
    SUFFIX,
    ArchiveSegment,
    Manifest,
    segment_name,
    take_back_trim,
    trimmed_up_to,
)
from tidemill.common.archive.rows import (
    ID,
    INDEX,
    SCHEMA,
    SCHEMA_VERSION,
    RawEntry,
    raw_entries_of,
    table_of,
    widen,
)
from tidemill.common.files import aside_file, clear_aside, file_checksum, locked, publish_file
from tidemill.common.redis.broker import Broker
from tidemill.common.store import NAMES_A_CLAIM
from tidemill.common.streams import has_claim, read_raw
from tidemill.common.streams.entries import START, Entry, decoded, id_after, id_order
from tidemill.common.streams.selection import StreamName
from tidemill.common.wire import codec
from tidemill.common.wire.codec import PAYLOAD_FIELD
from tidemill.common.wire.keys import Keys
from tidemill.common.wire.messages import Message, Trajectory

log = structlog.get_logger(__name__)

ROW_GROUP_BYTES = 4 << 20
"""Payload of a row group: what a lookup reads at least, and what a writer holds beside one message."""
ROW_GROUP_ROWS = 4096
READ_BYTES = 2 << 20
"""Payload asked for at once; the number of entries is adapted to their size."""
MAX_READ_COUNT = 1024
COMPRESSION_LEVEL = 3


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
) -> int:
    """Archive entries up to `until`, in segments of `segment_bytes` of payload; returns how many.

    What does not fill a segment is left for later, unless `is_last`. Call within `writing`.
    """

    def entries_after(last_id: str) -> AsyncIterator[RawEntry]:
        return _entries(broker, stream.key(keys), last_id, until)

    return await write_segments(run_dir, stream, entries_after, segment_bytes=segment_bytes, is_last=is_last)


async def write_segments(
    run_dir: Path,
    stream: StreamName,
    entries_after: Callable[[str], AsyncIterator[RawEntry]],
    *,
    segment_bytes: int,
    is_last: bool,
) -> int:
    """Archive what comes after the last archived entry, wherever it comes from; returns how many."""
    folder, message_type = stream_folder(run_dir, stream), stream.message_type
    manifest, total = sweep(folder), 0
    while True:
        entries = entries_after(manifest.last_id)
        # What is trimmed already and not archived is a gap: the segment says so for good.
        building = SegmentFile(message_type, max(manifest.last_id, trimmed_up_to(folder), key=id_order))
        segment = await _write_segment(folder, building, entries, segment_bytes, is_last)
        if segment is None:
            return total
        manifest = manifest.appended(segment)
        total += segment.entries


def sweep(folder: Path) -> Manifest:
    """Put right what a killed writer or a torn manifest left in a stream's folder; returns what is there."""
    if not folder.is_dir():
        return Manifest(folder)
    clear_aside(folder)
    return with_unlisted(Manifest.load(folder, salvage=True))


async def _entries(broker: Broker, key: str, after: str, until: str) -> AsyncIterator[RawEntry]:
    """What the stream holds after an entry, some at a time by their size."""
    first, count = "-" if after == START else f"({after}", 16
    while found := await read_raw(broker, key, first, until, count):
        num_bytes = 1
        for whole in await asyncio.gather(*(_whole(broker, entry) for entry in found)):
            num_bytes += payload_bytes(whole)
            yield whole
        first = f"({found[-1][0]}"
        count = max(1, min(MAX_READ_COUNT, 2 * count, READ_BYTES * len(found) // num_bytes))


async def _whole(broker: Broker, entry: RawEntry) -> RawEntry:
    """The entry with the payload that it claims, as it would have come through the stream; itself where that
    is missing or wrong.

    Raises:
        StoreError: the store of payloads is away. The entry stays in Redis, to be archived later.
    """
    if broker.claims is None or not _is_claim(entry):
        return entry
    claim = codec.decode(entry[1], Trajectory)
    whole = await asyncio.to_thread(broker.claims.resolve, claim)
    return entry if has_claim(whole) else (entry[0], codec.encode(whole))


def num_claims(path: Path) -> int:
    """Rows of a segment that claim a payload which was missing or wrong when they were archived."""
    with pq.ParquetFile(path) as file:
        groups = (file.read_row_group(group) for group in range(file.metadata.num_row_groups))
        return sum(_is_claim(entry) for table in groups for entry in raw_entries_of(table))


def _is_claim(entry: RawEntry) -> bool:
    if NAMES_A_CLAIM not in entry[1].get(PAYLOAD_FIELD, b""):
        return False
    record = decoded(entry[0].encode(), entry[1], Trajectory)
    return isinstance(record, Entry) and has_claim(record.message)


def payload_bytes(entry: RawEntry) -> int:
    """Bytes of an entry's values."""
    fields = entry[1]
    return len(fields[PAYLOAD_FIELD]) if PAYLOAD_FIELD in fields else sum(map(len, fields.values()))


async def _write_segment(
    folder: Path, building: "SegmentFile", entries: AsyncIterator[RawEntry], segment_bytes: int, is_last: bool
) -> ArchiveSegment | None:
    """The next segment, in its place but not listed yet; None where there is not enough for one."""
    with aside_file(folder / f"segment{SUFFIX}", "a segment of the archive") as aside:
        async for entry in entries:
            building.add(entry, aside)
            if building.payload_bytes >= segment_bytes:
                break
        if building.payload_bytes >= segment_bytes or (is_last and building.entries > 0):
            return building.publish(aside, folder)
        building.close()
        return None


class SegmentFile:
    """A Parquet file that grows by row groups, and what is known of its entries."""

    def __init__(self, message_type: type[Message], previous_id: str) -> None:
        self.message_type, self.previous_id = message_type, previous_id
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

    def publish(self, path: Path, folder: Path) -> ArchiveSegment:
        """Complete the file and give it its name in the folder."""
        self._flush(path)
        assert self._file is not None, "a segment has entries"
        self._file.add_key_value_metadata({PREVIOUS_ID.decode(): self.previous_id})
        self.close()
        name = segment_name(self.first_id, self.last_id)
        checksum, num_bytes = file_checksum(path), path.stat().st_size
        publish_file(path, folder / name)
        return ArchiveSegment(
            name, self.first_id, self.last_id, self.entries, num_bytes, self.payload_bytes, checksum,
            time.time(), self.previous_id, self._bounds,
        )  # fmt: skip

    def close(self) -> None:
        """Close the file, where one is open."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _flush(self, path: Path) -> None:
        """Write what is held as one row group."""
        if not self._held:
            return
        table = table_of(self._held, self.message_type)
        if self._file is None:
            self._file = _open(path)
        self._file.write_table(table, row_group_size=len(table))
        widen(self._bounds, table)
        self._held, self._held_bytes = [], 0


def _open(path: Path) -> pq.ParquetWriter:
    return pq.ParquetWriter(
        path,
        SCHEMA,
        compression="zstd",
        write_page_checksum=True,  # so that a file that has lost its manifest can be told to be whole
        compression_level=COMPRESSION_LEVEL,
        use_dictionary=[*INDEX, SCHEMA_VERSION],
        write_statistics=False,  # the manifest has bounds, and payloads would be written twice more
    )


def cut_back(folder: Path, message_type: type[Message], last_id: str) -> int:
    """Forget entries above `last_id`: Redis has lost them, and their samples are generated again. Returns how
    many.

    Call within `writing`. May be repeated: where this is killed, files that it had to remove are there still.
    """
    manifest = Manifest.load(folder, salvage=True)
    kept = [segment for segment in manifest.segments if id_order(segment.last_id) <= id_order(last_id)]
    gone = manifest.segments[len(kept) :]
    num_lost = sum(segment.entries for segment in gone)
    if gone and id_order(gone[0].first_id) <= id_order(last_id):
        building = SegmentFile(message_type, gone[0].previous_id)
        with aside_file(folder / f"segment{SUFFIX}", "a segment of the archive") as aside:
            table = pq.read_table(manifest.path(gone[0]))
            for entry in raw_entries_of(table):
                if id_order(entry[0]) <= id_order(last_id):
                    building.add(entry, aside)
            if building.entries:
                kept.append(building.publish(aside, folder))
        num_lost -= building.entries
    manifest.cut(kept)
    for segment in gone:
        manifest.path(segment).unlink(missing_ok=True)
    take_back_trim(folder, id_after(last_id))
    return num_lost


KEPT_SUFFIX = ".unlisted"
"""Appended to the name of a file that cannot be listed and is not removed either."""


class _UnfitError(Exception):
    """The file cannot be listed; says why."""


def unlisted(manifest: Manifest) -> list[Path]:
    """Files of entries that the manifest does not list, in the order of their ids."""
    listed = {segment.file for segment in manifest.segments}
    return sorted(p for p in manifest.folder.glob(f"*{SUFFIX}") if p.name not in listed)


def kept_aside(folder: Path) -> list[Path]:
    """Files that could not be listed."""
    return sorted(folder.glob(f"*{SUFFIX}{KEPT_SUFFIX}"))


def with_unlisted(manifest: Manifest) -> Manifest:
    """List what is whole and fits, put the rest aside. Call within `writing`."""
    found: list[ArchiveSegment] = []
    for path in unlisted(manifest):
        try:
            segment = _segment_of(path)
            if id_order(segment.last_id) <= id_order(manifest.removed.last_id):
                path.unlink()  # retention has taken it off the list, and died before this
                continue
            _check_place(segment, (*manifest.segments, *found))
        except _UnfitError as error:
            aside = path.with_name(path.name + KEPT_SUFFIX)
            log.error("a file of the archive cannot be listed", kept_as=str(aside), problem=str(error))
            path.rename(aside)
            continue
        found.append(segment)
    if found or manifest.is_torn:
        files = [segment.file for segment in found]
        log.warning(
            "the archive's manifest was restored from files", folder=str(manifest.folder), files=files
        )
        return manifest.including(found)
    return manifest


def _check_place(segment: ArchiveSegment, others: tuple[ArchiveSegment, ...]) -> None:
    first, last = id_order(segment.first_id), id_order(segment.last_id)
    for other in others:
        if first <= id_order(other.last_id) and id_order(other.first_id) <= last:
            raise _UnfitError(f"it has entries that {other.file} has too")


def _segment_of(path: Path) -> ArchiveSegment:
    """What the manifest would say of a file, after reading all of it."""
    ids: list[str] = []
    bounds: dict[str, tuple[float, float]] = {}
    num_bytes = 0
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            previous_id = (file.metadata.metadata or {}).get(PREVIOUS_ID, b"").decode()
            for group in range(file.metadata.num_row_groups):
                table = file.read_row_group(group)
                ids += table[ID].to_pylist()
                num_bytes += sum(map(payload_bytes, raw_entries_of(table)))
                widen(bounds, table)
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        raise _UnfitError(f"it cannot be read: {error}") from None
    orders = [id_order(entry_id) for entry_id in ids]
    if not ids or path.name != segment_name(ids[0], ids[-1]) or orders != sorted(set(orders)):
        raise _UnfitError("it does not hold the entries that its name says")
    stat = path.stat()
    return ArchiveSegment(
        path.name, ids[0], ids[-1], len(ids), stat.st_size, num_bytes, file_checksum(path), stat.st_mtime,
        previous_id, bounds,
    )  # fmt: skip

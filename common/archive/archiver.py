"""Archives a run's streams, and removes what is beyond the run's retention.

Guarantees: each entry is archived once, wherever the process is killed. A segment's file is complete and
flushed before it gets its name. One process at a time writes. Memory is bounded by a row group. An entry
whose payload is missing or wrong is archived as it is, and the segment names the payload: its file may come
back, as on a shared file system, and is not removed while the segment is there.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path

import pyarrow.parquet as pq
import structlog

from tidemill.common.archive import LOCK_FILE, archive_folder, stream_folder
from tidemill.common.archive.manifest import (
    DETAILS,
    NOTES,
    SUFFIX,
    ArchiveSegment,
    Details,
    Manifest,
    gaps,
    is_needed,
    segment_name,
    take_back_trim,
    trimmed_up_to,
)
from tidemill.common.archive.rows import (
    INDEX,
    SCHEMA,
    SCHEMA_VERSION,
    RawEntry,
    raw_entries_of,
    table_of,
    widen,
)
from tidemill.common.config import ArchiveConfig
from tidemill.common.errors import ArchiveError
from tidemill.common.files import LockedError, aside_file, clear_aside, file_checksum, locked, publish_file
from tidemill.common.redis.broker import Broker
from tidemill.common.store import ClaimStore
from tidemill.common.streams import has_claim, read_raw
from tidemill.common.streams.entries import START, Entry, decoded, id_after, id_order
from tidemill.common.streams.selection import StreamName
from tidemill.common.wire import codec
from tidemill.common.wire.codec import PAYLOAD_FIELD
from tidemill.common.wire.keys import Keys
from tidemill.common.wire.messages import NAMES_A_CLAIM, Claim, Message, Trajectory

log = structlog.get_logger(__name__)

MIB = 1 << 20
GIB = 1 << 30
DAY_S = 86400.0
POLL_S = 0.2
PATIENCE_S = 60.0
"""Longest wait for another process that archives the run."""
ROW_GROUP_BYTES = 4 << 20
"""Payload of a row group: the least that a lookup reads, and, plus one message, what a writer buffers."""
ROW_GROUP_ROWS = 4096
READ_BYTES = 2 << 20
"""Payload of one read from Redis; the number of entries is adapted to their size."""
MAX_READ_COUNT = 1024
COMPRESSION_LEVEL = 3


async def archive_run(
    broker: Broker,
    keys: Keys,
    run_dir: Path,
    config: ArchiveConfig,
    until: Mapping[StreamName, str] | None = None,
    *,
    is_last: bool = False,
) -> dict[StreamName, int]:
    """Archive streams up to ids, without `until` all of them, then apply retention.

    Args:
        broker, keys, run_dir, config: Those of the run.
        until: Stream -> id of the last entry to archive.
        is_last: Also write what does not fill a segment.

    Returns:
        Number of archived entries of each stream that had any.

    Raises:
        LockedError: another process archives this run, for longer than `PATIENCE_S`.
    """
    # A payload above the run's limit on messages must not get into the archive.
    broker.claims = broker.claims or ClaimStore(run_dir, max_bytes=broker.max_bytes)
    ends = dict.fromkeys(StreamName, "+") if until is None else until
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            with writing(run_dir):
                counts = {
                    stream: await archive_stream(broker, keys, run_dir, stream, config, end, is_last)
                    for stream, end in ends.items()
                }
                retain(run_dir, config)
                return {stream: count for stream, count in counts.items() if count}
        except LockedError:
            if time.monotonic() >= deadline:
                raise
        await asyncio.sleep(POLL_S)


@contextmanager
def writing(run_dir: Path) -> Iterator[None]:
    """Hold the lock for writing the run's archive.

    Raises:
        LockedError: another process holds it.
    """
    with locked(archive_folder(run_dir) / LOCK_FILE, f"the archive of {run_dir.name} is being written"):
        yield


async def archive_stream(
    broker: Broker,
    keys: Keys,
    run_dir: Path,
    stream: StreamName,
    config: ArchiveConfig,
    until: str,
    is_last: bool,
) -> int:
    """Archive entries up to `until`, in segments of `segment_mb` of payload; returns how many.

    What does not fill a segment is left for later, unless `is_last`. Call within `writing`.
    """
    folder = stream_folder(run_dir, stream)
    total = 0
    segment_bytes = int(config.segment_mb * MIB)
    # Before the last id is read: a killed writer's unfinished file must not count.
    manifest = sweep(folder)
    last_id = manifest.last_id
    while True:
        # Entries that were trimmed and never archived are a gap, which the segment's footer records.
        building = SegmentFile(stream.message_type, max(last_id, trimmed_up_to(folder), key=id_order))
        with aside_file(folder / f"segment{SUFFIX}", "a segment of the archive") as aside:
            entries = _entries(broker, stream.key(keys), last_id, until, config.keep_choices)
            async for entry, bare in entries:
                building.add(entry, aside, bare)
                if building.payload_bytes >= segment_bytes:
                    break
            if building.payload_bytes < segment_bytes and not (is_last and building.entries):
                building.close()
                return total
            # From here on they count as archived, and the trainer may trim them.
            last_id = building.publish(aside, folder).last_id
        total += building.entries


def sweep(folder: Path) -> Manifest:
    """Remove what a killed writer left in a stream's folder; returns the manifest of the rest."""
    if not folder.is_dir():
        return Manifest(folder)
    clear_aside(folder, others=NOTES)  # the trainer may be writing one
    manifest = Manifest.load(folder)
    # Segments that `cut_back` has replaced by a shorter one, or whose removal was noted before a crash.
    for path in set(folder.glob(f"*{SUFFIX}")) - {segment.path for segment in manifest.segments}:
        path.unlink()
    return manifest


async def _entries(
    broker: Broker, key: str, after: str, until: str, keep_choices: bool
) -> AsyncIterator[tuple[RawEntry, Sequence[str]]]:
    """The stream's entries after `after` up to `until`, with their claimed payloads, read in batches; with
    each, pointers of claimed payloads that it lacks."""
    first = "-" if after == START else f"({after}"
    count = 16
    while entries := await read_raw(broker, key, first, until, count):
        num_bytes = 1
        wholes = await _wholes(broker.claims, entries, keep_choices)
        for entry in entries:
            whole, bare = wholes.get(entry[0], (entry, ()))
            num_bytes += payload_bytes(whole)
            yield whole, bare
        first = f"({entries[-1][0]}"
        # At most twice as many as before: the next entries may be far larger than these.
        count = max(1, min(MAX_READ_COUNT, 2 * count, READ_BYTES * len(entries) // num_bytes))


async def _wholes(
    store: ClaimStore | None, entries: Sequence[RawEntry], keep_choices: bool
) -> dict[str, tuple[RawEntry, Sequence[str]]]:
    """Id -> entry with its claimed payload, as if sent through the stream, and pointers of what it lacks,
    because it is missing or wrong.

    Raises:
        StoreError: the store of payloads is away. The entries stay in Redis, to be archived later.
    """
    if store is None:
        return {}
    claims: list[tuple[str, Trajectory]] = []
    for entry in entries:
        claiming = _claiming(entry)
        if claiming is not None:
            claims.append((entry[0], claiming))
    reads = (store.threads.run(store.resolve, sample, keep_choices) for _, sample in claims)
    messages = await asyncio.gather(*reads)
    raw = dict(entries)
    wholes: dict[str, tuple[RawEntry, Sequence[str]]] = {}
    for (entry_id, sample), whole in zip(claims, messages, strict=True):
        fields = raw[entry_id]
        bare = _lacking(whole, keep_choices)
        if not has_claim(whole) and whole is not sample:
            # Not the fault of this read: a reader of the archive looks for missing choices again.
            whole = whole.model_copy(update={"fault": sample.fault})
            fields = codec.encode(whole)
        wholes[entry_id] = ((entry_id, fields), bare)
    return wholes


def _lacking(message: Message, keep_choices: bool) -> list[str]:
    """Pointers of the payloads that the message lacks after they were looked for."""
    if not isinstance(message, Trajectory):
        return []
    lacking: list[Claim | None] = [message.claim]
    if keep_choices and message.lacks_choices and message.choices is not None:
        lacking.append(message.choices.claim)
    return [claim.pointer for claim in lacking if claim is not None]


def _claiming(entry: RawEntry) -> Trajectory | None:
    """The entry's message if that claims a payload, else None."""
    entry_id, fields = entry
    if NAMES_A_CLAIM not in fields.get(PAYLOAD_FIELD, b""):
        return None
    record = decoded(entry_id.encode(), fields, Trajectory)
    return record.message if isinstance(record, Entry) else None


def payload_bytes(entry: RawEntry) -> int:
    fields = entry[1]
    return len(fields[PAYLOAD_FIELD]) if PAYLOAD_FIELD in fields else sum(map(len, fields.values()))


class SegmentFile:
    """A Parquet file that is written a row group at a time, with ids, sizes and bounds of its entries."""

    def __init__(self, message_type: type[Message], previous_id: str) -> None:
        self.message_type = message_type
        self.previous_id = previous_id
        self.entries = 0
        self.payload_bytes = 0
        self.first_id = START
        self.last_id = START
        self._bounds: dict[str, tuple[float, float]] = {}
        self.bare: list[str] = []
        self._held: list[RawEntry] = []
        self._held_bytes = 0
        self._file: pq.ParquetWriter | None = None

    def add(self, entry: RawEntry, path: Path, bare: Sequence[str] = ()) -> None:
        """Add an entry; `path` is where the file is written, `bare` as in `Details`."""
        self.bare += bare
        if not self.entries:
            self.first_id = entry[0]
        assert id_order(entry[0]) > id_order(self.last_id), "entries come in the order of their stream"
        self.last_id = entry[0]
        num_bytes = payload_bytes(entry)
        self.entries += 1
        self.payload_bytes += num_bytes
        self._held_bytes += num_bytes
        self._held.append(entry)
        if self._held_bytes >= ROW_GROUP_BYTES or len(self._held) >= ROW_GROUP_ROWS:
            self._flush(path)

    def publish(self, path: Path, folder: Path) -> ArchiveSegment:
        """Complete the file and give it its name in `folder`: from then on its entries are archived."""
        self._flush(path)
        assert self._file is not None, "a segment has entries"
        details = asdict(Details(self.previous_id, self.payload_bytes, time.time(), self._bounds, self.bare))
        if not self.bare:
            del details["bare"]  # older releases do not know it, and would take the others for unreadable
        self._file.add_key_value_metadata({DETAILS.decode(): json.dumps(details)})
        # In this order: closing writes the footer, which the checksum covers, which the file's name has.
        self.close()
        checksum = file_checksum(path)
        target = folder / segment_name(self.first_id, self.last_id, self.entries, checksum)
        publish_file(path, target)
        return ArchiveSegment(target, self.first_id, self.last_id, self.entries, checksum)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _flush(self, path: Path) -> None:
        if not self._held:
            return
        table = table_of(self._held, self.message_type)
        if self._file is None:
            self._file = pq.ParquetWriter(
                path,
                SCHEMA,
                compression="zstd",
                compression_level=COMPRESSION_LEVEL,
                use_dictionary=[*INDEX, SCHEMA_VERSION],
                write_statistics=False,  # the footer has bounds, and payloads would be written twice more
            )
        self._file.write_table(table, row_group_size=len(table))
        widen(self._bounds, table)
        self._held = []
        self._held_bytes = 0


def cut_back(folder: Path, message_type: type[Message], last_id: str) -> int:
    """Forget entries above `last_id`: Redis has lost them, and their samples are generated again. Returns how
    many.

    Call within `writing`. May be repeated.
    """
    gone = [s for s in Manifest.load(folder).segments if id_order(s.last_id) > id_order(last_id)]
    num_lost = sum(segment.entries for segment in gone)
    # Before any entry is gone: after a crash in between, a note of trimmed entries that no file has would
    # make a restart refuse to replay.
    take_back_trim(folder, id_after(last_id))
    # From the end, so that a crash always leaves a prefix of the stream.
    for segment in reversed(gone[1:]):
        segment.path.unlink()
    if gone:
        building = SegmentFile(message_type, gone[0].details.previous_id)
        building.bare = list(gone[0].details.bare)
        with aside_file(folder / f"segment{SUFFIX}", "a segment of the archive") as aside:
            for entry in raw_entries_of(pq.read_table(gone[0].path)):
                if id_order(entry[0]) <= id_order(last_id):
                    building.add(entry, aside)
            if building.entries:
                building.publish(aside, folder)
        # After the shorter file exists: of both, `Manifest.load` takes that one; without both, data is lost.
        gone[0].path.unlink()
        num_lost -= building.entries
    return num_lost


def retain(run_dir: Path, config: ArchiveConfig) -> int:
    """Remove the oldest segments beyond the run's limits, but none that a restart may replay; returns how
    many. Call within `writing`."""
    manifests = [Manifest.load(stream_folder(run_dir, stream)) for stream in StreamName]
    needed = [segment for m in manifests for segment in m.segments if is_needed(m.folder, segment)]
    leaving = [segment for segment in _too_much(manifests, config) if segment not in needed]
    num_gone = 0
    for manifest in manifests:
        # From the beginning only: where a clock was set back, a later file may look older.
        gone = list(takewhile(leaving.__contains__, manifest.segments))
        if gone:
            manifest.remove_first(len(gone))
            num_gone += len(gone)
    if num_gone:
        log.info("removed from the archive", segments=num_gone)
    return num_gone


def _too_much(manifests: Sequence[Manifest], config: ArchiveConfig) -> Iterator[ArchiveSegment]:
    """Segments beyond the limits, oldest first; none of commits and weights: small, and explain the rest."""
    kept = {str(StreamName.COMMITS), str(StreamName.WEIGHTS)}
    candidates = [segment for m in manifests if m.folder.name not in kept for segment in m.segments]
    oldest = time.time() - config.keep_days * DAY_S if config.keep_days is not None else float("-inf")
    room = config.keep_gb * GIB if config.keep_gb is not None else float("inf")
    total = sum(manifest.num_bytes for manifest in manifests)
    for segment in sorted(candidates, key=_newest):
        if _newest(segment) >= oldest and total <= room:
            return
        total -= segment.num_bytes
        yield segment


def _newest(segment: ArchiveSegment) -> float:
    """Time of the newest entry, in seconds since 1970; of archiving, if entries carry no time."""
    bounds = segment.details.bounds or {}
    return bounds.get("time", (0.0, segment.details.archived_at))[1]


@dataclass(frozen=True, slots=True)
class Damage:
    """A file of the archive that is not what it should be."""

    path: Path
    reason: str


def check(run_dir: Path) -> list[Damage]:
    """Damaged files and missing entries of a run's archive; reads all files."""
    damages = []
    for folder in (stream_folder(run_dir, stream) for stream in StreamName):
        try:
            manifest = Manifest.load(folder)
            for segment in manifest.segments:
                problem = _damage(segment)
                if problem:
                    damages.append(Damage(segment.path, problem))
            damages += [Damage(folder, gap) for gap in gaps(manifest)]
        except ArchiveError as error:
            damages.append(Damage(folder, str(error)))
    return damages


def _damage(segment: ArchiveSegment) -> str:
    try:
        if file_checksum(segment.path) != segment.checksum:
            return "its bytes are not those that were written"
        num_bare = _num_claims(segment.path)
        if num_bare:
            return f"{num_bare} of its records had lost their payload before"
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    return ""


def _num_claims(path: Path) -> int:
    """Rows of a segment that claim a payload which was missing or wrong when they were archived."""
    num_claims = 0
    with pq.ParquetFile(path) as file:
        for group in range(file.metadata.num_row_groups):
            for entry in raw_entries_of(file.read_row_group(group)):
                message = _claiming(entry)
                if message is not None and has_claim(message):
                    num_claims += 1
    return num_claims


def has_archive(run_dir: Path) -> bool:
    return any(archive_folder(run_dir).glob("*/*"))

"""Reads a run's streams as one history, wherever an entry is kept.

Guarantees: an entry comes once and in the order of its stream, also while the run writes, archives and trims;
what cannot be decoded comes as `Garbled`; a gap is logged once; reading changes nothing. The archive is read
first, then what Redis holds beyond it; only files that can hold selected entries are opened. Commits that
were trimmed and never archived come from the journal in the run's folder.
"""

import contextlib
import logging
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from tidemill.common.archive import stream_folder
from tidemill.common.archive.manifest import ArchiveSegment, Manifest, gaps
from tidemill.common.redis.broker import Broker
from tidemill.common.run.journal import JOURNAL_FILE, newest_below, read_journal
from tidemill.common.store import ClaimStore, resolved
from tidemill.common.streams import ReadSize, length, memory_bytes, read_back, read_range, read_raw
from tidemill.common.streams.entries import START, Entry, Garbled, entry_id_of, id_after, id_before, id_order
from tidemill.common.streams.selection import ALL, Selection, StreamName, numbered, time_of
from tidemill.common.threads import BoundedThreads
from tidemill.common.wire.keys import Keys
from tidemill.common.wire.messages import Commit, Lane, Message, Ticket, WeightManifest

log = logging.getLogger(__name__)
"""A standard library logger: commands read histories too, and their output must not contain logs."""

Record = Entry[Message] | Garbled
M = TypeVar("M", bound=Message)

READ_COUNT = 256
NUM_THREADS = 4
JOURNAL_STEPS = 64
"""Commits of the journal in memory at once."""
NEAR_STEPS = 8
"""Steps around a ticket's own step in which its commit is looked up, before all are searched."""


@dataclass(frozen=True, slots=True)
class StreamSummary:
    """One stream of a run, wherever its entries are. Times are seconds since 1970, None where unknown.

    Example: `archived_entries` 1,024 and `redis_entries` 300, of which 200 are archived too: `entries` 1,124.
    """

    name: StreamName
    redis_entries: int = 0
    redis_bytes: int = 0
    """Memory in Redis, as Redis estimates it."""
    archived_entries: int = 0
    archived_bytes: int = 0
    """Size on disk."""
    segments: int = 0
    removed_entries: int = 0
    """Archived entries that the run's retention has removed."""
    entries: int = 0
    """Entries in archive and Redis together, each counted once."""
    first_id: str = ""
    last_id: str = ""
    first_time: float | None = None
    last_time: float | None = None


class History:
    """The history of one run. `broker` is None where its Redis is gone: then the archive alone is read."""

    def __init__(self, run_id: str, run_dir: Path | None, broker: Broker | None) -> None:
        self.run_id = run_id
        self.run_dir = run_dir
        self.broker = broker
        self.keys = Keys(run_id)
        self._threads = BoundedThreads("history", NUM_THREADS)
        self._checked: set[StreamName] = set()
        self._is_missing_said = False
        self._sizes: dict[StreamName, ReadSize] = {}
        claims = ClaimStore(run_dir or Path(run_id))  # pointers to object stores need no folder
        if broker is not None:
            claims = broker.claims or claims
            broker.claims = claims
        self.claims = claims
        self._is_patient = broker is not None and broker.waits_for_claims

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, run_dir: Path, url: str | None = None) -> AsyncIterator["History"]:
        """The history of the run in `run_dir`, with the Redis at `url` or without one."""
        broker = await Broker.connect(url) if url else None
        try:
            yield cls(run_dir.name, run_dir, broker)
        finally:
            if broker is not None:
                await broker.close()

    async def scan(
        self, stream: StreamName, selection: Selection = ALL, newest_first: bool = False
    ) -> AsyncIterator[Record]:
        """Selected entries, oldest first unless `newest_first`, as they are found.

        `selection.steps` of a stream whose messages carry no step (scores) selects by the steps of tickets.
        Garbled entries come where the selection asks for nothing but ids.
        """
        selection = numbered(stream, await self._by_tickets(stream, selection))
        records = self._backwards(stream, selection) if newest_first else self._forwards(stream, selection)
        async for record in records:
            yield record

    def scan_from(self, stream: StreamName, first_id: str) -> AsyncIterator[Record]:
        """All entries from this id on, oldest first."""
        return self.scan(stream, Selection(first_id))

    async def messages(
        self, stream: StreamName, kind: type[M], selection: Selection = ALL, newest_first: bool = False
    ) -> AsyncIterator[M]:
        """The messages of the selected entries that can be decoded."""
        async for record in self.scan(stream, selection, newest_first):
            if isinstance(record, Entry) and isinstance(record.message, kind):
                yield record.message

    async def ticket(self, ticket: int, lane: Lane = Lane.TRAIN) -> Ticket | None:
        return await self._numbered(StreamName.PROMPTS.of(lane), Ticket, ticket)

    async def commit(self, step: int) -> Commit | None:
        return await self._numbered(StreamName.COMMITS, Commit, step)

    async def manifest(self, version: int) -> WeightManifest | None:
        return await self._numbered(StreamName.WEIGHTS, WeightManifest, version)

    async def _numbered(self, stream: StreamName, kind: type[M], number: int) -> M | None:
        return await self._first(stream, kind, Selection(entry_id_of(number), entry_id_of(number)))

    async def _first(self, stream: StreamName, kind: type[M], selection: Selection) -> M | None:
        async for message in self.messages(stream, kind, selection):
            return message
        return None

    async def commit_of_ticket(self, ticket: int) -> Commit | None:
        """The commit of the step that trained on (or dropped) the ticket; None while there is none."""
        selection = Selection(tickets=(ticket, ticket))
        issued = await self.ticket(ticket)
        if issued is not None:  # its step is known, and most train on it then or soon after
            near = replace(selection, steps=(max(0, issued.step - NEAR_STEPS), issued.step + NEAR_STEPS))
            commit = await self._first(StreamName.COMMITS, Commit, near)
            if commit is not None:
                return commit
        return await self._first(StreamName.COMMITS, Commit, selection)

    async def summary(self, streams: Iterable[StreamName] = StreamName) -> list[StreamSummary]:
        return [await self._summary_of(stream) for stream in streams]

    async def _summary_of(self, stream: StreamName) -> StreamSummary:
        """Made from its segments' names and footers, and from the first and last entry in Redis."""
        manifest = self._manifest(stream)
        segments = manifest.segments
        first: Record | None = None
        last: Record | None = None
        in_redis = 0
        redis_bytes = 0
        beyond = 0
        if self.broker is not None:
            key = stream.key(self.keys)
            kind = stream.message_type
            in_redis = await length(self.broker, key)
            redis_bytes = await memory_bytes(self.broker, key)
            first = next(iter(await read_range(self.broker, key, kind, count=1)), None)
            last = next(iter(await read_back(self.broker, key, kind, count=1)), None)
            beyond = in_redis if manifest.last_id == START else await self._num_after(key, manifest.last_id)
        first_id = ""
        if segments:
            first_id = segments[0].first_id
        elif first is not None:
            first_id = first.entry_id
        last_id = ""
        newest: ArchiveSegment | Record | None = None
        if last is not None and id_order(last.entry_id) > id_order(manifest.last_id):
            last_id = last.entry_id
            newest = last
        elif segments:
            last_id = segments[-1].last_id
            newest = segments[-1]
        return StreamSummary(
            stream,
            redis_entries=in_redis,
            redis_bytes=redis_bytes,
            archived_entries=manifest.entries,
            archived_bytes=manifest.num_bytes,
            segments=len(segments),
            removed_entries=manifest.removed.entries,
            entries=manifest.entries + beyond,
            first_id=first_id,
            last_id=last_id,
            first_time=_time_of(segments[0] if segments else first, 0),
            last_time=_time_of(newest, 1),
        )

    async def _num_after(self, key: str, last_id: str) -> int:
        assert self.broker is not None
        count = 0
        while entries := await read_raw(self.broker, key, id_after(last_id), count=1024):
            count += len(entries)
            last_id = entries[-1][0]
        return count

    async def _by_tickets(self, stream: StreamName, selection: Selection) -> Selection:
        """The selection with steps turned into a range of tickets, for messages that have no step."""
        if selection.steps is None or "step" in stream.message_type.model_fields:
            return selection
        wanted = Selection(steps=selection.steps)
        issued = self.messages(StreamName.PROMPTS.of(stream.lane), Ticket, wanted)
        tickets = [ticket.ticket async for ticket in issued]
        span = (float(min(tickets)), float(max(tickets))) if tickets else (0.0, -1.0)
        return replace(selection, steps=None, tickets=span)

    def _manifest(self, stream: StreamName) -> Manifest:
        if self.run_dir is None:
            return Manifest(Path())
        manifest = Manifest.load(stream_folder(self.run_dir, stream))
        if stream not in self._checked:
            self._checked.add(stream)
            for gap in gaps(manifest):
                log.warning("the archive of %s has a gap: %s", stream, gap)
        return manifest

    async def _forwards(self, stream: StreamName, selection: Selection) -> AsyncIterator[Record]:
        """The archive, then Redis; and the archive again where it grew meanwhile."""
        position = START
        while True:
            manifest = self._manifest(stream)
            if id_order(manifest.last_id) > id_order(position):
                remaining = selection.beyond(position)
                if manifest.segments:
                    async for record in self._trimmed(stream, remaining, manifest.segments[0].first_id):
                        yield record
                async for record in self._archived(manifest, stream, remaining):
                    yield record
                position = manifest.last_id
            remaining = selection.beyond(position)
            entries = await self._read(stream, remaining)
            # Read after Redis: entries are trimmed only once archived, so what Redis lacked is here.
            if id_order(self._manifest(stream).last_id) > id_order(position):
                continue
            end = entries[0].entry_id if entries else await self._first_in_redis(stream)
            async for record in self._trimmed(stream, remaining, end):
                yield record
            if not entries:
                return
            for record in entries:
                if selection.takes(record):
                    yield record
            position = entries[-1].entry_id

    async def _backwards(self, stream: StreamName, selection: Selection) -> AsyncIterator[Record]:
        """Redis, then the archive below what was found there."""
        key = stream.key(self.keys)
        remaining = selection
        first = selection.beyond(self._manifest(stream).last_id).first_id
        while self.broker is not None:
            last = remaining.last_id
            entries = await read_back(self.broker, key, stream.message_type, last, first, READ_COUNT)
            for record in entries:
                if selection.takes(record):
                    yield record
            if not entries:
                break
            remaining = replace(remaining, last_id=id_before(entries[-1].entry_id))
        # Read again: what was trimmed while Redis was read is in the archive by now.
        manifest = self._manifest(stream)
        async for record in self._archived(manifest, stream, remaining, backwards=True):
            yield record
        held = manifest.segments
        end = held[0].first_id if held else await self._first_in_redis(stream)
        async for record in self._trimmed(stream, remaining, end, backwards=True):
            yield record

    async def _first_in_redis(self, stream: StreamName) -> str:
        """Id of the oldest commit in Redis; `START` where there is none, and for other streams."""
        if self.broker is None or stream is not StreamName.COMMITS:
            return START
        entries = await read_raw(self.broker, stream.key(self.keys), count=1)
        return entries[0][0] if entries else START

    async def _trimmed(
        self, stream: StreamName, selection: Selection, end: str, backwards: bool = False
    ) -> AsyncIterator[Record]:
        """Selected commits below `end`, from the journal in the run's folder: Redis has trimmed them, and
        they were never archived."""
        if stream is not StreamName.COMMITS:
            return
        first, _ = id_order(id_before(selection.first_id))
        below, _ = id_order(id_before(min(end, id_after(selection.last_id), key=id_order)))
        if first >= below:
            return
        num_missing = below - first
        folder = self.run_dir or Path(self.run_id)
        held = -1 if self.run_dir is None else await self._threads.run(newest_below, folder, below)
        starts = range(first, held + 1, JOURNAL_STEPS)
        for start in reversed(starts) if backwards else starts:
            last = min(start + JOURNAL_STEPS - 1, held)
            commits = await self._threads.run(read_journal, folder, start, last)
            num_missing -= len(commits)
            for commit in reversed(commits) if backwards else commits:
                if selection.matches(entry_id_of(commit.step), commit):
                    yield Entry(entry_id_of(commit.step), commit)
        if num_missing and not self._is_missing_said:
            self._is_missing_said = True
            where = "no folder of it is seen here" if self.run_dir is None else f"not in {self.run_dir}"
            log.warning(
                "%d commits of run %s below step %d have left Redis, and %s: its trainer has them in %s",
                num_missing,
                self.run_id,
                below,
                where,
                JOURNAL_FILE,
            )

    async def _read(self, stream: StreamName, selection: Selection) -> list[Record]:
        """The next entries of Redis."""
        if self.broker is None:
            return []
        key = stream.key(self.keys)
        first = selection.first_id
        last = selection.last_id
        size = self._sizes.setdefault(stream, ReadSize(self.broker.max_bytes))
        return await read_range(self.broker, key, stream.message_type, first, last, READ_COUNT, size)

    async def _archived(
        self, manifest: Manifest, stream: StreamName, selection: Selection, backwards: bool = False
    ) -> AsyncIterator[Record]:
        """Selected entries of the archive, read on a thread so that the event loop is not blocked."""
        if not manifest.segments:
            return
        from tidemill.common.archive.reader import select

        parts = select(manifest, stream, selection, backwards)
        while (batch := await self._threads.run(next, parts, None)) is not None:
            for record in batch:
                if isinstance(record, Entry) and not self.claims.is_whole(record.message):
                    message = await resolved(self.claims, record.message, self._is_patient)
                    record = Entry(record.entry_id, message)
                yield record


def _time_of(end: ArchiveSegment | Record | None, which: int) -> float | None:
    """When the first (0) or the last (1) entry of a stream was made."""
    if isinstance(end, ArchiveSegment):
        return (end.details.bounds or {}).get("time", (None, None))[which]
    return time_of(end.message) if isinstance(end, Entry) else None

"""Archive and Redis as one history that a restarted trainer replays.

Redis keeps what is in flight; what was trained on since the checkpoint is in the archive. That works while
the archive is a prefix of the streams. A server that comes back without its last entries breaks it: samples
are generated again under keys that the archive has already, perhaps with lower ids. So whenever another
server answers, the two are compared before anything more is trimmed, or anything is replayed.
"""

from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog
import xxhash

from tidemill.common.archive import archive_folder, stream_folder
from tidemill.common.archive.manifest import ArchiveSegment, Manifest, last_below, missing_after
from tidemill.common.errors import ArchiveError
from tidemill.common.files import LockedError, file_checksum
from tidemill.common.process.service import ServiceContext
from tidemill.common.redis import scripts
from tidemill.common.streams import (
    START,
    Entry,
    decoded,
    entry_id_of,
    has_claim,
    id_before,
    id_order,
    last_id,
    read_raw,
    trimmed_below,
)
from tidemill.common.streams.entries import Garbled
from tidemill.common.wire import codec
from tidemill.common.wire.keys import StreamName
from tidemill.common.wire.messages import Choices, Trajectory

if TYPE_CHECKING:
    from tidemill.common.history import History

log = structlog.get_logger(__name__)

NUMBERED = (StreamName.PROMPTS, StreamName.COMMITS)
ALIGNED = (*NUMBERED, StreamName.TRAJECTORIES, StreamName.SCORES)
"""Streams that a replay reads beyond the checkpoint."""
Positions = Mapping[StreamName, str]


class ArchivedHistory:
    """The archive of a run, compared with its Redis."""

    def __init__(self, context: ServiceContext) -> None:
        self.broker = context.broker
        self.keys = context.keys
        self.run_dir = context.run_dir
        self._threads = context.outside
        self.is_used = context.config.streams.archive.enabled or self.folder.is_dir()

    async def is_empty(self) -> bool:
        """Whether neither Redis nor the archive has, or has had, a ticket or a commit: the run begins."""
        for stream in NUMBERED:
            if await last_id(self.broker, stream.key(self.keys)) != START:
                return False
            try:
                manifest = await self._threads.run(Manifest.load, self._folder(stream))
            except ArchiveError:  # there is one, which cannot be read
                return False
            if manifest.last_id != START:
                return False
        return True

    def read(self) -> "History":
        from tidemill.common.history import History  # a run that begins has none

        return History(self.keys.run_id, self.run_dir, self.broker)

    async def begins_at_start(self) -> bool:
        """Whether tickets and commits go back to the first one, so that all can be replayed."""
        history = self.read()
        for stream in (StreamName.PROMPTS, StreamName.COMMITS):
            first = await anext(history.scan(stream), None)
            if first is None or first.entry_id != entry_id_of(0):
                return False
        return True

    async def align(self, settled: Positions | None = None) -> bool:
        """Make the archive a prefix of the streams; False where it is being written just now.

        A running trainer keeps all of it: what is archived was settled before Redis lost it. A trainer that
        starts knows that only of what its checkpoint had `settled`: entries above are forgotten where Redis
        has lost them, because their tickets are open again.
        """
        from tidemill.common.archive.archiver import sweep, writing  # brings pyarrow, which takes its time

        if not self.is_used:
            return True
        try:
            # The archiver's own lock: it must not append behind what is being cut off.
            with writing(self.run_dir):
                for stream in ALIGNED:
                    folder = self._folder(stream)
                    manifest = await self._threads.run(sweep, folder)
                    if manifest.last_id != START:
                        await self._align(stream, manifest, settled)
        except LockedError:
            return False
        return True

    async def _align(self, stream: StreamName, manifest: Manifest, settled: Positions | None) -> None:
        from tidemill.common.archive.archiver import cut_back

        last = manifest.last_id
        standing = await self._standing(stream, manifest)
        if id_order(standing) >= id_order(last):
            return
        keep = last
        if settled is not None:
            keep = max(standing, min(last, settled.get(stream, START), key=id_order), key=id_order)
        key = stream.key(self.keys)
        is_numbered = stream in NUMBERED
        has_moved = await scripts.continue_after(
            self.broker,
            stream=key,
            last_known=standing,
            entry_id=keep,
            # Numbered entries have explicit ids.
            moves_last_id=not is_numbered,
        )
        if not has_moved:
            keep = standing  # what came since would never be archived
        if keep == last:
            return
        num_lost = await self._threads.run(cut_back, manifest.folder, stream.message_type, keep)
        log.warning(
            "Redis has lost entries that were archived; the archive forgets them too",
            stream=str(stream),
            after=keep,
            count=num_lost,
        )

    async def _standing(self, stream: StreamName, manifest: Manifest) -> str:
        """The id up to which the archive has what Redis holds or has trimmed; it loses the newest first."""
        key = stream.key(self.keys)
        below = await trimmed_below(self.broker, self.keys.state, key)
        standing = id_before(below)
        first = await read_raw(self.broker, key, count=1)
        # Redis is empty, or trimmed beyond the archive: there is no entry to compare.
        if not first or id_order(standing) >= id_order(manifest.last_id):
            return standing
        first_id = max(first[0][0], below, key=id_order)
        # Redis loses the newest first: below the first one that stands, all others stand.
        async for record in self._newest_first(manifest, stream, first_id):
            entries = await read_raw(self.broker, key, record.entry_id, record.entry_id, 1)
            if entries and _payload(
                decoded(entries[0][0].encode(), entries[0][1], stream.message_type)
            ) == _payload(record):
                return record.entry_id
        return standing

    async def _newest_first(
        self, manifest: Manifest, stream: StreamName, first_id: str
    ) -> AsyncIterator[Entry[Any] | Garbled]:
        from tidemill.common.archive.reader import select
        from tidemill.common.streams.selection import Selection

        parts = select(manifest, stream, Selection(first_id, manifest.last_id), backwards=True)
        while (records := await self._threads.run(next, parts, None)) is not None:
            for record in records:
                yield record

    async def missing(self, needed: Positions) -> list[str]:
        """Which entries after these positions neither the archive nor Redis has, as sentences."""
        if not self.is_used:
            return []
        problems: list[str] = []
        for stream, position in needed.items():
            below = await trimmed_below(self.broker, self.keys.state, stream.key(self.keys))
            try:
                problems += await self._threads.run(
                    _missing, self._folder(stream), position, last_below(stream, below)
                )
            except ArchiveError as error:
                problems.append(str(error))
        return problems

    def _folder(self, stream: StreamName) -> Path:
        return stream_folder(self.run_dir, stream)

    @property
    def folder(self) -> Path:
        return archive_folder(self.run_dir)


def _missing(folder: Path, position: str, trimmed: str) -> list[str]:
    manifest = Manifest.load(folder)
    problems = []
    if id_order(manifest.removed.last_id) > id_order(position):
        problems.append(f"entries up to {manifest.removed.last_id} were removed by retention")
    problems += missing_after(manifest, position, trimmed)
    needed = [segment for segment in manifest.segments if id_order(segment.last_id) > id_order(position)]
    damages = map(_damage, needed)
    problems += filter(None, damages)
    return [f"{folder}: {problem}" for problem in problems]


def _damage(segment: ArchiveSegment) -> str:
    content = f"{segment.path.name}, with {segment.entries} entries,"
    try:
        is_whole = file_checksum(segment.path) == segment.checksum
    except OSError as error:
        return f"{content} cannot be read: {error.strerror}"
    return "" if is_whole else f"{content} is damaged: its checksum differs"


def _payload(record: Entry[Any] | Garbled) -> Any:
    """A value that differs between records; a claim has that of the payload that it claims."""
    if isinstance(record, Garbled):
        return record.fields
    message = record.message
    if has_claim(message):
        return message.claim.digest
    if isinstance(message, Trajectory) and message.choices is not None:
        message = message.model_copy(update={"choices": Choices(claim=message.choices.claim)})
    return xxhash.xxh3_128_hexdigest(codec.encode_payload(message))

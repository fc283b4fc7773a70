"""Archive and Redis as one history that a restarted trainer replays.

Redis keeps what is in flight; what was trained on since the checkpoint is in the archive. That works while
the archive is a prefix of the streams. A server that comes back without its last entries breaks it: samples
are generated again under keys that the archive has already, perhaps with lower ids. So whenever another
server answers, the two are compared before anything more is trimmed, or anything is replayed. Of scores:

    archive            10-0  11-0  12-0  13-0
    Redis                    11-0                 10-0 was trimmed, 12-0 and 13-0 are lost
    equal up to              11-0

Where 13-0 was settled, the archive stays, and Redis gives new entries higher ids. Else, or where Redis has a
new entry up to 13-0 already, the archive is cut back to 11-0.
"""

from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog
import xxhash

from tidemill.common.archive import archive_folder, stream_folder
from tidemill.common.archive.manifest import (
    CONSECUTIVE,
    ArchiveSegment,
    Manifest,
    last_below,
    missing_after,
)
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

ALIGNED = (*CONSECUTIVE, StreamName.TRAJECTORIES, StreamName.SCORES)
"""Streams that a replay reads beyond the checkpoint."""
Positions = Mapping[StreamName, str]
"""Stream -> id of an entry: everything up to it is meant."""


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
        for stream in CONSECUTIVE:
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
        for stream in CONSECUTIVE:
            first = await anext(history.scan(stream), None)
            if first is None or first.entry_id != entry_id_of(0):
                return False
        return True

    async def align(self, settled: Positions | None = None) -> bool:
        """Make the archive a prefix of the streams; False where it is being written just now.

        A running trainer gives no `settled`, and all of the archive is kept: it has only what was settled
        (trained or given up) before Redis lost it. A trainer that starts knows that only of what its
        checkpoint had `settled`: entries above are forgotten where Redis has lost them, because their tickets
        are open again.
        """
        if not self.is_used:
            return True
        from tidemill.common.archive.archiver import sweep, writing  # brings pyarrow, which takes its time

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

        archived_id = manifest.last_id
        equal_id = await self._equal_up_to(stream, manifest)
        if id_order(equal_id) >= id_order(archived_id):
            return
        kept_id = archived_id
        if settled is not None:
            settled_id = min(archived_id, settled.get(stream, START), key=id_order)
            kept_id = max(equal_id, settled_id, key=id_order)
        can_follow = await scripts.continue_after(
            self.broker,
            stream=stream.key(self.keys),
            last_known=equal_id,
            entry_id=kept_id,
            # Consecutive entries are appended with explicit ids: the stream's last one need not move.
            moves_last_id=stream not in CONSECUTIVE,
        )
        if not can_follow:
            # Redis has new entries below `kept_id` already, which would never be archived.
            kept_id = equal_id
        if kept_id == archived_id:
            return
        num_lost = await self._threads.run(cut_back, manifest.folder, stream.message_type, kept_id)
        log.warning(
            "Redis has lost entries that were archived; the archive forgets them too",
            stream=str(stream),
            after=kept_id,
            count=num_lost,
        )

    async def _equal_up_to(self, stream: StreamName, manifest: Manifest) -> str:
        """The id up to which Redis has trimmed the stream, or holds what the archive has."""
        key = stream.key(self.keys)
        below = await trimmed_below(self.broker, self.keys.state, key)
        trimmed_id = id_before(below)
        first = await read_raw(self.broker, key, count=1)
        # Redis is empty, or trimmed beyond the archive: there is no entry to compare.
        if not first or id_order(trimmed_id) >= id_order(manifest.last_id):
            return trimmed_id
        first_id = max(first[0][0], below, key=id_order)
        # A server loses its newest entries first: where one is equal, all before it are.
        async for record in self._newest_first(manifest, stream, first_id):
            entries = await read_raw(self.broker, key, record.entry_id, record.entry_id, 1)
            if not entries:
                continue
            entry_id, fields = entries[0]
            of_redis = decoded(entry_id.encode(), fields, stream.message_type)
            if _fingerprint(of_redis) == _fingerprint(record):
                return record.entry_id
        return trimmed_id

    async def _newest_first(
        self, manifest: Manifest, stream: StreamName, first_id: str
    ) -> AsyncIterator[Entry[Any] | Garbled]:
        from tidemill.common.archive.reader import select
        from tidemill.common.streams.selection import Selection

        batches = select(manifest, stream, Selection(first_id, manifest.last_id), backwards=True)
        while (records := await self._threads.run(next, batches, None)) is not None:
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


def _missing(folder: Path, position: str, trimmed_id: str) -> list[str]:
    """What the archive lacks of the entries after `position`. Up to `trimmed_id` Redis has none."""
    manifest = Manifest.load(folder)
    problems = []
    if id_order(manifest.removed.last_id) > id_order(position):
        problems.append(f"entries up to {manifest.removed.last_id} were removed by retention")
    problems += missing_after(manifest, position, trimmed_id)
    needed = [segment for segment in manifest.segments if id_order(segment.last_id) > id_order(position)]
    damages = map(_damage, needed)
    problems += filter(None, damages)
    return [f"{folder}: {problem}" for problem in problems]


def _damage(segment: ArchiveSegment) -> str:
    """What is wrong with a segment's file; empty where it is whole."""
    content = f"{segment.path.name}, with {segment.entries} entries,"
    try:
        is_whole = file_checksum(segment.path) == segment.checksum
    except OSError as error:
        return f"{content} cannot be read: {error.strerror}"
    return "" if is_whole else f"{content} is damaged: its checksum differs"


def _fingerprint(record: Entry[Any] | Garbled) -> Any:
    """A value that is equal for equal records alone. Of a claim to a payload that is stored elsewhere it is
    the payload's digest, which is also the fingerprint of the record with the payload in it."""
    if isinstance(record, Garbled):
        return record.fields
    message = record.message
    if has_claim(message):
        return message.claim.digest
    if isinstance(message, Trajectory) and message.choices is not None:
        message = message.model_copy(update={"choices": Choices(claim=message.choices.claim)})
    return xxhash.xxh3_128_hexdigest(codec.encode_payload(message))

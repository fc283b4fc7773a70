"""Trims streams, removes the payloads of what is gone, and forgets processes that are gone.

Where the run archives, an entry that no outstanding group needs is trimmed as soon as it is archived and its
step committed: a restart replays it from the archive. Dead letters are trimmed below the oldest kept
checkpoint; so are all entries of a run without an archive (`checkpointing.py`).
"""

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING

import structlog

from tidemill.common.archive import stream_folder
from tidemill.common.archive.manifest import Manifest, note_trim
from tidemill.common.errors import ArchiveError, StoreError
from tidemill.common.files import StorageError
from tidemill.common.process.service import ServiceContext
from tidemill.common.streams import (
    START,
    HeldTickets,
    Mark,
    MarkLostError,
    id_after,
    id_before,
    id_order,
    read_raw,
    trim_before,
)
from tidemill.common.streams.departed import DepartedProcesses
from tidemill.common.wire.keys import ROLLOUT_GROUP, StreamName
from tidemill.common.wire.messages import CLAIMS_FOLDER, Lane
from tidemill.services.trainer.batch.reconciler import TRIMMING, Reconciler
from tidemill.services.trainer.durable.archive_requests import ArchiveRequests, claims_in
from tidemill.services.trainer.durable.archived_history import ArchivedHistory
from tidemill.services.trainer.durable.waiting import on_disk

if TYPE_CHECKING:
    from tidemill.common.store import ClaimStore

log = structlog.get_logger(__name__)


class Trimmer:
    """Trims unneeded entries; archived ones only, if archiving is on.

    What may be trimmed is decided by ids of one epoch (`Reconciler.epoch`), and trimmed in that one only:
    another server may have given these ids to other entries.
    """

    def __init__(self, context: ServiceContext, reconciler: Reconciler) -> None:
        self.context = context
        self.reconciler = reconciler
        self.archives = context.config.streams.archive.enabled
        self.archived = ArchivedHistory(context)
        self.requests = ArchiveRequests(context, self._trim_archived)
        self._claims: ClaimStore | None = None
        """The payloads of large trajectories; None while the run has none."""
        self.first_ticket = 0
        """Tickets below it were settled at the oldest checkpoint that a trainer may restore."""
        self._below: dict[StreamName, str] = {}
        """Entries below these ids may be trimmed, and some are still there."""
        self._decided_in = 0
        """The epoch of the ids in `_below`."""
        self._aligned_in = 0
        """The last epoch in which the archive was a prefix of the server's streams."""
        self._changing = asyncio.Lock()
        self.departed = DepartedProcesses(context.broker, context.keys)

    @property
    def epoch(self) -> int:
        """The epoch of ids that are read now."""
        return self.reconciler.epoch

    @property
    def is_waiting(self) -> bool:
        """Whether entries that are not archived yet wait to be trimmed."""
        return bool(self._below)

    async def release(self, below: Mapping[StreamName, str], epoch: int, is_urgent: bool = False) -> None:
        """Trim what lies below these ids of an epoch, now or when it is archived. `is_urgent`: memory runs
        low."""
        if epoch != self._decided_in:
            self._below.clear()
            self._decided_in = epoch
        for stream, entry_id in below.items():
            decided = self._below.get(stream, START)
            # The greater one: a checkpoint's positions may come after those of later steps.
            self._below[stream] = max(entry_id, decided, key=id_order)
        await self.trim()
        if self._below:
            await self.requests.ask(
                {stream: id_before(end) for stream, end in self._below.items()}, is_urgent
            )

    async def trim(self) -> int:
        """Trim as far as that is allowed by now; returns how many entries were removed."""
        removed = 0
        async with self._changing:
            mark = await self._mark() if self._below else None
            # Checked again: `_mark` empties it where another server has answered.
            if self._below and not await self._is_aligned():
                return 0  # the next step, or the archiver that writes just now, calls again
            for stream, wanted in list(self._below.items()):
                # Read again each time: the archiver is another process, and may have moved on since.
                allowed = await self.context.outside.run(self._allowed, stream)
                first = wanted if allowed is None else min(wanted, allowed, key=id_order)
                broker = self.context.broker
                key = stream.key(self.context.keys)
                # Before the trim: by this note a restart finds what neither Redis nor the archive has.
                if allowed is not None and first != START:
                    await on_disk(self.context, note_trim, stream_folder(self.context.run_dir, stream), first)
                try:
                    held = self._held(stream)
                    removed += await trim_before(broker, key, first, mark, held)
                except MarkLostError:
                    # Another server since the mark: it may have given all these ids to other entries.
                    self._below.clear()
                    break
                is_done = first == wanted
                if not is_done:
                    is_done = not await read_raw(broker, key, last=id_before(wanted), count=1)
                # Else entries below it wait for the archiver, whose progress calls again.
                if is_done:
                    self._below.pop(stream, None)
        if removed:
            log.debug("streams trimmed", entries=removed)
        return removed

    def _held(self, stream: StreamName) -> HeldTickets | None:
        """For the streams of tickets, what `trim_before` needs to take them from workers that hold them."""
        for lane in Lane:
            if stream.key(self.context.keys) == self.context.keys.prompts(lane):
                prefix, suffix = self.context.keys.progress_around(lane)
                return HeldTickets(ROLLOUT_GROUP, prefix, suffix)
        return None

    async def _trim_archived(self) -> None:
        """Trim as the archiver makes progress, which may be long after the checkpoint that requested it."""
        if await self.trim():
            await self.collect_claims()

    async def _mark(self) -> Mark:
        # First the mark, then the check of the epoch. The other way round, Redis could restart in between,
        # and the mark would be on a server to which the ids do not belong.
        mark = await self.reconciler.mark(TRIMMING)
        await self.reconciler.check_server()
        if self.epoch != self._decided_in:
            self._below.clear()  # the next checkpoint decides again
        return mark

    async def _is_aligned(self) -> bool:
        """Whether the archive is a prefix of this server's streams. Another server may have lost entries, and
        given their ids to others: those would be taken for archived."""
        if not self.archives or self._aligned_in == self._decided_in:
            return True
        try:
            if await self.archived.align():
                self._aligned_in = self._decided_in
        except (ArchiveError, StorageError) as error:
            log.error("nothing is trimmed: the archive cannot be held against Redis", problem=str(error))
        return self._aligned_in == self._decided_in

    def _allowed(self, stream: StreamName) -> str | None:
        """The id below which all entries are archived; None where they need not be."""
        if not self.archives:
            return None
        try:
            last_id = Manifest.load(stream_folder(self.context.run_dir, stream)).last_id
        except ArchiveError as error:
            log.error("nothing is trimmed: the archive's manifest is damaged", problem=str(error))
            return START
        return START if last_id == START else id_after(last_id)

    async def collect_claims(self) -> None:
        """Remove the payloads of settled tickets. Those stay that an entry in Redis claims, or one that was
        archived without its payload. While the store is down all stay."""
        try:
            claims = await self.context.outside.run(self._open_claims)
            if claims is None:
                return
            settled = await claims.threads.run(claims.settled, self.first_ticket)
            if settled:
                key = self.context.keys.trajectories()
                claimed = {claim.pointer async for claim in claims_in(self.context.broker, key)}
                # After Redis: an entry is archived before it is trimmed.
                claimed |= await self.context.outside.run(self._bare_claims)
                await claims.threads.run(claims.remove, settled - claimed)
        except (OSError, StoreError, ArchiveError) as error:
            log.warning("payloads that are no longer needed stay for now", error=str(error))

    def _open_claims(self) -> "ClaimStore | None":
        url = self.context.config.streams.claim_check_url
        folder = self.context.run_dir / CLAIMS_FOLDER
        if self._claims is None and (url or folder.is_dir()):
            from tidemill.common.store import ClaimStore

            self._claims = ClaimStore(self.context.run_dir, url=url)
        return self._claims

    def _bare_claims(self) -> set[str]:
        """Pointers that the archive still needs: their payloads were missing when it was written."""
        if not self.archived.is_used:
            return set()
        return Manifest.load(stream_folder(self.context.run_dir, StreamName.TRAJECTORIES)).bare_claims()

    async def close(self) -> None:
        """Stop archiving; at the end of a run, first wait for what was requested."""
        await self.requests.close()

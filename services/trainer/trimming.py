"""Lets go of entries that nobody needs any more; where the run archives, of those alone that are archived.

Guarantees: nothing is trimmed beyond what was asked for, nor beyond the archive; no step waits for either.
What is not archived yet is trimmed as soon as it is.
"""

import asyncio
from collections.abc import Mapping
from functools import partial

import structlog

from common.archive import stream_folder
from common.archive.gaps import note_trim
from common.archive.manifest import Manifest
from common.errors import ArchiveError
from common.history.selection import StreamName
from common.service import ServiceContext
from common.streams import START, id_after, id_before, id_order, read_raw, trim_before
from services.trainer.archive_jobs import ArchiveJobs
from services.trainer.storage import until_stored

log = structlog.get_logger(__name__)


class Trimmer:
    """Knows what may go, and how far the archive is."""

    def __init__(self, context: ServiceContext) -> None:
        self.context = context
        self.archives = context.config.streams.archive.enabled
        self.jobs = ArchiveJobs(context, self.trim)
        self._below: dict[StreamName, str] = {}
        """Entries below these ids may go, and some are still there."""
        self._changing = asyncio.Lock()

    async def let_go(self, below: Mapping[StreamName, str], is_urgent: bool = False) -> None:
        """Trim what lies below these ids, now or when it is archived. `is_urgent`: memory runs low."""
        for stream, entry_id in below.items():
            known = self._below.get(stream, START)
            self._below[stream] = max(entry_id, known, key=id_order)
        await self.trim()
        if self._below:
            await self.jobs.ask({stream: id_before(end) for stream, end in self._below.items()}, is_urgent)

    async def trim(self) -> int:
        """Trim as far as that is allowed by now; returns how many entries went."""
        removed = 0
        async with self._changing:
            for stream, wanted in list(self._below.items()):
                allowed = await asyncio.to_thread(self._allowed, stream)
                first = wanted if allowed is None else min(wanted, allowed, key=id_order)
                broker, key = self.context.broker, stream.key(self.context.keys)
                if allowed is not None and first != START:
                    note = partial(note_trim, stream_folder(self.context.run_dir, stream), first)
                    await until_stored(self.context, partial(asyncio.to_thread, note))
                removed += await trim_before(broker, key, first)
                if first == wanted or not await read_raw(broker, key, last=id_before(wanted), count=1):
                    del self._below[stream]
        if removed:
            log.debug("streams trimmed", entries=removed)
        return removed

    @property
    def is_waiting(self) -> bool:
        """Whether something may go that is not archived yet."""
        return bool(self._below)

    async def close(self) -> None:
        """Ask for nothing any more."""
        await self.jobs.close()

    def _allowed(self, stream: StreamName) -> str | None:
        """Entries below this id are archived; None where nothing has to be."""
        if not self.archives:
            return None
        try:
            last_id = Manifest.load(stream_folder(self.context.run_dir, stream)).last_id
        except ArchiveError as error:
            log.error("nothing is trimmed: the archive's manifest is damaged", problem=str(error))
            return START
        return START if last_id == START else id_after(last_id)

"""Kills of the archiver at any moment of its work, and whether archive and streams agree afterwards."""

import asyncio
import contextlib
import random
from collections.abc import Callable
from typing import Any

import psutil

from tests.chaos.archive import Archive, StreamCopy
from tests.chaos.fleet import Fleet
from tests.support.waiting import wait_until
from tidemill.common.archive import archive_folder
from tidemill.common.archive.archiver import archive_run
from tidemill.common.history import History, StreamName
from tidemill.common.streams import Entry

ROLE = "jobs"
POLL_S = 0.02
STUCK_S = 300.0
LONGEST_DELAY_S, LONGEST_DELAY_OF_FORKED_S = 0.6, 0.1
"""About what a job takes: its imports, which forked ones are spared, and some segments.

Half as long after each kill that came too late."""


class ArchiverKiller:
    """Kills every other job half-way, sometimes with its worker."""

    def __init__(self, fleet: Fleet, rng: random.Random) -> None:
        self.fleet, self.rng = fleet, rng
        self.num_kills = 0
        """Of jobs that were at work."""
        self._longest_delay_s = LONGEST_DELAY_OF_FORKED_S if fleet.is_forked else LONGEST_DELAY_S

    async def run(self) -> None:
        """For ever."""
        while True:
            job = await self._next_job()
            # The first one as soon as it is seen: a run may have few jobs, and short ones.
            await asyncio.sleep(self.rng.uniform(0, self._longest_delay_s) if self.num_kills else 0.0)
            with contextlib.suppress(psutil.NoSuchProcess):
                if self._is_done(job):
                    self._longest_delay_s /= 2
                    continue
                job.kill()
                self.num_kills += 1
                if self.rng.random() < 0.5:
                    for name in self.fleet.running(ROLE):
                        self.fleet.kill(name)
            await self._until_done(await self._next_job())

    async def _next_job(self) -> psutil.Process:
        """RQ does each job in a child of its worker."""
        while True:
            for name in self.fleet.running(ROLE):
                with contextlib.suppress(psutil.NoSuchProcess):
                    for child in psutil.Process(self.fleet.members[name].process.pid).children():
                        if not self._is_done(child):
                            return child
            await asyncio.sleep(POLL_S)

    async def _until_done(self, job: psutil.Process) -> None:
        """A job of many small files takes long on a busy machine: it is stuck where none is written."""
        with contextlib.suppress(psutil.NoSuchProcess):
            while not self._is_done(job):
                before = self._written_at()
                await wait_until(
                    lambda seen=before: self._is_done(job) or self._written_at() != seen, STUCK_S
                )

    def _written_at(self) -> int:
        """When a file of the archive last came or went."""
        folders = archive_folder(self.fleet.run_dir).glob("*")
        return max((folder.stat().st_mtime_ns for folder in folders), default=0)

    @staticmethod
    def _is_done(job: psutil.Process) -> bool:
        return not job.is_running() or job.status() == psutil.STATUS_ZOMBIE


async def disagreements(fleet: Fleet, copies: Archive) -> list[str]:
    """What the archive has otherwise than the streams had; they have been archived to their ends then."""
    config = fleet.config.streams.archive
    if not config.enabled:
        return []
    await archive_run(fleet.broker, fleet.keys, fleet.run_dir, config, is_last=True, patience_s=60.0)
    history = History(fleet.keys.run_id, fleet.run_dir, None)
    found: list[str] = []
    for stream in StreamName:
        copy = copies.by_key().get(stream.key(fleet.keys))
        if copy is not None:
            found += await _differences(history, stream, copy, copies.whole)
    return found


async def _differences(
    history: History, stream: StreamName, copy: StreamCopy[Any], whole: Callable[[Any], Any]
) -> list[str]:
    archived: dict[str, Any] = {}
    found = []
    async for record in history.scan(stream):
        if record.entry_id in archived:
            found.append(f"{stream} {record.entry_id}: archived twice")
        archived[record.entry_id] = record.message if isinstance(record, Entry) else None
    for entry_id, message in copy.entries.items():
        if entry_id not in archived:
            found.append(f"{stream} {entry_id}: not archived")
        elif archived[entry_id] not in (whole(message), whole(copy.lost.get(entry_id))):
            found.append(f"{stream} {entry_id}: archived with another message")
    # What Redis has lost with its tail may have been archived before: it is history all the same.
    unknown = archived.keys() - copy.entries.keys() - copy.lost.keys() - set(copy.garbled)
    return found + [f"{stream} {entry_id}: no stream had it" for entry_id in sorted(unknown)]

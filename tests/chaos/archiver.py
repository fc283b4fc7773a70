"""Kills of the archiver at any moment of its work, and whether archive and streams agree afterwards."""

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psutil

from tests.chaos.archive import Archive, StreamCopy
from tests.chaos.fleet import Fleet
from tests.support.waiting import has_ended, wait_until
from tidemill.common.archive import archive_folder
from tidemill.common.archive.archiver import archive_run
from tidemill.common.history import History, StreamName
from tidemill.common.process.programs import Program
from tidemill.common.streams import Entry

POLL_S = 0.02
STUCK_S = 300.0
LONGEST_DELAY_S = 1.2
"""About what an archiver takes: its imports, and some segments. Half as long after each kill that came too
late."""


class ArchiverKiller:
    """Kills every other archiver that the trainer starts, half-way."""

    def __init__(self, fleet: Fleet, rng: random.Random) -> None:
        self.fleet = fleet
        self.rng = rng
        self.num_kills = 0
        """Of those that were at work."""
        self._longest_delay_s = LONGEST_DELAY_S

    async def run(self) -> None:
        while True:
            archiver = await self._next()
            # The first one as soon as it is seen: a run may have few, and short ones.
            await asyncio.sleep(self.rng.uniform(0, self._longest_delay_s) if self.num_kills else 0.0)
            with suppress(psutil.NoSuchProcess):
                if has_ended(archiver):
                    self._longest_delay_s /= 2
                    continue
                archiver.kill()
                self.num_kills += 1
            await self._until_done(await self._next())

    async def _until_done(self, archiver: psutil.Process) -> None:
        """One that writes many small files takes long on a busy machine: it is stuck where it writes none."""
        with suppress(psutil.NoSuchProcess):
            while not has_ended(archiver):
                before = self._written_at()
                await wait_until(
                    lambda seen=before: has_ended(archiver) or self._written_at() != seen, STUCK_S
                )

    def _written_at(self) -> int:
        """When a file of the archive last came or went."""
        folders = archive_folder(self.fleet.run_dir).glob("*")
        return max((folder.stat().st_mtime_ns for folder in folders), default=0)

    async def _next(self) -> psutil.Process:
        while True:
            for name in self.fleet.running("trainer"):
                with suppress(psutil.NoSuchProcess):
                    for child in psutil.Process(self.fleet.members[name].process.pid).children():
                        if not has_ended(child) and Program.ARCHIVE in child.cmdline():
                            return child
            await asyncio.sleep(POLL_S)


async def disagreements(fleet: Fleet, copies: Archive) -> list[str]:
    """What the archive has otherwise than the streams had; they have been archived to their ends then."""
    config = fleet.config.streams.archive
    if not config.enabled:
        return []
    await archive_run(fleet.broker, fleet.keys, fleet.run_dir, config, is_last=True)
    history = History(fleet.keys.run_id, fleet.run_dir, None)
    differences: list[str] = []
    for stream in StreamName:
        copy = copies.by_key().get(stream.key(fleet.keys))
        if copy is not None:
            differences += await _differences(history, stream, copy, copies.whole)
    return differences


async def _differences(
    history: History, stream: StreamName, copy: StreamCopy[Any], whole: Callable[[Any], Any]
) -> list[str]:
    archived: dict[str, Any] = {}
    differences = []
    async for record in history.scan(stream):
        if record.entry_id in archived:
            differences.append(f"{stream} {record.entry_id}: archived twice")
        archived[record.entry_id] = record.message if isinstance(record, Entry) else None
    for entry_id, message in copy.entries.items():
        if entry_id not in archived:
            differences.append(f"{stream} {entry_id}: not archived")
        elif archived[entry_id] not in (whole(message), whole(copy.lost.get(entry_id))):
            differences.append(f"{stream} {entry_id}: archived with another message")
    # What Redis has lost with its tail may have been archived before: it is history all the same.
    unknown = archived.keys() - copy.entries.keys() - copy.lost.keys() - set(copy.garbled)
    return differences + [f"{stream} {entry_id}: no stream had it" for entry_id in sorted(unknown)]

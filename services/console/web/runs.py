"""The runs that can be looked at: those of the runs folder, and those that the environment's Redis knows.

Guarantees: reading changes nothing in a run; where its Redis goes away, what is known stays, and what is left
of its streams is still read. A Redis that was started only to read a run's data stops after `UNWATCHED_S`
without a request, so that the run can be resumed. No more than `MAX_OPEN_RUNS` are followed at once; the one
that was requested least recently is closed.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Any

from tidemill.common.config import RunConfig
from tidemill.common.errors import TidemillError
from tidemill.common.history import History
from tidemill.common.redis.client import URL_VARIABLE
from tidemill.common.run.state import (
    CONFIG_FILE,
    FINISHED,
    METRICS_FILE,
    known_runs,
    read_records,
    run_exists,
)
from tidemill.common.wire.keys import RUN_ID, Keys
from tidemill.services.console.run.end import LOST, RunEnd, read_end
from tidemill.services.console.run.folder import RunFolder, connected
from tidemill.services.console.run.history import LIVE, open_history
from tidemill.services.console.status.report import read_report
from tidemill.services.console.status.snapshot import RunSnapshot, SnapshotReader, points_of, read_folder
from tidemill.services.console.web.groups import GroupIndex
from tidemill.services.console.web.texts import TokenTexts

REFRESH_S = 1.0
REFRESH_STILL_S = 5.0
"""Interval for a run whose Redis is gone."""
RETRY_S = 5.0
"""Pause after the run's history could not be had."""
UNWATCHED_S = 90.0
ENDED = (FINISHED, "failed", "stopped", "ended", LOST)
MAX_OPEN_RUNS = 4
MAX_LISTED_RUNS = 500
FIRST_LOOK_S = 3.0
"""A request for a run that was not watched yet waits at most this long for the first reading."""
KNOWN_RUNS_S = 3.0


class WatchedRun:
    """A run whose pages are open: its history, its index and its latest snapshot, kept up to date.

    `touch`, then read `index`, `snapshot` and `history`; `close` at the end.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.config: RunConfig | None = None
        self.index = GroupIndex()
        self.snapshot: RunSnapshot | None = None
        self.history: History | None = None
        """None while nothing can be read."""
        self.source = ""
        """Where it is read from, in words."""
        self.problem = ""
        """Why it cannot be read now, in words; empty while all is well."""
        self.has_looked = asyncio.Event()
        """Set when a reading has ended, also by an error; cleared when the history was released."""
        self.opened_at = 0.0
        """When reading began, by `time.monotonic`."""
        self._asked_at = 0.0
        self._texts: TokenTexts | None = None
        self._folder_changed_at = -1.0
        self._task: asyncio.Task[None] | None = None

    @property
    def run_id(self) -> str:
        return self.folder.run_id

    @property
    def is_live(self) -> bool:
        """Whether it may change at any moment."""
        return self.source == LIVE and self.status not in ENDED

    @property
    def status(self) -> str:
        """The status in the run's state; where its Redis is gone and no end is recorded, by its folder."""
        status = self.snapshot.status if self.snapshot else "unknown"
        is_gone = self.source != LIVE and status not in ENDED
        return read_end(self.folder).status if is_gone and self.has_looked.is_set() else status

    def touch(self) -> None:
        """Somebody looks: follow the run, or go on with it."""
        self._asked_at = time.monotonic()
        if self._task is None or self._task.done():
            self.opened_at = self._asked_at
            self._task = asyncio.create_task(self._watch(), name=f"watch {self.run_id}")

    @property
    def _is_watched(self) -> bool:
        return time.monotonic() - self._asked_at < UNWATCHED_S

    async def texts(self) -> TokenTexts:
        if self._texts is None:
            path = Path(self.config.model.path) if self.config else None
            self._texts = await asyncio.to_thread(TokenTexts.load, path)
        return self._texts

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            # Not awaited itself: it would raise its own cancellation here.
            await asyncio.wait([self._task])

    async def _watch(self) -> None:
        """Until nobody has looked for a while."""
        while self._is_watched:
            self.opened_at = time.monotonic()
            try:
                async with open_history(self.run_id, self.folder.runs) as access:
                    self.config, self.source = access.config or self.config, access.source
                    await self._follow(access.history)
                self.has_looked.clear()
                continue
            except TidemillError as error:
                self.problem = str(error)
            except Exception as error:
                self.problem = f"{type(error).__name__}: {error}"
            finally:
                # Its connections are closed: a page that went on with it would fail.
                self.history = None
            with contextlib.suppress(TidemillError, OSError, ValueError):
                await self._read_folder()  # what there is; `problem` says why it is not more
            self.has_looked.set()
            await asyncio.sleep(RETRY_S)

    async def _follow(self, history: History) -> None:
        """Follow the run until it has another Redis, or no page was requested for `UNWATCHED_S`."""
        self.history = history
        address = self.folder.address()
        reader = await SnapshotReader.attach(history.broker, self.run_id) if history.broker else None
        while self.folder.address() == address and self._is_watched:
            if reader is not None:
                self.snapshot = await reader.read()
            else:
                await self._read_folder()
            await self.index.follow(history)
            self.problem = ""
            self.has_looked.set()
            await asyncio.sleep(REFRESH_S if self.is_live else REFRESH_STILL_S)

    async def _read_folder(self) -> None:
        """What the folder alone tells, when it has changed."""
        path = self.folder.path / METRICS_FILE
        changed_at = path.stat().st_mtime if path.exists() else 0.0
        if self.folder.config() is None or changed_at == self._folder_changed_at:
            return
        self._folder_changed_at = changed_at
        self.config = self.config or self.folder.config()
        snapshot, _ = await asyncio.to_thread(read_folder, self.folder)
        self.snapshot = snapshot
        report = await asyncio.to_thread(read_report, self.folder)
        if report and snapshot.status == FINISHED:
            snapshot.state["status"] = FINISHED if report.get("ok") else "ended"
        for point in points_of(await asyncio.to_thread(read_records, path)):
            # A commit has more of a step than its line: points from the streams stay.
            self.index.steps.setdefault(point.step, point)


@dataclass(frozen=True, slots=True)
class ListedRun:
    run_id: str
    status: str
    report: Mapping[str, Any]
    """Its summary; empty while it has none."""
    changed_at: float = 0.0
    end: RunEnd | None = None
    """How it ended and why; None where there is no folder of it here."""


class Catalog:
    def __init__(self, runs: Path) -> None:
        self.runs = runs
        self._open: dict[str, WatchedRun] = {}

    async def lines(self) -> list[ListedRun]:
        lines = {line.run_id: line for line in await asyncio.to_thread(self._in_folder)}
        for run_id in await _runs_in_redis():
            lines.setdefault(run_id, ListedRun(run_id, "in Redis", {}))
        return sorted(lines.values(), key=lambda line: line.changed_at, reverse=True)[:MAX_LISTED_RUNS]

    async def get(self, run_id: str) -> WatchedRun | None:
        """A run that is followed from now on, after a first look at it; None where there is no such run."""
        # The name is matched first: it comes from an address, and becomes a path and keys.
        if run_id not in self._open and not (RUN_ID.fullmatch(run_id) and await self.exists(run_id)):
            return None
        # Another request may have opened it meanwhile.
        run = self._open.pop(run_id, None)
        if run is None:
            run = WatchedRun(RunFolder(self.runs, run_id))
        self._open[run_id] = run  # the one that was asked for last comes last
        run.touch()
        if len(self._open) > MAX_OPEN_RUNS:
            # Taken out before it is closed: a request that comes meanwhile opens it again.
            await self._open.pop(next(iter(self._open))).close()
        patience_s = run.opened_at + FIRST_LOOK_S - time.monotonic()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(run.has_looked.wait(), max(0.0, patience_s))
        return run

    async def close(self) -> None:
        for run in self._open.values():
            await run.close()

    async def exists(self, run_id: str) -> bool:
        """Whether the folder or Redis has it, also where it is too old to be listed."""
        return (self.runs / run_id / CONFIG_FILE).is_file() or run_id in await _runs_in_redis()

    def _in_folder(self) -> list[ListedRun]:
        try:
            # `latest` is a link to one of the others.
            names = [path.name for path in self.runs.iterdir() if not path.is_symlink()]
        except OSError:
            return []
        found = [RunFolder(self.runs, name) for name in names if RUN_ID.fullmatch(name)]
        return [_listed(folder) for folder in found if (folder.path / CONFIG_FILE).is_file()]


async def _runs_in_redis() -> list[str]:
    """Runs of the environment's Redis; none where it does not answer soon."""
    if not (url := os.environ.get(URL_VARIABLE)):
        return []
    try:
        async with asyncio.timeout(KNOWN_RUNS_S), connected(url) as broker:
            named = [run_id for run_id in await known_runs(broker) if RUN_ID.fullmatch(run_id)]
            # A trainer's user may name any run there, and has keys of its own run only.
            are_there = await asyncio.gather(*(run_exists(broker, Keys(name)) for name in named))
            return list(compress(named, are_there))
    except (TidemillError, TimeoutError):
        return []


def _listed(folder: RunFolder) -> ListedRun:
    report = read_report(folder) or {}
    changed_at = 0.0
    for name in (METRICS_FILE, CONFIG_FILE):
        with contextlib.suppress(OSError):
            changed_at = max(changed_at, (folder.path / name).stat().st_mtime)
    end = read_end(folder)
    status = end.status
    if status == FINISHED and report and not report.get("ok"):
        status = "ended"
    return ListedRun(folder.run_id, status, report, changed_at, end)

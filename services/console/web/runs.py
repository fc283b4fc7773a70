"""The runs that can be looked at: those of the runs folder, and those that the environment's Redis knows.

Guarantees: reading changes nothing in a run; where its Redis goes away, what is known stays, and what is left
of its streams is still read. A Redis that was started only to read a run's data stops after `UNWATCHED_S`
without a request, so that the run can be resumed. No more than `MAX_OPEN_RUNS` are followed at once; the one
that was requested least recently is closed.
"""

import asyncio
import contextlib
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tidemill.common.config import RunConfig
from tidemill.common.errors import ConfigError, TidemillError
from tidemill.common.history import History
from tidemill.common.images.store import ImageStore
from tidemill.common.run.state import (
    CONFIG_FILE,
    FINISHED,
    METRICS_FILE,
    RUNNING,
    folder_with_pictures,
    read_records,
)
from tidemill.common.wire.keys import RUN_ID
from tidemill.services.console.look.snapshot import RunSnapshot, SnapshotReader, points_of, read_folder
from tidemill.services.console.run.end import LOST, RunEnd, read_end
from tidemill.services.console.run.folder import RunFolder
from tidemill.services.console.run.history import LIVE, MissingHistoryError, open_history
from tidemill.services.console.web.groups import GroupIndex
from tidemill.services.console.web.listing import (
    MAX_LISTED_RUNS,
    OVER,
    UNEXPECTED,
    ListedRun,
    current_report,
    is_in_redis,
    may_have_redis,
    runs_in_folder,
    with_redis,
)
from tidemill.services.console.web.texts import TokenTexts

REFRESH_S = 1.0
REFRESH_STILL_S = 5.0
"""Interval for a run whose Redis is gone."""
RETRY_S = 5.0
"""Pause after the run's history could not be had."""
UNWATCHED_S = 90.0
MAX_OPEN_RUNS = 4
PATIENCE_S = 3.0
"""A Redis that has not answered for so long is reported."""
FIRST_LOOK_S = 3.0
"""A request for a run that was not watched yet waits at most this long for the first reading."""


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
        self.is_lost = False
        """Whether nothing is left of its streams, so that waiting for them is in vain."""
        self.report: Mapping[str, Any] = {}
        """Its summary; empty while it has none."""
        self.end: RunEnd | None = None
        """How it stands by its folder; None before the first look."""
        self.has_looked = asyncio.Event()
        """Set when a reading has ended, also by an error; cleared when the history was released."""
        self.opened_at = 0.0
        """When reading began, by `time.monotonic`."""
        self._asked_at = 0.0
        self._texts: TokenTexts | None = None
        self._pictures: ImageStore | None = None
        self._folder_changed_at = -1.0
        self._task: asyncio.Task[None] | None = None

    @property
    def run_id(self) -> str:
        return self.folder.run_id

    @property
    def is_live(self) -> bool:
        """Whether it may change at any moment."""
        return self.source == LIVE and self.history is not None and self.status not in OVER

    @property
    def silent_s(self) -> float:
        """How long Redis has not answered; 0 while it does."""
        is_reading = not self.index.is_complete  # a long history: snapshots wait for it
        if self.history is None or self.source != LIVE or self.snapshot is None or is_reading:
            return 0.0
        silent_s = time.time() - self.snapshot.at - REFRESH_S
        return silent_s if silent_s > PATIENCE_S else 0.0

    @property
    def may_change(self) -> bool:
        """Whether a page that is loaded again soon may show more."""
        if self.problem:
            return not self.is_lost and self.status not in OVER
        return self.is_live or not self.index.is_complete

    @property
    def status(self) -> str:
        """The status in the run's state, or that of its folder where its Redis or its launcher is gone;
        `ended` where it has done all its steps but not what was expected of it."""
        status = self.snapshot.status if self.snapshot else "unknown"
        if status == FINISHED and self.report and not self.report.get("ok"):
            return UNEXPECTED
        if status in OVER or self.end is None:
            return status
        workers = self.snapshot.workers if self.snapshot else []
        # Redis says `running` for ever where the launcher was killed.
        is_left = self.end.pid > 0 and self.end.status == LOST and not any(beat.is_alive for beat in workers)
        return self.end.status if self.source != LIVE or is_left else status

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
            # The run's own copy first: the model's folder may be on another machine.
            folders = [self.folder.path]
            if self.config is not None:
                folders.append(Path(self.config.model.path))
            self._texts = await asyncio.to_thread(TokenTexts.load, folders)
        return self._texts

    def pictures(self) -> ImageStore:
        """Where its pictures are. Raises ConfigError: that is not known, or cannot be opened."""
        if self._pictures is None:
            if self.config is None:
                raise ConfigError(
                    f"the config of run {self.run_id} cannot be read, which says where its pictures are."
                )
            state = self.snapshot.state if self.snapshot else {}
            run_dir = folder_with_pictures(self.folder.path, state)
            self._pictures = ImageStore(run_dir, self.config.streams.claim_check_url)
        return self._pictures

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
                    self.config = access.config or self.config
                    self.source = access.source
                    await self._follow(access.history)
                self.has_looked.clear()
                continue
            except TidemillError as error:
                self.problem = str(error)
                self.is_lost = isinstance(error, MissingHistoryError) and not self._may_come()
            except Exception as error:
                self.problem = f"{type(error).__name__}: {error}"
            finally:
                # Its connections are closed: a page that went on with it would fail.
                self.history = None
            try:
                await self._read_end()
                if self.snapshot is None or not self._may_come():
                    await self._read_folder()  # what there is; `problem` says why it is not more
            except (TidemillError, OSError, ValueError) as error:
                self.problem = f"{error}; {self.problem}"
                self.is_lost = False
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
            await self._read_end()
            await self.index.follow(history)
            self.problem = ""
            self.is_lost = False
            self.has_looked.set()
            await asyncio.sleep(REFRESH_S if self.is_live else REFRESH_STILL_S)

    async def _read_folder(self) -> None:
        """What the folder alone tells, when it has changed."""
        await self._read_end()
        path = self.folder.path / METRICS_FILE
        changed_at = path.stat().st_mtime if path.exists() else 0.0
        if self.folder.config() is None or changed_at == self._folder_changed_at:
            return
        self._folder_changed_at = changed_at
        self.config = self.config or self.folder.config()
        snapshot, _ = await asyncio.to_thread(read_folder, self.folder)
        self.snapshot = snapshot
        await self._read_end()  # again: a summary counts where the run has done no more steps since
        if self.end is not None:
            snapshot.state["status"] = self.end.status
        if self.report:
            snapshot.state["warnings"] = self.report.get("warnings") or []
        for point in points_of(await asyncio.to_thread(read_records, path)):
            # A commit has more of a step than its line: points from the streams stay.
            self.index.steps.setdefault(point.step, point)

    def _may_come(self) -> bool:
        """Whether its streams may be there soon: a Redis can be asked, or its launcher is alive."""
        end = read_end(self.folder)
        return may_have_redis(self.folder) or (end.pid > 0 and not end.is_over)

    async def _read_end(self) -> None:
        """How it stands by its folder, and its summary."""
        if not self.folder.path.is_dir():
            return
        steps = self.snapshot.version if self.snapshot else None
        end = await asyncio.to_thread(read_end, self.folder)
        if end.status == RUNNING and not end.pid and self.source != LIVE:
            # What looks alive in its folder is the Redis that serves its data to these pages.
            end = replace(end, status=LOST)
        self.end = end
        report = await asyncio.to_thread(current_report, self.folder, steps)
        self.report = report or {}


class Catalog:
    def __init__(self, runs: Path) -> None:
        self.runs = runs
        self._open: dict[str, WatchedRun] = {}

    async def lines(self) -> list[ListedRun]:
        of_folder = await asyncio.to_thread(runs_in_folder, self.runs)
        lines = await with_redis(self.runs, of_folder)
        return sorted(lines, key=lambda line: line.changed_at, reverse=True)[:MAX_LISTED_RUNS]

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
            async with asyncio.timeout(max(0.0, patience_s)):
                await run.has_looked.wait()
        return run

    def opened(self, run_id: str) -> WatchedRun | None:
        """A run that is followed now."""
        return self._open.get(run_id)

    async def close(self) -> None:
        for run in self._open.values():
            await run.close()

    async def exists(self, run_id: str) -> bool:
        """Whether the folder or Redis has it, also where it is too old to be listed."""
        return (self.runs / run_id / CONFIG_FILE).is_file() or await is_in_redis(run_id)

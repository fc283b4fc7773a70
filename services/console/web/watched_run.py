"""One run that somebody looks at: its history, its index and its latest snapshot, kept in step.

Guarantees: looking changes nothing in the run; where its Redis goes away, what is known stays, and what is
left of its streams goes on being read. Data that only a Redis of our own can serve is released when nobody
has looked for `UNWATCHED_S`, so that the run can be resumed.
"""

import asyncio
import contextlib
import time
from contextlib import AsyncExitStack
from pathlib import Path

from tidemill.common.config import RunConfig
from tidemill.common.errors import TidemillError
from tidemill.common.history import History
from tidemill.common.run.state import METRICS_FILE
from tidemill.services.console.run.folder import RunFolder
from tidemill.services.console.run.history import open_history
from tidemill.services.console.status.report import read_report
from tidemill.services.console.status.snapshot import RunSnapshot, SnapshotReader, read_folder, read_points
from tidemill.services.console.web.formats import TokenTexts
from tidemill.services.console.web.group_index import GroupIndex

REFRESH_S = 1.0
REFRESH_STILL_S = 5.0
"""Of a run whose Redis is gone."""
RETRY_S = 5.0
"""Pause after the run's history could not be had."""
UNWATCHED_S = 90.0
LIVE_SOURCE = "Redis"
"""What `open_history` calls a Redis that the run uses."""
ENDED = ("finished", "failed", "stopped", "ended")


class WatchedRun:
    """`start`, then read `index`, `snapshot` and `history`; `close` at the end."""

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
        """Why there is no news, in words; empty while all is well."""
        self.has_looked = asyncio.Event()
        """Set when a look has ended, whatever came of it; cleared when the history was released."""
        self.opened_at = 0.0
        """When it was begun to be read, on the clock of `time.monotonic`."""
        self._is_wanted = asyncio.Event()
        self._asked_at = 0.0
        self._texts: TokenTexts | None = None
        self._folder_changed_at = -1.0
        self._task: asyncio.Task[None] | None = None

    @property
    def run_id(self) -> str:
        return self.folder.run_id

    @property
    def is_live(self) -> bool:
        """Whether there may be news at any moment."""
        return self.source == LIVE_SOURCE and self.status not in ENDED

    @property
    def status(self) -> str:
        """What the run says of itself, as far as that can still be true."""
        status = self.snapshot.status if self.snapshot else "unknown"
        is_gone = self.source != LIVE_SOURCE and status not in ENDED
        return "stopped" if is_gone and self.has_looked.is_set() else status

    def start(self) -> None:
        self.touch()
        self._task = asyncio.create_task(self._watch(), name=f"watch {self.run_id}")

    def touch(self) -> None:
        """Somebody has asked about it."""
        self._asked_at = time.monotonic()
        if not self._is_wanted.is_set():
            self.opened_at = self._asked_at
            self._is_wanted.set()

    async def texts(self) -> TokenTexts:
        if self._texts is None:
            path = Path(self.config.model.path) if self.config else None
            self._texts = await asyncio.to_thread(TokenTexts.load, path)
        return self._texts

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _watch(self) -> None:
        while True:
            await self._is_wanted.wait()
            self.opened_at = time.monotonic()
            try:
                async with AsyncExitStack() as stack:
                    await self._open(stack)
                    await self._follow()
                self.has_looked.clear()
                continue
            except TidemillError as error:
                self.problem = str(error)
            except Exception as error:
                self.problem = f"{type(error).__name__}: {error}"
            finally:
                self.history = None
            with contextlib.suppress(TidemillError, OSError, ValueError):
                await self._read_folder()  # what there is; `problem` says why it is not more
            self.has_looked.set()
            await asyncio.sleep(RETRY_S)
            self._rest_if_unwatched()

    async def _open(self, stack: AsyncExitStack) -> None:
        access = await stack.enter_async_context(open_history(self.run_id, self.folder.runs))
        self.config, self.source = access.config or self.config, access.source
        self.history = access.history

    async def _follow(self) -> None:
        """Keep in step, until the run has another Redis or nobody looks any more."""
        assert self.history is not None
        address = self.folder.address()
        broker = self.history.broker
        reader = await SnapshotReader.attach(broker, self.run_id) if broker else None
        while self.folder.address() == address and self._is_wanted.is_set():
            if reader is not None:
                self.snapshot = await reader.read()
            else:
                await self._read_folder()
            await self.index.follow(self.history)
            self.problem = ""
            self.has_looked.set()
            await asyncio.sleep(REFRESH_S if self.is_live else REFRESH_STILL_S)
            self._rest_if_unwatched()

    def _rest_if_unwatched(self) -> None:
        if time.monotonic() - self._asked_at > UNWATCHED_S:
            self._is_wanted.clear()

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
        if report := await asyncio.to_thread(read_report, self.folder):
            snapshot.state["status"] = "finished" if report.get("ok") else "ended"
        for point in await asyncio.to_thread(read_points, self.folder):
            self.index.steps.setdefault(point.step, point)

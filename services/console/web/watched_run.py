"""One run that somebody looks at: its history, its index and its latest snapshot, kept in step.

Guarantees: looking changes nothing in the run; where its Redis goes away, what is known stays and the folder
goes on being read; a Redis that comes back is found again.
"""

import asyncio
import contextlib
import time
from pathlib import Path

import structlog

from common.broker import Broker
from common.config import RunConfig
from common.errors import TidemillError
from common.history import History
from common.records import METRICS_FILE, STEP, read_records
from common.run_state import UnknownRunError
from services.console.attach import connect
from services.console.offline import read_folder
from services.console.report import read_report
from services.console.run_folder import RunFolder
from services.console.snapshot import RunSnapshot, SnapshotReader
from services.console.web.group_index import GroupIndex, StepRow
from services.console.web.tokens import TokenTexts

REFRESH_S = 1.0
RETRY_S = 5.0
"""Pause after Redis could not be had."""
UNWATCHED_S = 120.0
"""A run that nobody has asked about for so long is not followed until somebody does."""

log = structlog.get_logger(__name__)


class WatchedRun:
    """`start`, then read `index`, `snapshot` and `history`; `close` at the end."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.config: RunConfig | None = None
        self.index = GroupIndex()
        self.snapshot: RunSnapshot | None = None
        self.problem = ""
        """Why there is no news, in words; empty while all is well."""
        self.history = History(folder.run_id, folder.path if folder.path.is_dir() else None, None)
        self.has_looked = asyncio.Event()
        """Set when the first look has ended, whatever came of it."""
        self._asked_at = time.monotonic()
        self._reader: SnapshotReader | None = None
        self._address: str | None = None
        self._texts: TokenTexts | None = None
        self._folder_read_at = 0.0
        self._task: asyncio.Task[None] | None = None

    @property
    def run_id(self) -> str:
        """Its id."""
        return self.folder.run_id

    @property
    def is_live(self) -> bool:
        """Whether its Redis answers."""
        return self._reader is not None and not self.problem

    def start(self) -> None:
        """Begin to follow it."""
        self._task = asyncio.create_task(self._watch(), name=f"watch {self.run_id}")

    def touch(self) -> None:
        """Somebody has asked about it."""
        self._asked_at = time.monotonic()

    async def texts(self) -> TokenTexts:
        """How its tokens read."""
        if self._texts is None:
            path = Path(self.config.model.path) if self.config else None
            self._texts = await asyncio.to_thread(TokenTexts.load, path)
        return self._texts

    async def close(self) -> None:
        """Stop following."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await self._disconnect()

    async def _watch(self) -> None:
        while True:
            pause_s = REFRESH_S
            try:
                if time.monotonic() - self._asked_at < UNWATCHED_S or not self.has_looked.is_set():
                    await self._look()
                    self.problem = ""
            except TidemillError as error:
                self.problem, pause_s = str(error), RETRY_S
                await self._disconnect()
            except Exception as error:
                log.exception("following failed", run=self.run_id)
                self.problem, pause_s = f"{type(error).__name__}: {error}", RETRY_S
                await self._disconnect()
            self.has_looked.set()
            await asyncio.sleep(pause_s)

    async def _look(self) -> None:
        address = self.folder.address()
        if address != self._address or (address and self._reader is None):
            await self._disconnect()
            await self._connect(address)
        if self._reader is None:
            await self._read_folder()
        else:
            self.snapshot = await self._reader.read()
        await self.index.follow(self.history)

    async def _connect(self, address: str | None) -> None:
        self._address = address
        self.config = self.config or await asyncio.to_thread(self.folder.config)
        if address is None:
            return
        try:
            broker = await connect(self.folder)
            # A visitor waits for Redis no longer than a service that is about to stop.
            broker.is_stopping = True
            self.history.broker = broker
            self._reader = await SnapshotReader.attach(broker, self.run_id)
        except UnknownRunError:
            await self._disconnect()
        except TidemillError:
            await self._read_folder()
            raise

    async def _disconnect(self) -> None:
        broker: Broker | None = self.history.broker
        self.history.broker, self._reader = None, None
        if broker is not None:
            with contextlib.suppress(Exception):
                await broker.close()

    async def _read_folder(self) -> None:
        """What the folder alone tells, when it has changed."""
        if self.config is None:
            return
        path = self.folder.path / METRICS_FILE
        try:
            changed_at = path.stat().st_mtime
        except OSError:
            changed_at = 0.0
        if self.snapshot is not None and changed_at <= self._folder_read_at:
            return
        self._folder_read_at = changed_at
        snapshot, _ = await asyncio.to_thread(read_folder, self.folder)
        if report := await asyncio.to_thread(read_report, self.folder):
            snapshot.state["status"] = "finished" if report.get("ok") else "ended"
        self.snapshot = snapshot
        for record in await asyncio.to_thread(read_records, path):
            if record["kind"] == STEP:
                step = int(record["step"])
                numbers = {k: float(v) for k, v in record.items() if isinstance(v, int | float)}
                self.index.steps.setdefault(step, StepRow(step, numbers, finished_at=numbers.get("time", 0.0)))

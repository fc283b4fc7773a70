"""The runs there are to look at: those of the runs folder, and those that the environment's Redis knows.

No more than `MAX_OPEN_RUNS` are followed at once; the one that was asked about least recently makes room.
"""

import asyncio
import contextlib
import os
import time
from dataclasses import dataclass
from itertools import compress
from pathlib import Path

from tidemill.common.errors import TidemillError
from tidemill.common.redis.broker import Broker
from tidemill.common.redis.client import URL_VARIABLE
from tidemill.common.run.state import CONFIG_FILE, METRICS_FILE, known_runs, run_exists
from tidemill.common.wire.keys import RUN_ID, Keys
from tidemill.services.console.run.folder import RunFolder
from tidemill.services.console.status.report import read_report
from tidemill.services.console.web.watched_run import WatchedRun

MAX_OPEN_RUNS = 4
MAX_LISTED_RUNS = 500
FIRST_LOOK_S = 3.0
"""Visitors of a run that was not watched yet wait at most so long for the first look."""
KNOWN_RUNS_S = 3.0


@dataclass(frozen=True, slots=True)
class RunLine:
    """A run in the list of runs."""

    run_id: str
    status: str
    steps: int | None = None
    reward_first: float | None = None
    reward_last: float | None = None
    eval_after: float | None = None
    changed_at: float = 0.0


class Catalog:
    """Lists runs, and opens them."""

    def __init__(self, runs: Path) -> None:
        self.runs = runs
        self._open: dict[str, WatchedRun] = {}

    async def lines(self) -> list[RunLine]:
        """All runs, the one that changed last first."""
        lines = {line.run_id: line for line in await asyncio.to_thread(self._in_folder)}
        for run_id in await self._in_redis():
            lines.setdefault(run_id, RunLine(run_id, "in Redis"))
        return sorted(lines.values(), key=lambda line: line.changed_at, reverse=True)[:MAX_LISTED_RUNS]

    async def get(self, run_id: str) -> WatchedRun | None:
        """A run that is followed from now on, after a first look at it; None where there is no such run."""
        run = self._open.pop(run_id, None)
        if run is None:
            if not RUN_ID.fullmatch(run_id) or not await self.exists(run_id):
                return None
            # Another request may have opened it meanwhile.
            run = self._open.pop(run_id, None) or self._start(run_id)
        self._open[run_id] = run  # the one that was asked about last comes last
        run.touch()
        if len(self._open) > MAX_OPEN_RUNS:
            await self._open.pop(next(iter(self._open))).close()
        patience_s = run.opened_at + FIRST_LOOK_S - time.monotonic()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(run.has_looked.wait(), max(0.0, patience_s))
        return run

    async def close(self) -> None:
        """Stop following all of them."""
        for run in self._open.values():
            await run.close()

    def _start(self, run_id: str) -> WatchedRun:
        run = WatchedRun(RunFolder(self.runs, run_id))
        run.start()
        return run

    async def exists(self, run_id: str) -> bool:
        """Whether the folder or Redis has it, also where it is too old to be listed."""
        return (self.runs / run_id / CONFIG_FILE).is_file() or run_id in await self._in_redis()

    def _in_folder(self) -> list[RunLine]:
        try:
            names = [path.name for path in self.runs.iterdir() if not path.is_symlink()]
        except OSError:
            return []
        found = [RunFolder(self.runs, name) for name in names if RUN_ID.fullmatch(name)]
        return [_line(folder) for folder in found if (folder.path / CONFIG_FILE).is_file()]

    async def _in_redis(self) -> list[str]:
        if not os.environ.get(URL_VARIABLE):
            return []
        try:
            async with asyncio.timeout(KNOWN_RUNS_S):
                broker = await Broker.connect()
                try:
                    named = [run_id for run_id in await known_runs(broker) if RUN_ID.fullmatch(run_id)]
                    # A trainer's user may name any run there, and has keys of its own run only.
                    are_there = await asyncio.gather(*(run_exists(broker, Keys(name)) for name in named))
                    return list(compress(named, are_there))
                finally:
                    await broker.close()
        except (TidemillError, TimeoutError):
            return []


def _line(folder: RunFolder) -> RunLine:
    report = read_report(folder) or {}
    changed_at = 0.0
    for name in (METRICS_FILE, CONFIG_FILE):
        with contextlib.suppress(OSError):
            changed_at = max(changed_at, (folder.path / name).stat().st_mtime)
    if report:
        status = "finished" if report.get("ok") else "ended"
    elif folder.address_file.exists():
        status = "running"
    else:
        status = "running" if time.time() - changed_at < 60 else "stopped"
    return RunLine(
        folder.run_id,
        status,
        report.get("steps"),
        report.get("reward_first"),
        report.get("reward_last"),
        report.get("eval_after"),
        changed_at,
    )

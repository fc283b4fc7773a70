"""Opens the history of a run, wherever it is kept now.

Guarantees: looking changes nothing of the run, and leaves no process behind. The Redis that the run uses is
asked first. Where it does not answer, the archive is read alone if it has everything; else the data that the
run's own Redis left in the folder is served by a Redis that runs only while it is read.
"""

import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from tidemill.common.archive import archive_folder, is_whole
from tidemill.common.errors import BrokerError, ConfigError, OutageError, TidemillError
from tidemill.common.history import History
from tidemill.common.process.programs import run_main
from tidemill.common.redis.broker import Broker
from tidemill.common.redis.client import URL_VARIABLE
from tidemill.common.run.state import run_exists
from tidemill.services.console.commands import OfRun
from tidemill.services.console.run.folder import RunFolder, connected, find_run, log_nothing
from tidemill.services.console.run.guard import Guard
from tidemill.services.console.run.local_redis import LocalRedis

if TYPE_CHECKING:
    from tidemill.common.config import RunConfig

T = TypeVar("T")
LIVE = "Redis"
"""The source of a run whose Redis answers."""
REDIS_DATA = ("appendonlydir", "appendonly.aof")
"""Names of the data that a run's own Redis leaves: since Redis 7, and before."""


class MissingHistoryError(ConfigError):
    """Nothing is left of a run's streams."""


@dataclass(frozen=True)
class RunAccess:
    """A run that is read, from wherever its streams are.

    Example: `source` LIVE, `address` "redis://127.0.0.1:6379/0".
    """

    folder: RunFolder
    history: History
    source: str
    """Where it is read from, in words."""
    address: str = ""
    """Address of the Redis that is read, for child processes; empty where only the archive is left."""

    raw_config: bytes | None = None

    @cached_property
    def config(self) -> "RunConfig | None":
        """The run's config, read when it is first asked for; None where neither the folder nor Redis has it.

        Raises:
            ConfigError: this release does not understand it.
        """
        kept = self.folder.config()
        if kept is not None or self.raw_config is None:
            return kept
        from tidemill.common.config import parse_recorded

        return parse_recorded(json.loads(self.raw_config), f"the config of run {self.run_id} in Redis")

    @property
    def is_over(self) -> bool:
        """Whether no process writes to it any more."""
        return self.source != LIVE

    @property
    def run_id(self) -> str:
        return self.folder.run_id


@contextlib.asynccontextmanager
async def open_history(
    run: RunFolder | str | Path | None, runs_dir: Path | None = None
) -> AsyncIterator[RunAccess]:
    """The history of a run that was found already, or that the user means; without `run`, of runs/latest."""
    log_nothing()
    folder = run if isinstance(run, RunFolder) else find_run(run, runs_dir)
    async with contextlib.AsyncExitStack() as stack:
        broker, source, address = await _find_broker(folder, stack)
        history = History(folder.run_id, folder.path if folder.path.is_dir() else None, broker)
        raw_config = await broker.execute("GET", history.keys.config) if broker is not None else None
        try:
            yield RunAccess(folder, history, source, address, raw_config)
        except OutageError as error:
            # Not its own words, which are about a service and what that holds.
            raise BrokerError(
                f"the Redis of run {folder.run_id} went away while it was read. Try again."
            ) from error


def read_run(options: OfRun, read: Callable[[RunAccess], Awaitable[T]]) -> T:
    """Open the run that a command is about, and return the result of `read`."""

    async def opened() -> T:
        async with open_history(options.run_id, options.runs_dir) as access:
            return await read(access)

    return run_main(opened())


async def _find_broker(folder: RunFolder, stack: contextlib.AsyncExitStack) -> tuple[Broker | None, str, str]:
    """A connection to the run's streams, its name in words, and its address; None and an empty address where
    only the archive is left."""
    has_archive = archive_folder(folder.path).is_dir()
    problem: TidemillError | None = None
    try:
        broker = await stack.enter_async_context(connected(folder))
        broker.is_stopping = True  # a person is waiting: an outage ends the command after seconds
        broker.waits_for_claims = False
        if await run_exists(broker, History(folder.run_id, None, broker).keys):
            return broker, LIVE, folder.address() or ""
        problem = ConfigError(f"the Redis that is asked for run {folder.run_id} does not know it.")
    except TidemillError as error:
        problem = error
    if not is_whole(folder.path) and any((folder.redis_data / name).exists() for name in REDIS_DATA):
        try:
            broker, address = await _serve_left_data(folder, stack)
            return broker, f"the data in {folder.redis_data}", address
        except TidemillError:
            if not has_archive:
                raise
    if has_archive:
        return None, f"the archive in {archive_folder(folder.path)}", ""
    raise MissingHistoryError(
        f"nothing is left of the streams of run {folder.run_id}: {problem} There is neither data of a Redis "
        f"nor an archive in {folder.path}. Check the id and --runs-dir, or set {URL_VARIABLE} to the server "
        "that has the run."
    ) from None


async def _serve_left_data(folder: RunFolder, stack: contextlib.AsyncExitStack) -> tuple[Broker, str]:
    """A Redis on the data that the run's own one left, stopped with the stack or when this process dies.

    Raises:
        TidemillError: it does not start, or another process serves the data.
    """
    guard = stack.enter_context(Guard())
    url = await stack.enter_async_context(LocalRedis(folder.redis_data, guard).running())
    broker = await stack.enter_async_context(connected(url))
    broker.is_stopping = True
    return broker, url

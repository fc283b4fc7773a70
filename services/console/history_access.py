"""Opens the history of a run for whoever wants to look at it, wherever it is kept now.

Guarantees: looking changes nothing of the run, and leaves no process behind. Asked first is the Redis that
the run uses. Where it is gone, the data that the run's own Redis left in the folder is served by one of our
own for as long as we look, and the archive is read beside it or alone.
"""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from common.archive import archive_folder
from common.broker import Broker
from common.config import RunConfig
from common.embedded import EmbeddedRedis
from common.errors import BrokerError, ConfigError, OutageError, TidemillError
from common.history import History
from common.redis_client import URL_VARIABLE
from common.run_state import read_config, run_exists
from services.console.attach import connect
from services.console.console_log import log_nothing
from services.console.guard import Guard
from services.console.run_folder import RunFolder, find_run, folder_of_runs

REDIS_DATA = ("appendonlydir", "appendonly.aof")
"""What a Redis of the run's own leaves behind: since version 7, and before."""


@dataclass(frozen=True, slots=True)
class RunAccess:
    """A run that can be looked at."""

    folder: RunFolder
    history: History
    config: RunConfig | None
    """None where neither Redis nor the folder has it."""
    source: str
    """Where it is read from, in words."""
    address: str = ""
    """Of the Redis that is read, for processes that we start; empty where only the archive is left."""

    @property
    def run_id(self) -> str:
        """The run's id."""
        return self.folder.run_id


@contextlib.asynccontextmanager
async def open_history(run: str | None, runs_dir: Path | None) -> AsyncIterator[RunAccess]:
    """The history of the run that the user means; without `run`, of runs/latest.

    Raises:
        ConfigError: there is no such run, or nothing is left of its streams.
        TidemillError: its Redis refuses us, and there is nothing else to read.
    """
    log_nothing()
    folder = find_run(run, folder_of_runs(runs_dir))
    async with contextlib.AsyncExitStack() as stack:
        broker, source, address = await _find_broker(folder, stack)
        history = History(folder.run_id, folder.path if folder.path.is_dir() else None, broker)
        config = folder.config()
        if config is None and broker is not None:
            config = await read_config(broker, history.keys)
        try:
            yield RunAccess(folder, history, config, source, address)
        except OutageError as error:
            raise BrokerError(
                f"the Redis of run {folder.run_id} went away while it was read: {error}. Try again."
            ) from None


async def _find_broker(folder: RunFolder, stack: contextlib.AsyncExitStack) -> tuple[Broker | None, str, str]:
    """A connection to the run's streams, its name in words, and its address; None and an empty address where
    only the archive is left."""
    has_archive = archive_folder(folder.path).is_dir()
    problem: TidemillError | None = None
    try:
        broker = await connect(folder)
        stack.push_async_callback(broker.close)
        broker.is_stopping = True  # a person is waiting: an outage ends the command after seconds
        if await run_exists(broker, History(folder.run_id, None, broker).keys):
            return broker, "Redis", folder.address() or ""
        problem = ConfigError(f"the Redis that is asked for run {folder.run_id} does not know it.")
    except TidemillError as error:
        problem = error
    if any((folder.redis_data / name).exists() for name in REDIS_DATA):
        try:
            broker, address = await _serve_left_data(folder, stack)
            return broker, f"the data in {folder.redis_data}", address
        except TidemillError:
            if not has_archive:
                raise
    if has_archive:
        return None, f"the archive in {archive_folder(folder.path)}", ""
    raise ConfigError(
        f"nothing is left of the streams of run {folder.run_id}: {problem} There is neither data of a Redis "
        f"nor an archive in {folder.path}. Check the id and --runs-dir, or set {URL_VARIABLE} to the server "
        "that has the run."
    ) from None


async def _serve_left_data(folder: RunFolder, stack: contextlib.AsyncExitStack) -> tuple[Broker, str]:
    """A Redis on the data that the run's own one left, stopped with the stack or when this process dies.

    Raises:
        TidemillError: it does not start, or another process serves the data.
    """
    server = EmbeddedRedis(folder.redis_data)
    guard = stack.enter_context(Guard())
    guard.remove_at_end(server.socket.parent)
    server.start()  # not on a thread, which could not be cancelled: nothing else happens here meanwhile
    pid = server.pid or 0
    guard.watch(pid, "redis")
    stack.callback(guard.forget, pid)
    stack.callback(server.stop)
    broker = await Broker.connect(server.url)
    stack.push_async_callback(broker.close)
    broker.is_stopping = True
    return broker, server.url

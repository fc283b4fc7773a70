"""The way to the Redis of a run, and where a command's own log goes: all that look at a run begin here."""

import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import structlog

from common.errors import BrokerError, ConfigError
from common.redis.broker import Broker
from common.redis.client import URL_VARIABLE
from services.console.run.folder import RunFolder, nearest


async def connect(folder: RunFolder) -> Broker:
    """Connect to the Redis of a run, or say why there is none to connect to.

    Raises:
        TidemillError: its Redis is not known, or does not answer.
    """
    url = folder.address()
    if url is None:
        state = "it is not running now" if folder.path.is_dir() else "there is no such folder"
        raise ConfigError(
            f"run {folder.run_id}: no Redis to ask ({nearest(folder.path)}: {state}). Set {URL_VARIABLE} to "
            "the run's server, or start the run with `tidemill up`."
        )
    try:
        return await Broker.connect(url)
    except BrokerError as error:
        if not folder.address_file.exists():
            raise
        raise BrokerError(
            f"the Redis of run {folder.run_id} does not answer: its `tidemill up` was probably killed. "
            f"Continue the run with `tidemill up CONFIG --run-id {folder.run_id} --resume`. ({error})"
        ) from None


@contextlib.asynccontextmanager
async def connected(folder: RunFolder) -> AsyncIterator[Broker]:
    """A connection to the Redis of a run, closed at the end."""
    broker = await connect(folder)
    try:
        yield broker
    finally:
        await broker.close()


def log_to_file(path: Path) -> None:
    """Append to a file of the run, which stays open for as long as the process lives."""
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S"),
            structlog.dev.ConsoleRenderer(colors=False),
        ],
        logger_factory=structlog.PrintLoggerFactory(path.open("a", buffering=1, encoding="utf-8")),
        cache_logger_on_first_use=False,
    )


def log_nothing() -> None:
    """Drop them: commands that only look say what matters themselves."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))

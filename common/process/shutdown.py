"""How a service stops: by a signal, or because its run has ended (`run_watch.py`)."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

import structlog
from redis import exceptions as redis_errors

from tidemill.common.redis.broker import Broker

log = structlog.get_logger(__name__)

TRAINER = "trainer"

T = TypeVar("T")


class Shutdown:
    """The request to stop: the first signal, or the end of the run, drains; a second signal exits at once."""

    def __init__(self) -> None:
        self.stopping = asyncio.Event()
        self.is_run_over = False
        """Whether it is the run that has ended."""
        self.broker: Broker | None = None
        """Set once there is a connection: its blocking reads are ended."""
        self._unblocking: asyncio.Task[None] | None = None
        self._is_signalled = False

    def handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._handle_signal)

    def begin(self, why: str) -> None:
        """Ask the service to finish or hand back what it holds, and to end."""
        log.info(why)
        self.stopping.set()
        if self.broker is not None:
            self.broker.is_stopping = True
            # After `stopping` is set: a command that is unblocked must not be repeated.
            self._unblocking = asyncio.get_running_loop().create_task(_unblock(self.broker))

    def _handle_signal(self) -> None:
        if self._is_signalled:
            # Not `sys.exit`, which would run the clean-up: that may be what hangs.
            os._exit(130)
        self._is_signalled = True
        if not self.stopping.is_set():  # a worker may be leaving a run that has ended
            self.begin("stopping: finishing or handing back what is held")


async def _unblock(broker: Broker) -> None:
    with contextlib.suppress(redis_errors.RedisError, OSError, TimeoutError):  # they wait on
        await broker.redis.unblock()


async def unless_set(event: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """Await `work`, or cancel it and return None when `event` is set."""
    task: asyncio.Task[T] = asyncio.ensure_future(work)
    stop = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
        # Also if the event came in the same iteration: the result may be messages that are held now.
        return task.result() if task.done() else None
    finally:
        stop.cancel()
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

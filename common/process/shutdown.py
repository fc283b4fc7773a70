"""When and how a service stops: by a signal, or because its run has ended.

A worker leaves a finished run at once. A run that was stopped, has failed, or has lost its trainer or its
Redis may go on: the worker waits for that `TIDEMILL_RESUME_WAIT_S`, and then leaves too, in order and with
exit code 0. So no worker that was started by hand keeps a GPU for a run that nobody continues.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import structlog
from redis import exceptions as redis_errors

from tidemill.common.errors import BrokerError
from tidemill.common.process.heartbeats import read_heartbeats
from tidemill.common.redis.broker import Broker
from tidemill.common.run.state import FAILED, FINISHED, RUNNING, STOPPED, read_state
from tidemill.common.wire.keys import Keys

log = structlog.get_logger(__name__)

RESUME_WAIT_VARIABLE = "TIDEMILL_RESUME_WAIT_S"
"""Seconds for which a worker waits for a run that has stopped to go on."""
RESUME_WAIT_S = 1800.0
"""Default of it."""
LOOK_S = 1.0
"""Interval at which a worker looks whether its run has ended. A run's own Redis stops soon after that."""
SILENT_S = 5.0
"""A Redis that takes longer than this for an answer is away."""
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


class RunWatch:
    """Notices for a worker that its run has ended."""

    def __init__(self, broker: Broker, keys: Keys, steps: int, wait_s: float | None = None) -> None:
        self.broker = broker
        self.keys = keys
        self.steps = steps
        default_s = float(os.environ.get(RESUME_WAIT_VARIABLE, RESUME_WAIT_S))
        self.wait_s = default_s if wait_s is None else wait_s
        self.trouble = ""
        """Why the run does not go on, in words; empty while it does."""
        self.alive_at = time.monotonic()
        """When it was last seen to go on."""

    async def until_over(self) -> str:
        """Wait for the end of the run; returns the reason to leave it, in words."""
        looking: asyncio.Task[bool] | None = None
        asked_at = 0.0
        try:
            while True:
                # In a task: while Redis is away the answer is waited for, but not the time that has passed.
                if looking is None:
                    looking = asyncio.create_task(self.look())
                    asked_at = time.monotonic()
                done, _ = await asyncio.wait({looking}, timeout=LOOK_S)
                if done:
                    if looking.result():
                        return "the run is finished"
                    looking = None
                elif time.monotonic() - asked_at > SILENT_S:  # the connection logs that it waits
                    self.trouble = "its Redis has not answered"
                if self.trouble and time.monotonic() - self.alive_at >= self.wait_s:
                    return f"{self.trouble}, and that for {self.wait_s:g} s ({RESUME_WAIT_VARIABLE})"
                if done:
                    await asyncio.sleep(LOOK_S)
        finally:
            if looking is not None:
                looking.cancel()
                await asyncio.gather(looking, return_exceptions=True)

    async def look(self) -> bool:
        """Look once; returns whether the run is finished."""
        try:
            state = await read_state(self.broker, self.keys)
            status = state.get("status")
            if status == FINISHED and int(state.get("version", 0)) >= self.steps:
                return True
            trouble = ""
            # A run of rewards alone has a kind, and no trainer.
            is_open = status == RUNNING and "kind" in state
            if status in (RUNNING, FAILED, STOPPED) and not is_open:
                trouble = "" if await self._has_trainer() else f"the run is {status} and has no trainer"
        except BrokerError:
            # This user may not read what would tell: its operator ends the process.
            trouble = ""
        if trouble:
            self._trouble(trouble)
            return False
        if self.trouble:
            log.info("the run goes on", run=self.keys.run_id)
        self.trouble = ""
        self.alive_at = time.monotonic()
        return False

    def _trouble(self, text: str) -> None:
        if text != self.trouble:
            log.warning("waiting for the run to go on", why=text, at_most_s=self.wait_s)
        self.trouble = text

    async def _has_trainer(self) -> bool:
        return any(beat.is_alive for beat in await read_heartbeats(self.broker, self.keys, (TRAINER,)))

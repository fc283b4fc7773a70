"""Waits for a disk that refuses writes for now, and for work beside the steps."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import structlog

from tidemill.common.files import StorageError
from tidemill.common.process.activity import WAIT_DISK
from tidemill.common.process.service import ServiceContext, StoppedError

log = structlog.get_logger(__name__)

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
LOOK_EVERY_S = 2.0
"""How often a step that waits for background work updates its activity to that of the work."""

T = TypeVar("T")

During = Callable[..., AbstractContextManager[None]]
"""Shows an activity for the length of a block: `Activity.during`, or `BackgroundWork.during`."""


async def on_disk(context: ServiceContext, write: Callable[..., T], *args: Any) -> T:
    """`until_stored`, for a function that blocks: it runs on one of the threads for the outside."""
    return await until_stored(context, lambda: context.outside.run(write, *args))


async def until_stored(
    context: ServiceContext, write: Callable[[], Awaitable[T]], during: During | None = None
) -> T:
    """Call `write` until the disk takes it: an operator can make room while the run waits. Writes must leave
    nothing half-written behind.

    Raises:
        StorageError: waiting cannot cure it.
        StoppedError: the disk has not taken it, and the service must stop.
    """
    pause_s = FIRST_PAUSE_S
    while True:
        try:
            return await write()
        except StorageError as error:
            if not error.can_clear:
                raise
            log.error("waiting for the disk", error=str(error), next_try_s=pause_s)
            with (during or context.activity.during)(WAIT_DISK, str(error)):
                await context.unless_stopping(asyncio.sleep(pause_s))
            # Checked only after a try: a stopping service tries each write once.
            if context.stopping.is_set():
                raise StoppedError from error
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


class BackgroundWork:
    """At most one task beside the steps. While a step waits for it, the activity is `state`, or the one that
    the task itself shows (`during`)."""

    def __init__(self, context: ServiceContext, state: str) -> None:
        self.context = context
        self._usual = (state, "")
        self._now = self._usual
        self._task: asyncio.Task[None] | None = None
        self._is_over = False

    def start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Begin; what came before has to be done. If it fails, so does the service."""
        assert self.is_done, f"{name} would go on beside what came before"
        self._task = self.context.start(work, name)

    @property
    def is_done(self) -> bool:
        """Whether nothing is in progress, nothing has failed, and something may `start`."""
        return not self._is_over and (
            self._task is None or (self._task.done() and not self._task.exception())
        )

    @property
    def is_pending(self) -> bool:
        return self._task is not None

    @contextmanager
    def during(self, state: str, detail: str = "") -> Iterator[None]:
        """Like `Activity.during`, for the task: the process's activity is that of the step."""
        self._now = state, detail
        try:
            yield
        finally:
            self._now = self._usual

    async def finish(self, to_the_end: bool = False) -> None:
        """Wait until it is done. Raises StoppedError: it has failed; or the service must stop first, unless
        it is waited for `to_the_end`."""
        task = self._task
        if task is None:
            return
        with self.context.activity.during(*self._usual):
            while not task.done():
                self.context.activity.enter(*self._now)
                waiting = asyncio.wait({task}, timeout=LOOK_EVERY_S)
                if to_the_end:
                    await waiting
                elif await self.context.unless_stopping(waiting) is None:
                    raise StoppedError
        self._task = None
        if task.exception() is not None or (self.context.failure is not None and not to_the_end):
            raise StoppedError

    async def give_up(self, patience_s: float = 0.0) -> None:
        """Cancel it, unless it ends within `patience_s`; nothing can be started after that."""
        self._is_over = True
        task = self._task
        if task is not None:
            await asyncio.wait({task}, timeout=patience_s)
            task.cancel()
            await asyncio.wait({task})
            self._task = None

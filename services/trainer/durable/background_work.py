"""Work that is done beside the steps: at most one piece of a kind, and how a step waits for it."""

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from tidemill.common.process.service import ServiceContext, StoppedError

LOOK_EVERY_S = 2.0
"""How often who waits says again what for."""


class BackgroundWork:
    """Who waits for it is at `state`, or at what it says itself that it is at."""

    def __init__(self, context: ServiceContext, state: str) -> None:
        self.context = context
        self._usual = self._now = (state, "")
        self._task: asyncio.Task[None] | None = None
        self._is_over = False

    def start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Begin; what came before has to be finished. If it fails, so does the service."""
        assert self._task is None, f"`finish` comes before {name}"
        self._task = self.context.start(work, name)

    def follow(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Begin after what came before, which has to be done."""
        assert self.is_done, f"{name} would go on beside what came before"
        self._task = None
        self.start(work, name)

    @property
    def is_done(self) -> bool:
        """Whether nothing is in progress, nothing has failed, and something may `follow`."""
        return not self._is_over and (
            self._task is None or (self._task.done() and not self._task.exception())
        )

    @property
    def is_pending(self) -> bool:
        """Whether there is something to `finish`."""
        return self._task is not None

    @contextmanager
    def during(self, state: str, detail: str = "") -> Iterator[None]:
        """As `Activity.during`, for the work: the activity itself is that of the step."""
        self._now = state, detail
        try:
            yield
        finally:
            self._now = self._usual

    async def finish(self, to_the_end: bool = False) -> None:
        """Wait until it is done. Raises StoppedError: it has failed; or the service must stop first, unless
        it is waited for `to_the_end`."""
        if (task := self._task) is None:
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
        """End it where it is, unless it ends by itself in time; nothing follows."""
        self._is_over = True
        if (task := self._task) is not None:
            await asyncio.wait({task}, timeout=patience_s)
            task.cancel()
            await asyncio.wait({task})
            self._task = None

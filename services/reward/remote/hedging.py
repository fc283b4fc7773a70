"""A second request when the first is slow: the first answer wins, the other request is cancelled."""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from common.config.remote import HedgeConfig

T = TypeVar("T")

WINDOW = 256
MIN_OBSERVED = 20
"""Answers to have seen before a quantile of their times says anything."""


class HedgeDelay:
    """After how many seconds a request is slow."""

    def __init__(self, config: HedgeConfig) -> None:
        self._config = config
        self._times_s: deque[float] = deque(maxlen=WINDOW)

    def observe(self, time_s: float) -> None:
        """A request was answered."""
        self._times_s.append(time_s)

    @property
    def delay_s(self) -> float | None:
        """None where too little is known yet."""
        if self._config.after_s is not None:
            return self._config.after_s
        if len(self._times_s) < MIN_OBSERVED:
            return None
        assert self._config.quantile is not None  # one of both is given
        ordered = sorted(self._times_s)
        return ordered[min(int(self._config.quantile * len(ordered)), len(ordered) - 1)]


async def hedged(
    first: Coroutine[Any, Any, T],
    second: Callable[[], Coroutine[Any, Any, T] | None],
    sent: asyncio.Event,
    delay_s: float,
) -> tuple[T, str]:
    """The answer of whichever request succeeds first, and its name: `first`, `second`, or `` without a race.

    The clock starts when `sent` is set. `second` may decline with None. When one of both fails, the other
    is waited for; when both do, the first one's error is raised.
    """
    tasks: dict[asyncio.Task[T], str] = {asyncio.create_task(first): "first"}
    (leader,) = tasks
    timer = asyncio.create_task(_after(sent, delay_s))
    try:
        await asyncio.wait({leader, timer}, return_when=asyncio.FIRST_COMPLETED)
        if leader.done() or (coroutine := second()) is None:
            return await leader, ""
        tasks[asyncio.create_task(coroutine)] = "second"
        pending = set(tasks)
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=lambda task: tasks[task]):
                if not task.cancelled() and task.exception() is None:
                    return task.result(), tasks[task]
        return leader.result(), "first"
    finally:
        timer.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, timer, return_exceptions=True)


async def _after(sent: asyncio.Event, delay_s: float) -> None:
    await sent.wait()
    await asyncio.sleep(delay_s)

"""Waiting for something to become true, in place of sleeping and hoping."""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import psutil

T = TypeVar("T")

POLL_S = 0.01
PATIENCE_S = 120.0
"""Far longer than anything takes on a busy machine: it is spent only where a test fails."""


async def wait_until(
    predicate: Callable[[], T | Awaitable[T]], timeout_s: float = PATIENCE_S, awaited: str = ""
) -> T:
    """Return the first true value of `predicate`, plain or async; fail the test when it stays false."""
    deadline = time.monotonic() + timeout_s
    while True:
        answer = predicate()
        value: T = await answer if inspect.isawaitable(answer) else answer
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(
                f"not within {timeout_s:g} s: {awaited or inspect.getsource(predicate).strip()}"
            )
        await asyncio.sleep(POLL_S)


def has_ended(process: psutil.Process | int) -> bool:
    """Whether a process is gone, or only waits for somebody to take note of its end."""
    try:
        watched = psutil.Process(process) if isinstance(process, int) else process
        return not watched.is_running() or watched.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True

"""Waits for a disk that takes nothing now: an operator can put that right while a run waits."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import structlog

from tidemill.common.files import StorageError
from tidemill.common.process.service import ServiceContext, StoppedError

log = structlog.get_logger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0

T = TypeVar("T")


async def on_disk(context: ServiceContext, write: Callable[..., T], *args: Any) -> T:
    """`until_stored`, for a function that blocks: it runs in a thread."""
    return await until_stored(context, lambda: asyncio.to_thread(write, *args))


During = Callable[..., AbstractContextManager[None]]
"""Says what a process is at, for the length of a block: `Activity.during`, or what stands for it."""


async def until_stored(
    context: ServiceContext, write: Callable[[], Awaitable[T]], during: During | None = None
) -> T:
    """Call `write` until the disk takes it; writes must leave nothing half-written behind.

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
            with (during or context.activity.during)("wait:disk", str(error)):
                await context.unless_stopping(asyncio.sleep(pause_s))
            if context.stopping.is_set():
                raise StoppedError from error
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

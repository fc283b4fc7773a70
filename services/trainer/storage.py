"""Waits out a disk that is full or read-only, and says so; nothing is announced meanwhile."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog

from common.files import StorageError

log = structlog.get_logger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0

T = TypeVar("T")


async def until_stored(write: Callable[[], Awaitable[T]]) -> T:
    """Call `write` until the disk takes it; writes must leave nothing half-written behind.

    Raises:
        StorageError: waiting cannot cure it.
    """
    pause_s = FIRST_PAUSE_S
    while True:
        try:
            return await write()
        except StorageError as error:
            if not error.can_clear:
                raise
            log.error("waiting for the disk", error=str(error), next_try_s=pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

"""Threads for calls that may wait long: for an object store, another machine, or a shared file system.

asyncio's default executor has few threads (CPUs + 4), and the whole process shares it, with `getaddrinfo` of
every new connection. Calls that wait for a store that is away would hold all of them, and what has nothing to
do with the store would wait behind them. So each owner of such calls has a few threads of its own.
"""

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


class BoundedThreads:
    """At most so many threads, which begin when they are needed."""

    def __init__(self, name: str, most: int) -> None:
        """`name` begins the names of the threads; further calls wait for one of `most`."""
        self.executor = ThreadPoolExecutor(most, thread_name_prefix=name)

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Like `asyncio.to_thread`, on one of these threads. Cancelled before it has begun, a call does not
        begin."""
        call = partial(contextvars.copy_context().run, function, *args)
        return await asyncio.get_running_loop().run_in_executor(self.executor, call)

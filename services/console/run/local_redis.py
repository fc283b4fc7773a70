"""A Redis on the data in a run's folder, which does not outlive the console.

A run that has no other starts one. It is started again when it dies, and stopped after everything else: the
services wait while it is away, and its append-only file brings back what they had written.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from tidemill.common.errors import TidemillError
from tidemill.common.redis.broker import Broker
from tidemill.common.redis.embedded import EmbeddedRedis
from tidemill.services.console.run.folder import RunFolder, connected
from tidemill.services.console.run.guard import Guard

LISTEN_VARIABLE = "TIDEMILL_REDIS_LISTEN"
"""HOST:PORT at which a run's own Redis is reached from other machines. `redis.url` in the run's folder has
the address with its password."""
POLL_S = 0.5
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 10.0
MAX_FAILED_STARTS = 5


class LocalRedis:
    def __init__(self, data: Path, guard: Guard, listen: str = "") -> None:
        """`listen` is the HOST:PORT at which other machines reach it, with a password; empty: none do."""
        self.server = EmbeddedRedis(data, listen=listen)
        self.guard = guard
        self._pid = 0
        self._start: asyncio.Future[None] | None = None

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        """Its address, the same over restarts.

        Raises:
            TidemillError: it does not start; the message has the end of its log.
        """
        self.guard.remove_at_end(self.server.socket.parent)
        try:
            await self._start_server()
            yield self.server.url
        finally:
            # A thread cannot be cancelled: a start that goes on is waited for, or its server would be left.
            if self._start is not None:
                await asyncio.gather(self._start, return_exceptions=True)
            await asyncio.to_thread(self.server.stop)
            if self._pid:
                self.guard.forget(self._pid)

    async def keep(self, on_event: Callable[[str], None], on_failure: Callable[[str], None]) -> None:
        """Start it again whenever it dies; `on_failure` gets the reason where that fails many times."""
        while True:
            await asyncio.sleep(POLL_S)
            if self.server.pid is not None:
                continue
            on_event("Redis died; starting it again")
            pause_s = FIRST_PAUSE_S
            for attempt in range(MAX_FAILED_STARTS):
                try:
                    await self._start_server()
                    break
                except TidemillError as error:
                    if attempt == MAX_FAILED_STARTS - 1:
                        on_failure(str(error))
                        return
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            on_event("Redis is back")

    async def _start_server(self) -> None:
        if self._pid:
            self.guard.forget(self._pid)
        self._start = asyncio.ensure_future(asyncio.to_thread(self.server.start))
        await asyncio.shield(self._start)
        if self.server.pid:
            self._pid = self.server.pid
            self.guard.watch(self._pid, "redis")


@contextlib.asynccontextmanager
async def open_redis(
    url: str,
    folder: RunFolder,
    guard: Guard,
    on_event: Callable[[str], None],
    on_failure: Callable[[str], None],
) -> AsyncIterator[tuple[str, Broker]]:
    """The Redis of a run that starts, and a connection to it: the server at `url`, or one of its own.

    Args:
        url: empty starts one
        folder: holds its data, and its address while it runs
        guard: ends it if the console dies
        on_event: gets a line when it died, and when it is back
        on_failure: gets the reason why it cannot be started again
    """
    if url:
        async with connected(url) as broker:
            yield url, broker
        return
    server = LocalRedis(folder.redis_data, guard, os.environ.get(LISTEN_VARIABLE, ""))
    async with server.running() as url:
        folder.write_address(url)
        keeper = asyncio.create_task(server.keep(on_event, on_failure), name="redis")
        try:
            async with connected(url) as broker:
                yield url, broker
        finally:
            # Before the server stops, or it would be started again.
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)
            folder.address_file.unlink(missing_ok=True)

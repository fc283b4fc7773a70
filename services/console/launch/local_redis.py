"""The run's own Redis: started with the run, started again when it dies, stopped after everything else.

The services wait while it is away, and its append-only file brings back what they had written.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from tidemill.common.errors import TidemillError
from tidemill.common.redis.embedded import EmbeddedRedis
from tidemill.services.console.processes.guard import Guard
from tidemill.services.console.run.folder import RunFolder

POLL_S = 0.5
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 10.0
MAX_FAILED_STARTS = 5


class LocalRedis:
    """Owns one `EmbeddedRedis` and the file that tells others its address."""

    def __init__(self, folder: RunFolder, guard: Guard, on_event: Callable[[str], None]) -> None:
        self.folder, self.guard, self.on_event = folder, guard, on_event
        self.server = EmbeddedRedis(folder.redis_data)
        self._pid = 0
        self._start: asyncio.Future[None] | None = None

    @contextlib.asynccontextmanager
    async def running(self, on_failure: Callable[[str], None]) -> AsyncIterator[str]:
        """Its address, the same over restarts; what is written is kept. `on_failure` gets the reason where it
        does not start again.

        Raises:
            TidemillError: it does not start; the message has the end of its log.
        """
        self.guard.remove_at_end(self.server.socket.parent)
        keeper: asyncio.Task[None] | None = None
        try:
            await self._start_server()
            self.folder.write_address(self.server.url)
            keeper = asyncio.create_task(self._keep(on_failure), name="redis")
            yield self.server.url
        finally:
            if keeper is not None:
                keeper.cancel()
                await asyncio.gather(keeper, return_exceptions=True)
            # A thread cannot be cancelled: a start that goes on is waited for, or its server would be left.
            if self._start is not None:
                await asyncio.gather(self._start, return_exceptions=True)
            await asyncio.to_thread(self.server.stop)
            if self._pid:
                self.guard.forget(self._pid)
            self.folder.address_file.unlink(missing_ok=True)

    async def _keep(self, on_failure: Callable[[str], None]) -> None:
        """Start it again whenever it dies, until that fails many times in a row."""
        while True:
            await asyncio.sleep(POLL_S)
            if self.server.pid is not None:
                continue
            self.on_event("Redis died; starting it again")
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
            self.on_event("Redis is back")

    async def _start_server(self) -> None:
        if self._pid:
            self.guard.forget(self._pid)
        self._start = asyncio.ensure_future(asyncio.to_thread(self.server.start))
        await asyncio.shield(self._start)
        if self.server.pid:
            self._pid = self.server.pid
            self.guard.watch(self._pid, "redis")

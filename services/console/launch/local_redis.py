"""The run's own Redis: started with the run, started again when it dies, stopped after everything else.

The services wait while it is away, and its append-only file brings back what they had written.
"""

import asyncio
import contextlib
from collections.abc import Callable

from tidemill.common.errors import BrokerError
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

    @property
    def url(self) -> str:
        """Its address; the same over restarts."""
        return self.server.url

    async def start(self) -> None:
        """Start it, and write its address into the run's folder.

        Raises:
            BrokerError: it does not start; the message has the end of its log.
        """
        self.guard.remove_at_end(self.server.socket.parent)
        await self._start_server()
        self.folder.write_address(self.url)

    async def keep(self) -> None:
        """Start it again whenever it dies; runs until it is cancelled.

        Raises:
            BrokerError: it does not start any more.
        """
        while True:
            await asyncio.sleep(POLL_S)
            if self.server.pid is None:
                self.on_event("Redis died; starting it again")
                await self._revive()
                self.on_event("Redis is back")

    async def stop(self) -> None:
        """Stop it cleanly; its data stays in the run's folder."""
        if self._start is not None:
            await asyncio.gather(self._start, return_exceptions=True)
        await asyncio.to_thread(self.server.stop)
        if self._pid:
            self.guard.forget(self._pid)
        self.folder.address_file.unlink(missing_ok=True)

    async def _revive(self) -> None:
        pause_s = FIRST_PAUSE_S
        for _ in range(MAX_FAILED_STARTS - 1):
            with contextlib.suppress(BrokerError):
                await self._start_server()
                return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        await self._start_server()

    async def _start_server(self) -> None:
        if self._pid:
            self.guard.forget(self._pid)
        # A thread cannot be cancelled: `stop` waits for it, or its server would be left running.
        self._start = asyncio.ensure_future(asyncio.to_thread(self.server.start))
        await asyncio.shield(self._start)
        if self.server.pid:
            self._pid = self.server.pid
            self.guard.watch(self._pid, "redis")

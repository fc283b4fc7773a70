"""A Redis that is far away: a proxy on loopback that passes every byte on, late."""

import asyncio
import contextlib
from types import TracebackType

CHUNK_BYTES = 1 << 16


class DistantRedis:
    """Forwards connections to a real server; each direction is `delay_s` late, as on a long line."""

    def __init__(self, port: int, delay_s: float) -> None:
        self._port = port
        self.delay_s = delay_s
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/0"

    async def __aenter__(self) -> "DistantRedis":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream = await asyncio.open_connection("127.0.0.1", self._port)
        for source, target in ((reader, upstream[1]), (upstream[0], writer)):
            task = asyncio.create_task(self._forward(source, target))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _forward(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        """Each chunk leaves `delay_s` after it came: many may be on their way at once."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            while chunk := await source.read(CHUNK_BYTES):
                loop.call_later(self.delay_s, target.write, chunk)
        loop.call_later(self.delay_s, target.close)

"""Our HTTP servers, asked by clients that never come to an end: what they may take is bounded."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from tests.support.waiting import PATIENCE_S
from tidemill.common.process import http_server
from tidemill.common.process.http_server import (
    MAX_HEAD_BYTES,
    BoundedProtocol,
    ServerInService,
    listen,
    server_config,
)

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
GET = b"GET / HTTP/1.1\r\nhost: x\r\n"


@contextlib.asynccontextmanager
async def served() -> AsyncIterator[int]:
    server = ServerInService(server_config(Starlette(routes=[Route("/", PlainTextResponse("hello"))])))
    listener = listen("127.0.0.1")
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        server.force_exit = True
        await serving


async def is_answered(streams: Streams) -> bool:
    """Whether a whole request gets its page."""
    reader, writer = streams
    with contextlib.suppress(ConnectionError):
        writer.write(GET + b"\r\n")
        async with asyncio.timeout(PATIENCE_S):
            return (await reader.readline()).startswith(b"HTTP/1.1 200")
    return False


async def num_taken(streams: Streams, start: bytes, piece: bytes, limit: int) -> int:
    """Bytes that the server takes before it ends the connection; `limit` at most."""
    reader, writer = streams
    ended = asyncio.create_task(reader.read())
    writer.write(start)
    num_sent = 0
    with contextlib.suppress(ConnectionError):
        while num_sent < limit and not ended.done():
            writer.write(piece)
            num_sent += len(piece)
            await writer.drain()
            await asyncio.sleep(0)
    ended.cancel()
    writer.transport.abort()
    return num_sent


@pytest.mark.parametrize(
    ("start", "piece"),
    [(GET + b"x: ", b"a" * 4096), (GET, b"name: value\r\n" * 300), (b"GET /", b"a" * 4096)],
    ids=["a header", "headers", "an address"],
)
async def test_a_head_without_an_end_is_taken_up_to_a_bound(start, piece):
    async with served() as port:
        streams = await asyncio.open_connection("127.0.0.1", port)
        # What lies in the kernel's buffers comes on top of what the server takes.
        assert await num_taken(streams, start, piece, 64 << 20) < MAX_HEAD_BYTES + (16 << 20)
        assert await is_answered(await asyncio.open_connection("127.0.0.1", port))


async def test_connections_beyond_the_limit_are_closed_and_those_before_are_served(monkeypatch):
    monkeypatch.setattr(BoundedProtocol, "max_connections", 4)
    async with served() as port:
        opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(8)]
        answered = [await is_answered(streams) for streams in opened]
        assert answered == [True] * 4 + [False] * 4
        opened[0][1].close()
        await opened[0][0].read()
        assert await is_answered(await asyncio.open_connection("127.0.0.1", port))


async def test_a_connection_that_asks_for_nothing_is_closed(monkeypatch):
    monkeypatch.setattr(http_server, "HEAD_S", 0.0)
    async with served() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        async with asyncio.timeout(PATIENCE_S):
            assert await reader.read() == b""
        writer.close()


async def test_so_is_one_that_begins_its_second_request_and_never_ends_it(monkeypatch):
    async with served() as port:
        streams = await asyncio.open_connection("127.0.0.1", port)
        reader, writer = streams
        monkeypatch.setattr(http_server, "HEAD_S", 0.5)
        for _ in range(3):  # requests with a whole head go on
            assert await is_answered(streams)
            while (await reader.readline()).strip():
                pass
            assert await reader.readexactly(5) == b"hello"
        ended = asyncio.create_task(reader.read())
        async with asyncio.timeout(PATIENCE_S):
            with contextlib.suppress(ConnectionError):
                writer.write(GET)
                while not ended.done():
                    writer.write(b"x: y\r\n")
                    await writer.drain()
                    await asyncio.sleep(0.05)
            with contextlib.suppress(ConnectionError):
                assert await ended == b""
        writer.close()

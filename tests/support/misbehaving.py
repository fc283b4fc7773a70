"""A real HTTP server that speaks the OpenAI API, or misbehaves on demand in the ways that servers do."""

import asyncio
import contextlib
import json
import sys
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any

Behaviour = Callable[["MisbehavingServer", asyncio.StreamWriter, dict[str, Any]], Any]


def answers(text: str = "Score: 7", delay_s: float = 0.0, **usage: int) -> Behaviour:
    """Says `text`, in the form of a chat completion and of a text completion alike."""

    async def behave(server: "MisbehavingServer", writer: asyncio.StreamWriter, _: dict[str, Any]) -> None:
        await asyncio.sleep(delay_s)
        choice = {"index": 0, "finish_reason": "stop", "text": text, "message": {"role": "assistant"}}
        choice["message"]["content"] = text  # type: ignore[index]
        counts = {"prompt_tokens": 10, "completion_tokens": 2} | usage
        counts["total_tokens"] = sum(counts.values())
        _send(writer, 200, {"id": "1", "object": "x", "created": 1, "choices": [choice], "usage": counts})

    return behave


def says(status: int, body: Any = None, **headers: str) -> Behaviour:
    """Answers with a status, such as 429 or 500."""

    async def behave(server: "MisbehavingServer", writer: asyncio.StreamWriter, _: dict[str, Any]) -> None:
        _send(
            writer, status, body if body is not None else {"error": {"message": f"status {status}"}}, headers
        )

    return behave


async def hangs(server: "MisbehavingServer", writer: asyncio.StreamWriter, _: dict[str, Any]) -> None:
    await asyncio.sleep(3600)


async def cuts(server: "MisbehavingServer", writer: asyncio.StreamWriter, _: dict[str, Any]) -> None:
    """Closes the connection in the middle of its answer."""
    writer.write(b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 999\r\n\r\n{"choi')


async def closes(server: "MisbehavingServer", writer: asyncio.StreamWriter, _: dict[str, Any]) -> None:
    """Closes the connection before it answers."""


class MisbehavingServer:
    """Serves on a loopback port. Requests take behaviours from `script`, then `default`."""

    def __init__(self, default: Behaviour | None = None, *script: Behaviour) -> None:
        self.default = default or answers()
        self.script = deque(script)
        self.health = 200
        self.requests: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.in_flight = 0
        self.peak = 0
        self.num_cancelled = 0
        self.port = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    async def __aenter__(self) -> "MisbehavingServer":
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen; after a `stop` on the same port again."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, backlog=1024)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Refuse connections from now on, and break those that are open."""
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                await self._answer(reader, writer)
        except asyncio.CancelledError:
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {}
        for line in head[1:]:
            name, _, value = line.partition(": ")
            headers[name.lower()] = value
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        path = head[0].split()[1]
        if path == "/health":
            _send(writer, self.health, {})
            return
        request = json.loads(body) if body else {}
        self.requests.append(request)
        self.paths.append(path)
        self.headers.append(headers)
        self.in_flight += 1
        self.peak = max(self.peak, self.in_flight)
        gone = asyncio.create_task(reader.read())  # ends when the client closes the connection
        behaving = asyncio.create_task(
            (self.script.popleft() if self.script else self.default)(self, writer, request)
        )
        try:
            await asyncio.wait({gone, behaving}, return_when=asyncio.FIRST_COMPLETED)
            self.num_cancelled += not behaving.done()
        finally:
            self.in_flight -= 1
            for task in (gone, behaving):
                task.cancel()
            await asyncio.gather(gone, behaving, return_exceptions=True)
        with contextlib.suppress(ConnectionError):
            await writer.drain()


def _send(
    writer: asyncio.StreamWriter, status: int, body: Any, headers: dict[str, str] | None = None
) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    fields = {"Content-Type": "application/json", "Content-Length": str(len(content)), "Connection": "close"}
    fields |= {name.replace("_", "-"): value for name, value in (headers or {}).items()}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    writer.write(f"HTTP/1.1 {status} X\r\n{head}\r\n".encode() + content)


async def serve_for_ever(host: str, port: int) -> None:
    """A well-behaved server as a process of its own: `python -m tests.support.misbehaving HOST PORT`."""
    server = MisbehavingServer(answers("Score: 7"))
    server.port = port
    async with server:
        print(f"listening on {host}:{port}", flush=True)
        await asyncio.sleep(3600)


if __name__ == "__main__":
    asyncio.run(serve_for_ever(sys.argv[1], int(sys.argv[2])))

"""A proxy before a gateway that loses, halves and delays responses, as networks and gateways of others do."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Literal, NamedTuple

Mode = Literal["pass", "delay", "lose", "halve", "halve_in_order", "hang_up", "fail"]
"""What is done with a request and its response:

* `pass`, `delay`: the client gets it, at once or later
* `lose`: the gateway has sent all of it, and the client gets nothing
* `halve`: the client's connection breaks in the middle of it
* `halve_in_order`: the client gets the first half of the body as a whole one
* `hang_up`: the gateway's connection breaks before it has an answer, and so does the client's
* `fail`: the gateway never sees the request; the client gets 500
"""
END_OF_HEAD = b"\r\n\r\n"
HANG_UP_S = 0.02
DELAY_S = 0.05


class Message(NamedTuple):
    """A request, or a response."""

    head: bytes
    """With the empty line that ends it."""
    body: bytes

    @property
    def is_question(self) -> bool:
        """Whether it asks the model."""
        return self.head.startswith(b"POST") and b"/count_tokens" not in self.head.split(b"\r\n")[0]

    def with_header(self, name: str, value: str) -> "Message":
        """The message with this header in place of others of its name."""
        first, *lines = self.head.removesuffix(END_OF_HEAD).split(b"\r\n")
        kept = [line for line in lines if not line.lower().startswith(name.lower().encode() + b":")]
        return Message(b"\r\n".join([first, *kept, f"{name}: {value}".encode()]) + END_OF_HEAD, self.body)


class LossyProxy:
    """Listens on loopback, and does to each request for the model what `modes` says, then `pass`."""

    def __init__(self, port: int, modes: Iterable[Mode] = ()) -> None:
        """`port` is that of the gateway, on loopback."""
        self.gateway_port = port
        self._modes: Iterator[Mode] = iter(modes)
        self.port = 0
        self.received = b""
        """Everything of the gateway's that clients could read: bodies of responses, one after the other."""
        self.asked = b""
        """Bodies of the requests for the model, one after the other."""
        self.done: list[Mode] = []

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator["LossyProxy"]:
        """Serve during the block."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                request = await read_message(reader)
                mode: Mode = next(self._modes, "pass") if request.is_question else "pass"
                if request.is_question:
                    self.asked += request.body
                    self.done.append(mode)
                answer = await self._ask(request, mode)
                if answer is None:
                    break
                writer.write(answer.head + answer.body)
                await writer.drain()
                if mode == "halve":
                    break
        writer.transport.abort()

    async def _ask(self, request: Message, mode: Mode) -> Message | None:
        """What the client gets; None if its connection is to break."""
        if mode == "fail":
            body = b'{"error": {"message": "out of order", "type": "api_error"}}'
            head = b"HTTP/1.1 500 Error\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
            return Message(head % len(body), body)
        reader, writer = await asyncio.open_connection("127.0.0.1", self.gateway_port)
        asked = request.with_header("Connection", "close")
        writer.write(asked.head + asked.body)
        if mode == "hang_up":
            await asyncio.sleep(HANG_UP_S)
            writer.transport.abort()
            return None
        answer = await read_message(reader)
        writer.close()
        if mode == "lose":
            return None
        if mode == "delay":
            await asyncio.sleep(DELAY_S)
        answer = answer.with_header("Connection", "keep-alive")
        half = answer.body[: len(answer.body) // 2]
        if mode == "halve":
            # The head promises more: no client takes this for a whole answer.
            return Message(answer.head, half)
        if mode == "halve_in_order":
            self.received += half
            return Message(answer.head, half).with_header("Content-Length", str(len(half)))
        self.received += answer.body
        return answer


async def read_message(reader: asyncio.StreamReader) -> Message:
    """One request or response with a `Content-Length`, or without a body."""
    head = await reader.readuntil(END_OF_HEAD)
    num_bytes = 0
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            num_bytes = int(value)
        if name.lower() == b"transfer-encoding":
            raise ValueError("messages in chunks are not read here")
    return Message(head, await reader.readexactly(num_bytes))

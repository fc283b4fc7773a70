"""A client of `MemoryServer` with what of redis-py's asynchronous client `common/redis/broker.py` uses.

Each command is a message to the server and one back. What may happen on the way (it takes long, it is never
applied, its answer never arrives) is for the `Network` to say.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tests.simulation.redis.server import Blocked, Fields, MemoryServer, stream_keys, without_block

Answer = Callable[[Any], None]


class Network(Protocol):
    """The way to the server and back."""

    def request(self, unit: Sequence[Fields], is_atomic: bool) -> "asyncio.Future[list[Any]]":
        """Send commands; the future gets one reply or error for each, or a ConnectionError for all."""


class DirectNetwork:
    """No way at all: every command is applied where it is sent. For tests without faults."""

    def __init__(self, server: MemoryServer) -> None:
        self.server = server

    def request(self, unit: Sequence[Fields], is_atomic: bool) -> "asyncio.Future[list[Any]]":
        loop = asyncio.get_running_loop()
        future: asyncio.Future[list[Any]] = loop.create_future()

        def answer(replies: list[Any]) -> None:
            if not future.done():
                future.set_result(replies)

        deliver(self.server, unit, is_atomic, answer, future.done)
        return future


def deliver(
    server: MemoryServer,
    unit: Sequence[Fields],
    is_atomic: bool,
    answer: Callable[[list[Any]], None],
    is_gone: Callable[[], bool],
) -> None:
    """What a server does with commands that have arrived."""
    if is_atomic or len(unit) > 1:
        parts = [unit] if is_atomic else [[fields] for fields in unit]
        answer([reply for part in parts for reply in server.apply(part)])
        return
    fields, block_s = without_block(unit[0])
    (reply,) = server.apply([fields])
    if reply is not None or block_s is None:
        answer([reply])
        return
    waiting = Blocked(fields, stream_keys(fields), lambda reply: answer([reply]), is_gone)
    server.block(waiting)

    def give_up() -> None:
        if server.unblock(waiting):
            answer([None])

    asyncio.get_running_loop().call_later(block_s, give_up)


class MemoryClient:
    """What `Broker` needs of a client."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self.connection_pool = self

    async def disconnect(self, inuse_connections: bool = True) -> None:
        """The next command connects anew."""

    async def execute_command(self, *command: Any) -> Any:
        (reply,) = await self._network.request([packed(command)], False)
        if isinstance(reply, Exception):
            raise reply
        return reply

    def pipeline(self, transaction: bool = True) -> "MemoryPipeline":
        return MemoryPipeline(self._network, transaction)

    async def aclose(self) -> None:
        """Nothing to close."""


class MemoryPipeline:
    """Commands that are sent together."""

    def __init__(self, network: Network, is_atomic: bool) -> None:
        self._network, self._is_atomic = network, is_atomic
        self._commands: list[Fields] = []

    def execute_command(self, *command: Any) -> None:
        self._commands.append(packed(command))

    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        if not self._commands:
            return []
        replies = await self._network.request(self._commands, self._is_atomic)
        for reply in replies:
            if raise_on_error and isinstance(reply, Exception):
                raise reply
        return replies


def packed(command: Sequence[Any]) -> Fields:
    """A command as bytes; its name may hold a subcommand."""
    fields = _words(command[0])
    for value in command[1:]:
        kind = type(value)
        if kind is bytes:
            fields.append(value)
        elif kind is memoryview or kind is bytearray:
            fields.append(bytes(value))
        else:
            fields.append(str(value).encode())
    return fields


def _words(name: str) -> Fields:
    return [name.encode()] if " " not in name else [part.encode() for part in name.split()]

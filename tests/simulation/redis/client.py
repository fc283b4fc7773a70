"""A client of `MemoryServer` with what `common/redis/broker.py` uses of `Client` in `common/redis/lines.py`.

Each command is a message to the server and one back. What may happen on the way (it takes long, it is never
applied, its answer never arrives) is for the `Network` to say.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tests.simulation.redis.server import Blocked, Fields, MemoryServer, stream_keys, without_block
from tidemill.common.redis import lines

Answer = Callable[[Any], None]


class Network(Protocol):
    """The way to the server and back."""

    def request(
        self, unit: Sequence[Fields], is_atomic: bool, is_blocking: bool = False
    ) -> "asyncio.Future[list[Any]]":
        """Send commands; the future gets one reply or error for each, or a ConnectionError for all."""


class DirectNetwork:
    """Applies every command at once. For tests without faults."""

    def __init__(self, server: MemoryServer) -> None:
        self.server = server

    def request(
        self, unit: Sequence[Fields], is_atomic: bool, is_blocking: bool = False
    ) -> "asyncio.Future[list[Any]]":
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
        answer([reply for commands in parts for reply in server.apply(commands)])
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

    async def exchange(
        self, unit: Sequence[Sequence[Any]], is_atomic: bool = False, is_blocking: bool = False
    ) -> list[Any]:
        if not unit:
            return []
        async with asyncio.timeout(lines.ANSWER_TIMEOUT_S):
            return await self._network.request([packed(command) for command in unit], is_atomic, is_blocking)

    def disconnect(self) -> None:
        """The next command connects again."""

    async def execute_command(self, *command: Any, is_blocking: bool = False) -> Any:
        (reply,) = await self.exchange([command], is_blocking=is_blocking)
        if isinstance(reply, Exception):
            raise reply
        return reply

    def ask(self, command: Sequence[Any]) -> asyncio.Future[list[Any]]:
        """Like `Client.ask`."""
        return asyncio.ensure_future(self.exchange([command]))

    async def aclose(self) -> None:
        """Nothing to close."""


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
    return [name.encode()] if " " not in name else [word.encode() for word in name.split()]

"""A run in a Redis Cluster, on one node: the primary that owns the slot of the run's keys.

All keys of a run share a slot, so scripts and transactions work as on a single server; the set of runs has a
slot of its own, and RQ's keys of a run get the run's hash tag. Each connection asks the cluster for the owner
of its slot when it connects. After a failover, or when the slot is moved, connections are dropped, and the
command is repeated as after a lost connection.
"""

import asyncio
import re
from collections.abc import Callable, Sequence
from typing import Any

import hiredis
from redis import Connection as BlockingConnection
from redis import ConnectionPool
from redis import Redis as BlockingRedis
from redis import exceptions as redis_errors
from redis.backoff import ExponentialWithJitterBackoff
from redis.crc import key_slot
from redis.retry import Retry

from tidemill.common.errors import BrokerError
from tidemill.common.redis.lines import Client, Command
from tidemill.common.redis.several_hosts import Address
from tidemill.common.wire.keys import PREFIX, RUNS

RETRIES = 3
"""Repeats of a command: redis-py's default for a single server."""
NODE_TIMEOUT_S = 2.0
"""Short, so that a node that does not answer delays the question to the next one little."""

_OF_RQ = re.compile(rf"rq:\w+:{PREFIX}:(.+):\w+")
_MOVED = (
    redis_errors.AskError,  # and MovedError
    redis_errors.ClusterDownError,  # and MasterDownError
    redis_errors.ReadOnlyError,
)
_AWAY = (redis_errors.ConnectionError, redis_errors.TimeoutError, TimeoutError, OSError)
_ALL_ARE_KEYS = frozenset(("DEL", "UNLINK", "EXISTS", "WATCH", "LMOVE", "BLMOVE", "RENAME", "XREAD"))
"""Commands of RQ whose arguments are all treated as keys."""


def tagged(key: str, run_id: str) -> str:
    """RQ's key with the run's hash tag; any other as it is."""
    return f"rq:{{{run_id}}}:{key[3:]}" if key.startswith("rq:") else key


class Nodes:
    """The known nodes of a cluster; finds the owner of a slot. Threads may share it."""

    def __init__(
        self, seeds: Sequence[Address], kind: type[Any] = BlockingConnection, **options: Any
    ) -> None:
        """`kind` is the class of blocking connections, `options` are theirs."""
        self._seeds = list(seeds)
        self.addresses = self._seeds
        self.kind = kind
        self.options = options

    def find(self, slot: int) -> Address:
        """The primary of a slot, by asking one node after another. Raises: the error of the last one."""
        timeouts = {"socket_timeout": NODE_TIMEOUT_S, "socket_connect_timeout": NODE_TIMEOUT_S}
        error: Exception = redis_errors.ConnectionError("no node of the cluster answers")
        for address in self.addresses:
            node = self.kind(host=address[0], port=address[1], **{**self.options, **timeouts})
            try:
                node.connect()
                node.send_command("CLUSTER", "SLOTS")
                return self.owner(slot, node.read_response(), address)
            except (*_AWAY, *_MOVED) as why:
                error = why
            finally:
                node.disconnect()
        raise error

    def owner(self, slot: int, reply: Any, asked: Address) -> Address:
        """The owner of `slot` by a reply to CLUSTER SLOTS; a node without an own host has that of `asked`.

        Raises:
            ClusterDownError: no primary has the slot now.
        """
        primaries = {
            (first, last): (host.decode() or asked[0], int(port))
            for first, last, (host, port, *_), *_ in reply
        }
        # The seeds stay in the list: all other known nodes may be gone some day.
        self.addresses = list(dict.fromkeys([*primaries.values(), *self._seeds]))
        for (first, last), address in primaries.items():
            if first <= slot <= last:
                return address
        raise redis_errors.ClusterDownError(f"no primary has slot {slot}")


class ClusterClient(Client):
    """A `Client` for each slot that is used: that of a run, and that of the set of runs."""

    def __init__(self, make_client: Callable[[int], Client]) -> None:
        self._make_client = make_client
        self._clients: dict[int, Client] = {}
        self._home = key_slot(RUNS.encode())
        """The slot used last with a run's key: commands without a key go to its node."""

    async def exchange(
        self, unit: Sequence[Command], is_atomic: bool = False, is_blocking: bool = False
    ) -> list[Any]:
        """Like `Client.exchange`; all keys of the unit belong to one run."""
        if not unit:
            return []
        commands = [_as_tagged(command) for command in unit]
        client = self._client_of(commands)
        try:
            replies = await client.exchange(commands, is_atomic, is_blocking)
        except _MOVED as error:
            replies = [error]
        for reply in replies:
            if isinstance(reply, _MOVED):
                client.disconnect()  # the next connection asks for the owner again
                if isinstance(reply, redis_errors.AskError):
                    # The redirection is not followed: while a slot is moved, a run's keys are on both nodes.
                    raise redis_errors.TryAgainError(f"the slot is moved: {reply}") from None
                raise reply
        return replies

    def ask(self, command: Command) -> asyncio.Future[list[Any]] | None:
        return self._client_of([command]).ask(command)

    def disconnect(self) -> None:
        for client in self._clients.values():
            client.disconnect()

    async def aclose(self) -> None:
        await asyncio.gather(*(client.aclose() for client in self._clients.values()))

    def _client_of(self, commands: Sequence[Command]) -> Client:
        key = next(filter(None, map(_key_of, commands)), "")
        slot = key_slot(key.encode()) if key else self._home
        if "{" in key:
            self._home = slot
        if slot not in self._clients:
            self._clients[slot] = self._make_client(slot)
        return self._clients[slot]


def _key_of(command: Command) -> str:
    """The first key of a command, one of ours or of RQ; empty where it has none."""
    ours = (word for word in command[1:] if isinstance(word, str) and word.startswith((PREFIX + ":", "rq:")))
    return next(ours, "")


def _as_tagged(command: Command) -> Command:
    """The command with the key that a queue of RQ has in a cluster; others unchanged."""
    match = _OF_RQ.fullmatch(_key_of(command))
    return [tagged(word, match[1]) if word == match[0] else word for word in command] if match else command


class _Packer:
    """Packs RQ's commands with the run's hash tag in their keys, whose places depend on the command."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id

    def pack(self, *command: Any) -> list[bytes]:
        name, *arguments = command
        words = (*name.split(), *arguments) if isinstance(name, str) else command
        kind = str(words[0]).upper()
        first = 1
        end = 2
        if kind in _ALL_ARE_KEYS:
            end = len(words)
        elif kind in ("EVAL", "EVALSHA"):
            first = 3
            end = 3 + int(words[2])
        elif kind in ("PUBLISH", "SUBSCRIBE", "UNSUBSCRIBE"):
            end = 1
        elif kind == "XINFO":
            first = 2
            end = 3
        return [hiredis.pack_command((*words[:first], *map(self._tagged, words[first:end]), *words[end:]))]

    def _tagged(self, word: Any) -> Any:
        text = word.decode(errors="replace") if isinstance(word, bytes) else word
        return tagged(text, self._run_id) if isinstance(text, str) and text.startswith("rq:") else word


def make_blocking_cluster_client(nodes: Nodes, run_id: str) -> BlockingRedis:
    """A client for RQ and a run's results, on the primary that owns the run's slot.

    Raises:
        BrokerError: `run_id` is empty.
    """
    if not run_id:
        raise BrokerError("jobs in a Redis Cluster need the id of their run")
    slot = key_slot(f"{{{run_id}}}".encode())

    class ToOwner(nodes.kind):  # type: ignore[misc, name-defined]
        """Asks for the owner whenever it connects; leaves a node that no longer has the slot."""

        def connect(self) -> None:
            if not self.is_connected:
                self.host, self.port = nodes.find(slot)
            super().connect()

        def read_response(self, *args: Any, **named: Any) -> Any:
            try:
                return super().read_response(*args, **named)
            except _MOVED as error:
                self.disconnect()
                # A kind of error that redis-py repeats, on a connection that asks for the owner again.
                raise redis_errors.ConnectionError(f"the run's slot is moved: {error}") from None

    retry = Retry(ExponentialWithJitterBackoff(base=1, cap=10), RETRIES)
    options = {**nodes.options, "retry": retry, "command_packer": _Packer(run_id)}
    return BlockingRedis(connection_pool=ConnectionPool(connection_class=ToOwner, **options))

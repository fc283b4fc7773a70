"""A Redis Cluster: each command goes to the primary that has the slot of its key.

All keys of a run share a slot, so scripts and transactions of a run are what they are on one server; the
set of runs has a slot of its own. RQ's keys of a run are given the run's hash tag. After a failover, or when
a slot is moved, the cluster is asked again where the slots are, and the command is repeated as after a lost
connection.
"""

import asyncio
import re
from collections.abc import Callable, Iterable, Sequence
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
from tidemill.common.redis.lines import Client, Command, Connection
from tidemill.common.wire.keys import PREFIX

Address = tuple[str, int]
Slots = list[tuple[int, int, Address]]
"""First and last slot, and the primary that has them."""

RETRIES = 3
"""As redis-py repeats a command of a client on a single server."""

_EVERYWHERE = ("SCRIPT LOAD", "SCRIPT EXISTS")
"""For all primaries: a script must be where the keys are."""
_OF_RQ = re.compile(rf"rq:\w+:{PREFIX}:(.+):\w+")
_MOVED = (
    redis_errors.AskError,  # and MovedError
    redis_errors.ClusterDownError,  # and MasterDownError
    redis_errors.ReadOnlyError,
)
_AWAY = (redis_errors.ConnectionError, redis_errors.TimeoutError, TimeoutError, OSError)
_ALL_ARE_KEYS = frozenset(("DEL", "UNLINK", "EXISTS", "WATCH", "LMOVE", "BLMOVE", "RENAME", "XREAD"))
"""Commands of RQ with more keys than one."""


def tagged(key: str, run_id: str) -> str:
    """RQ's key with the run's hash tag; any other as it is."""
    return f"rq:{{{run_id}}}:{key[3:]}" if key.startswith("rq:") else key


class ClusterClient(Client):
    """A `Client` for each primary, and the one that a command belongs to."""

    def __init__(self, seeds: Sequence[Address], connect_to: Callable[[Address], Connection]) -> None:
        self._seeds, self._connect_to = list(seeds), connect_to
        self._clients: dict[Address, Client] = {}
        self._slots: Slots = []
        self._learning = asyncio.Lock()
        self._home = 0
        """The slot that was used last with a run's key: where a command without a key goes."""

    async def exchange(
        self, unit: Sequence[Command], is_atomic: bool = False, is_blocking: bool = False
    ) -> list[Any]:
        """As `Client.exchange`; what belongs to several primaries goes to each, if not `is_atomic`."""
        if not self._slots:
            await self._learn()
        try:
            if unit and unit[0][0] in _EVERYWHERE:
                return await self._everywhere(unit)
            parts: dict[Address, list[int]] = {}
            commands = [_as_tagged(command) for command in unit]
            for place, command in enumerate(commands):
                parts.setdefault(self._primary_of(command), []).append(place)
            replies: list[Any] = [None] * len(unit)
            answers = [
                self._client(address).exchange([commands[place] for place in places], is_atomic, is_blocking)
                for address, places in parts.items()
            ]
            for places, answer in zip(parts.values(), await asyncio.gather(*answers), strict=True):
                for place, reply in zip(places, answer, strict=True):
                    replies[place] = reply
        except (*_AWAY, *_MOVED) as error:
            raise self._moved(error) from None
        for reply in replies:
            if isinstance(reply, _MOVED):
                raise self._moved(reply)
        return replies

    def ask(self, command: Command) -> asyncio.Future[list[Any]] | None:
        """As `Client.ask`; None too where no primary is known."""
        try:
            return self._client(self._primary_of(command)).ask(command)
        except redis_errors.ClusterDownError:
            return None

    def disconnect(self) -> None:
        """Drop all idle connections, and what is known of the slots."""
        self._slots = []
        for client in self._clients.values():
            client.disconnect()

    async def aclose(self) -> None:
        await asyncio.gather(*(client.aclose() for client in self._clients.values()))

    def _moved(self, error: BaseException) -> BaseException:
        """Ask again where the slots are, with the next attempt."""
        self._slots = []
        if isinstance(error, redis_errors.AskError):
            return redis_errors.TryAgainError(f"the slot is moved: {error}")
        return error

    def _client(self, address: Address) -> Client:
        if address not in self._clients:
            self._clients[address] = Client(lambda: self._connect_to(address))
        return self._clients[address]

    def _primary_of(self, command: Command) -> Address:
        key = _key_of(command)
        slot = key_slot(key.encode()) if key else self._home
        if "{" in key:
            self._home = slot
        return owner_of(self._slots, slot)

    async def _everywhere(self, unit: Sequence[Command]) -> list[Any]:
        """The answers of all primaries; of flags, whether all of them have it."""
        primaries = {address for _, _, address in self._slots}
        answers = await asyncio.gather(*(self._client(address).exchange(unit) for address in primaries))
        return [
            [min(flags) for flags in zip(*of_one, strict=True)] if isinstance(of_one[0], list) else of_one[0]
            for of_one in zip(*answers, strict=True)
        ]

    async def _learn(self) -> None:
        async with self._learning:
            if self._slots:
                return
            error: BaseException = redis_errors.ClusterDownError("it has no slots")
            for address in [*self._clients, *self._seeds]:
                try:
                    reply = await self._client(address).execute_command("CLUSTER SLOTS")
                except (*_AWAY, *_MOVED) as why:
                    error = why
                    continue
                if reply:
                    self._slots = slots_of(reply, address)
                    return
            raise error


def slots_of(reply: Iterable[Any], asked: Address) -> Slots:
    """What CLUSTER SLOTS says; a node that knows no address of its own has the one that was `asked`."""
    return [
        (int(first), int(last), (primary[0].decode() if primary[0] else asked[0], int(primary[1])))
        for first, last, primary, *_ in reply
    ]


def owner_of(slots: Slots, slot: int) -> Address:
    """The primary that has the slot.

    Raises:
        ClusterDownError: none has it now.
    """
    for first, last, address in slots:
        if first <= slot <= last:
            return address
    raise redis_errors.ClusterDownError(f"no primary has slot {slot}")


def _key_of(command: Command) -> str:
    """The key of a command of ours; empty where it has none."""
    ours = (part for part in command[1:] if isinstance(part, str) and part.startswith((PREFIX + ":", "rq:")))
    return next(ours, "")


def _as_tagged(command: Command) -> Command:
    """A command that looks at a queue of RQ, with the key that the queue has in a cluster."""
    match = _OF_RQ.fullmatch(_key_of(command))
    return [tagged(part, match[1]) if part == match[0] else part for part in command] if match else command


class _Packer:
    """Gives RQ's keys the run's hash tag as they leave. What is a key depends on the command."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id

    def pack(self, *command: Any) -> list[bytes]:
        name, *rest = command
        words = (*name.split(), *rest) if isinstance(name, str) else command
        kind = str(words[0]).upper()
        first, end = 1, 2
        if kind in _ALL_ARE_KEYS:
            end = len(words)
        elif kind in ("EVAL", "EVALSHA"):
            first, end = 3, 3 + int(words[2])
        elif kind in ("PUBLISH", "SUBSCRIBE", "UNSUBSCRIBE"):
            end = 1
        elif kind == "XINFO":
            first, end = 2, 3
        return [hiredis.pack_command((*words[:first], *map(self._tagged, words[first:end]), *words[end:]))]

    def _tagged(self, part: Any) -> Any:
        text = part.decode(errors="replace") if isinstance(part, bytes) else part
        return tagged(text, self._run_id) if isinstance(text, str) and text.startswith("rq:") else part


def make_blocking_cluster_client(
    seeds: Sequence[Address], run_id: str, base: type[Any] = BlockingConnection, **options: Any
) -> BlockingRedis:
    """A client for RQ and a run's results, on the primary that has the run.

    Raises:
        BrokerError: it is not said which run.
    """
    if not run_id:
        raise BrokerError("jobs in a Redis Cluster need the id of their run")
    slot, known = key_slot(f"{{{run_id}}}".encode()), list(seeds)

    class ToOwner(base):  # type: ignore[misc]
        """Asks for the run's primary whenever it connects, and leaves one that has the run no more."""

        def connect(self) -> None:
            if not self.is_connected:
                self.host, self.port = find()
            super().connect()

        def read_response(self, *args: Any, **named: Any) -> Any:
            try:
                return super().read_response(*args, **named)
            except _MOVED as error:
                self.disconnect()
                raise redis_errors.ConnectionError(f"the run's slot is moved: {error}") from None

    def find() -> Address:
        error: Exception = redis_errors.ConnectionError("no node of the cluster answers")
        for host, port in list(known):
            node = base(host=host, port=port, **options)
            try:
                node.connect()
                node.send_command("CLUSTER", "SLOTS")
                slots = slots_of(node.read_response(), (host, port))
                owner = owner_of(slots, slot)
            except (*_AWAY, *_MOVED) as why:
                error = why
                continue
            finally:
                node.disconnect()
            known[:] = dict.fromkeys([*(address for _, _, address in slots), *seeds])
            return owner
        raise error

    retry = Retry(ExponentialWithJitterBackoff(base=1, cap=10), RETRIES)
    pool = ConnectionPool(
        connection_class=ToOwner, command_packer=_Packer(run_id), **{**options, "retry": retry}
    )
    return BlockingRedis(connection_pool=pool)

"""The run's Redis as its clients see it: a server that restarts, fails over, is slow, or loses what it said.

Guarantee: what a client was told is what some server applied; only faults make a server forget it, and they
forget a suffix of its writes, never anything in between.
"""

import asyncio
import contextvars
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import OutOfMemoryError, ReadOnlyError

from tests.simulation.clock import Clocks
from tests.simulation.loop import OWNER, SimulatedLoop
from tests.simulation.process import Process
from tests.simulation.redis.client import deliver
from tests.simulation.redis.keyspace import READS, split
from tests.simulation.redis.server import Fields, MemoryServer
from tidemill.common.redis.broker import _SCRIPTS, _script
from tidemill.common.redis.lines import ANSWER_TIMEOUT_S

LATENCY_S = 0.001
NOTICED_S = 1.0
"""Whoever asks in an outage of so long has asked twice."""
ADDING = frozenset({b"XADD", b"HSET", b"HSETNX", b"SET", b"SADD", b"ZADD", b"XSETID", b"XGROUP CREATE"})
"""Commands that need memory."""
REFUSED = "Error 111 connecting to redis:6379. Connection refused."
LOST = "Connection closed by server."


class State(StrEnum):
    """What the server's address leads to."""

    UP = "up"
    DOWN = "down"
    DEMOTED = "demoted"
    """A master that is a replica now: it answers reads from what it has."""


@dataclass
class Weather:
    """How the way to the server is now."""

    slow_s: float = 0.0
    lose_share: float = 0.0
    """Share of the commands that are never applied, or whose answer never comes, half of each."""
    hang_share: float = 0.0
    """Of those, the share in which the client is not even told that the connection is gone."""
    is_full: bool = False
    """Redis has no memory: it refuses what would need some."""


@dataclass
class Cluster:
    """`server` is the one that the address leads to."""

    loop: SimulatedLoop
    clocks: Clocks
    rng: random.Random
    kill: Callable[[Process], None]
    tell: Callable[[str, str, bytes], None]
    """Hears of every command that is applied: process, words, and bytes that stand for it."""
    server: MemoryServer = field(init=False)
    state: State = State.UP
    weather: Weather = field(default_factory=Weather)
    cut_off: set[Process] = field(default_factory=set)
    """Processes that cannot reach the server now."""
    num_servers: int = 1
    before: Callable[[Process, Fields], None] | None = None
    """Hears of every command that arrives, before it is applied."""
    watch: Callable[[MemoryServer, Process, Fields], Callable[[list[Any]], None] | None] | None = None
    """Hears of every command that is applied alone; what it returns hears of the replies."""
    outage_until: float = 0.0
    """When the server came back last, after an outage that everybody has noticed."""
    down_at: float = 0.0
    disturbed_at: float = 0.0
    """When last the way to the server was slow."""
    _waiting: dict["asyncio.Future[Any]", Process] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.server = MemoryServer(self.clocks.server_ms, _run_id(1))
        self._context = contextvars.Context()

    def request(self, unit: Sequence[Fields], is_atomic: bool) -> "asyncio.Future[list[Any]]":
        """Send commands of the running process."""
        process, future = OWNER.get(self.loop.world), self.loop.create_future()
        if (answers := _of_the_file(unit)) is not None:
            future.set_result(answers)
            return future
        if self.loop.is_ending:
            future.cancel()
            return future
        process.num_steps += 1
        if process.springs("unsent"):
            self.kill(process)
            return future
        self._waiting[future] = process
        fate = self._fate()
        self._later(lambda: self._arrive(process, unit, is_atomic, future, fate))
        return future

    def go_down(self) -> None:
        """Every connection breaks."""
        self.state, self.down_at = State.DOWN, self.loop.now
        self._break_connections()

    def demote(self) -> None:
        """The server is a replica from now on."""
        self.state = State.DEMOTED
        self.server.is_replica = True

    def come_up(self, num_units: int) -> None:
        """Another server is there, on the first so many writes of the old one."""
        self._break_connections()
        self.num_servers += 1
        if self.loop.now - self.down_at > NOTICED_S:
            self.outage_until = self.loop.now
        self.server = self.server.restored(num_units, _run_id(self.num_servers))
        self.state = State.UP

    def disconnect(self, process: Process) -> None:
        """The server sees the connections of a process close."""
        for future in [f for f, owner in self._waiting.items() if owner is process]:
            del self._waiting[future]

    def _break_connections(self) -> None:
        for future, process in list(self._waiting.items()):
            process.disturbed_at = max(process.disturbed_at, self.loop.now)
            self._answer(future, RedisConnectionError(LOST))
        self.server.blocked.clear()

    def _fate(self) -> str:
        if self.weather.lose_share and self.rng.random() < self.weather.lose_share:
            how = "hangs" if self.rng.random() < self.weather.hang_share else "breaks"
            return f"{self.rng.choice(('unsent', 'unanswered'))} {how}"
        return ""

    def _later(self, call: Callable[[], None]) -> None:
        delay_s = LATENCY_S * (0.1 + self.rng.random())
        if self.weather.slow_s:
            delay_s += self.weather.slow_s * self.rng.random()
        self.loop.call_later(delay_s, call, context=self._context)

    def _arrive(
        self,
        process: Process,
        unit: Sequence[Fields],
        is_atomic: bool,
        future: "asyncio.Future[Any]",
        fate: str,
    ) -> None:
        if self.before is not None and self.state is State.UP:
            self.before(process, unit[0])
        if fate or self.state is not State.UP or process in self.cut_off:
            # Whoever waits for an answer that never comes, a renewal say, does so until it gives up.
            until = self.loop.now + (ANSWER_TIMEOUT_S if fate.endswith("hangs") else 0.0)
            process.disturbed_at = max(process.disturbed_at, until)
        if self.weather.slow_s:
            self.disturbed_at = self.loop.now
        if self.state is State.DOWN or process in self.cut_off:
            self._answer(future, RedisConnectionError(REFUSED))
            return
        if fate.startswith("unsent"):
            if fate.endswith("breaks"):
                self._answer(future, RedisConnectionError(LOST))
            return
        if self.state is State.DEMOTED and not all(split(fields)[0] in READS for fields in unit):
            self._answer(future, ReadOnlyError("You can't write against a read only replica."))
            return
        if self.weather.is_full and any(needs_memory(fields) for fields in unit):
            self._answer(future, OutOfMemoryError("command not allowed when used memory > 'maxmemory'."))
            return
        self._tell(process, unit)
        hear = self.watch(self.server, process, unit[0]) if self.watch and len(unit) == 1 else None

        def answer(replies: list[Any]) -> None:
            if hear is not None:
                hear(replies)
            if not fate:
                self._answer(future, replies)
            elif fate.endswith("breaks"):
                self._answer(future, RedisConnectionError(LOST))

        deliver(self.server, unit, is_atomic, answer, lambda: future not in self._waiting)
        if process.springs("applied"):
            self.kill(process)

    def _answer(self, future: "asyncio.Future[Any]", outcome: Any) -> None:
        def arrive() -> None:
            if self._waiting.pop(future, None) is None or future.done():
                return
            if isinstance(outcome, Exception):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

        self._later(arrive)

    def _tell(self, process: Process, unit: Sequence[Fields]) -> None:
        for fields in unit:
            name, args = split(fields)
            self.tell(process.name, name.decode(), b" ".join(args))


def needs_memory(fields: Fields) -> bool:
    """Whether a full server refuses a command: it adds something, or is a script that does."""
    return split(fields)[0] in ADDING or (fields[0] == b"EVALSHA" and fields[1] in _adding_scripts())


@cache
def _adding_scripts() -> frozenset[bytes]:
    # Those two write before they add, which a full server takes.
    names = {file.name.removesuffix(".lua") for file in _SCRIPTS.iterdir()} - {"mark", "trim"}
    scripts = [_script(name) for name in names]
    calls = [f"'{command.decode()}'" for command in ADDING]
    return frozenset(sha.encode() for source, sha in scripts if any(call in source for call in calls))


def _of_the_file(unit: Sequence[Fields]) -> list[Any] | None:
    """Answers to what concerns only the append-only file, which is not simulated; None for the rest."""
    return [b"aof_enabled:0\r\n"] if unit[0] == [b"INFO", b"persistence"] else None


def _run_id(number: int) -> str:
    return f"{number:040x}"

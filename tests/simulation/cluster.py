"""The run's Redis as its clients see it: a server that restarts, fails over, is slow, or loses writes.

Guarantee: a reply is always that of a command which some server applied; only faults make a server forget
writes, and always a suffix of them.
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
from redis.exceptions import TimeoutError as RedisTimeoutError

from tests.simulation.clock import Clocks
from tests.simulation.loop import OWNER, SimulatedLoop
from tests.simulation.process import Process
from tests.simulation.redis.client import deliver
from tests.simulation.redis.keyspace import READS, split
from tests.simulation.redis.server import Fields, MemoryServer
from tidemill.common.redis.broker import _SCRIPTS, _script
from tidemill.common.redis.lines import ANSWER_TIMEOUT_S

LATENCY_S = 0.001
TICK_S = 1e-9
"""Time between two messages of one connection."""
NOTICED_S = 1.0
"""In an outage longer than this, every client that sends something has tried twice."""
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
    """State of the network to the server."""

    slow_s: float = 0.0
    lose_share: float = 0.0
    """Share of the commands that are never applied, or whose answer never comes."""
    fates: tuple[str, ...] = ("unsent", "unanswered")
    """What may happen to those."""
    hang_share: float = 0.0
    """Share of those in which the client does not even learn that the connection is gone."""
    is_full: bool = False
    """Redis has no memory: it refuses what would need some."""


@dataclass(eq=False)
class Line:
    """The connection that the non-blocking calls of a process share: they arrive in order, are answered in
    order, and are lost together, as in `common/redis/lines.py`."""

    calls: list["asyncio.Future[Any]"] = field(default_factory=list)
    """Calls without an answer."""
    arrives_at: float = 0.0
    answers_at: float = 0.0
    """When the last call arrives, and the last answer."""
    is_deaf: bool = False
    """Nothing arrives at the server any more."""
    is_silent: bool = False
    """No answer comes back any more."""
    is_lost: bool = False
    """Its process knows that it is gone."""


@dataclass
class Cluster:
    """`server` is the one that the address leads to."""

    loop: SimulatedLoop
    clocks: Clocks
    rng: random.Random
    kill: Callable[[Process], None]
    tell: Callable[[str, str, bytes], None]
    """Called for every command that is applied: process, words, and bytes that stand for it."""
    server: MemoryServer = field(init=False)
    state: State = State.UP
    weather: Weather = field(default_factory=Weather)
    cut_off: set[Process] = field(default_factory=set)
    """Processes that cannot reach the server now."""
    num_servers: int = 1
    shares_lines: bool = False
    """Whether calls of a process share a connection, or each has its own and may overtake others."""
    before: Callable[[Process, Fields], None] | None = None
    """Called for every command that arrives, before it is applied."""
    sending: Callable[[Process, Fields], None] | None = None
    """Called for every command that a process is about to send."""
    sends: Callable[[Process, Fields], None] | None = None
    """Called for every command that a process has decided to send; before `sending`, which may freeze it."""
    watch: Callable[[MemoryServer, Process, Fields], Callable[[list[Any]], None] | None] | None = None
    """Called for every command that is applied alone; what it returns is called with the replies."""
    outage_until: float = 0.0
    """When the server last came back after an outage that every client has noticed."""
    down_at: float = 0.0
    disturbed_at: float = 0.0
    """When the network to the server was last slow."""
    _waiting: dict["asyncio.Future[Any]", Process] = field(default_factory=dict)
    _lines: dict[Process, Line] = field(default_factory=dict)
    _connected: set[Process] = field(default_factory=set)
    _unaware: set[Process] = field(default_factory=set)
    """Processes that have lost their connection while no call was in flight: their next call fails, as in
    `common/redis/lines.py`."""

    def __post_init__(self) -> None:
        self.server = MemoryServer(self.clocks.server_ms, _run_id(1))
        self._context = contextvars.Context()

    def request(
        self, unit: Sequence[Fields], is_atomic: bool, is_blocking: bool = False
    ) -> "asyncio.Future[list[Any]]":
        """Send commands of the running process."""
        process = OWNER.get(self.loop.world)
        future = self.loop.create_future()
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
        if self.sends is not None:
            for fields in unit:
                self.sends(process, fields)
        if self.sending is not None:
            self.sending(process, unit[0])
        if process.is_frozen:  # by what has waited for this command: it is sent when the process goes on
            self.loop.call_soon(self._send, process, unit, is_atomic, is_blocking, future)
        else:
            self._send(process, unit, is_atomic, is_blocking, future)
        return future

    def _send(
        self,
        process: Process,
        unit: Sequence[Fields],
        is_atomic: bool,
        is_blocking: bool,
        future: "asyncio.Future[Any]",
    ) -> None:
        if future.done():  # cancelled while the process was frozen
            return
        if process in self._unaware and not is_blocking:
            self._unaware.discard(process)
            process.disturbed_at = self.loop.now
            future.set_exception(RedisConnectionError(LOST))
            return
        self._waiting[future] = process
        fate = self._fate()
        line = self._line_of(process) if self.shares_lines and not is_blocking else Line()
        line.calls.append(future)
        delay_s = self._delay_s()
        line.arrives_at = max(self.loop.now + delay_s, line.arrives_at + TICK_S)
        self._at(line.arrives_at, lambda: self._arrive(process, line, unit, is_atomic, future, fate))

    def _line_of(self, process: Process) -> Line:
        line = self._lines.get(process)
        if line is None or line.is_lost:
            line = Line()
            self._lines[process] = line
        return line

    def _lose(self, line: Line, error: Exception) -> None:
        """The connection is gone: all calls without an answer fail, whether applied or not."""
        line.is_lost = True
        for future in line.calls:
            self._answer(Line(), future, error)

    def go_down(self) -> None:
        """Every connection breaks."""
        self.state = State.DOWN
        self.down_at = self.loop.now
        self._break_connections()

    def demote(self) -> None:
        """The server is a replica from now on."""
        self.state = State.DEMOTED
        self.server.is_replica = True

    def come_up(self, num_units: int) -> None:
        """Another server takes over, with the first `num_units` writes of the old one."""
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
        for line in self._lines.values():
            line.is_lost = True
        self._unaware |= self._connected - set(self._waiting.values())
        self._connected.clear()
        for future, process in list(self._waiting.items()):
            process.disturbed_at = max(process.disturbed_at, self.loop.now)
            self._answer(Line(), future, RedisConnectionError(LOST))
        self.server.blocked.clear()

    def _fate(self) -> str:
        if self.weather.lose_share and self.rng.random() < self.weather.lose_share:
            how = "hangs" if self.rng.random() < self.weather.hang_share else "breaks"
            return f"{self.rng.choice(self.weather.fates)} {how}"
        return ""

    def _delay_s(self) -> float:
        delay_s = LATENCY_S * (0.1 + self.rng.random())
        if self.weather.slow_s:
            delay_s += self.weather.slow_s * self.rng.random()
        return delay_s

    def _at(self, moment: float, call: Callable[[], None]) -> None:
        self.loop.call_at(moment, call, context=self._context)

    def _arrive(
        self,
        process: Process,
        line: Line,
        unit: Sequence[Fields],
        is_atomic: bool,
        future: "asyncio.Future[Any]",
        fate: str,
    ) -> None:
        if self.before is not None and self.state is State.UP:
            for fields in unit if is_atomic else unit[:1]:
                self.before(process, fields)
        if fate or self.state is not State.UP or process in self.cut_off:
            # A call whose answer never comes, such as a renewal, waits until its timeout.
            until = self.loop.now + (ANSWER_TIMEOUT_S if fate.endswith("hangs") else 0.0)
            process.disturbed_at = max(process.disturbed_at, until)
        if self.weather.slow_s:
            self.disturbed_at = self.loop.now
        if self.state is State.DOWN or process in self.cut_off:
            self._lose(line, RedisConnectionError(REFUSED))
            return
        self._connected.add(process)
        if line.is_lost or line.is_deaf:
            return
        if fate.endswith("hangs"):
            line.is_silent = True
            if self.shares_lines:  # the first call that gets no answer in time gives the connection up
                self._at(until, lambda: self._lose(line, RedisTimeoutError("it does not answer")))
        if fate.startswith("unsent"):
            line.is_deaf = True
            if fate.endswith("breaks"):
                self._lose(line, RedisConnectionError(LOST))
            return
        if self.state is State.DEMOTED and not all(split(fields)[0] in READS for fields in unit):
            self._answer(line, future, ReadOnlyError("You can't write against a read only replica."))
            return
        if self.weather.is_full and any(needs_memory(fields) for fields in unit):
            error = OutOfMemoryError("command not allowed when used memory > 'maxmemory'.")
            self._answer(line, future, error)
            return
        self._tell(process, unit)
        hear = self.watch(self.server, process, unit[0]) if self.watch and len(unit) == 1 else None

        def answer(replies: list[Any]) -> None:
            if hear is not None:
                hear(replies)
            if fate.endswith("breaks"):
                self._lose(line, RedisConnectionError(LOST))
            elif not fate:
                self._answer(line, future, replies)

        deliver(self.server, unit, is_atomic, answer, lambda: future not in self._waiting)
        if process.springs("applied"):
            self.kill(process)

    def _answer(self, line: Line, future: "asyncio.Future[Any]", outcome: Any) -> None:
        def arrive() -> None:
            if line.is_silent or self._waiting.pop(future, None) is None or future.done():
                return
            if future in line.calls:
                line.calls.remove(future)
            if isinstance(outcome, Exception):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

        line.answers_at = max(self.loop.now + self._delay_s(), line.answers_at + TICK_S)
        self._at(line.answers_at, arrive)

    def _tell(self, process: Process, unit: Sequence[Fields]) -> None:
        for fields in unit:
            name, args = split(fields)
            self.tell(process.name, name.decode(), b" ".join(args))


def needs_memory(fields: Fields) -> bool:
    """Whether a full server refuses a command: it adds something, or is a script that does."""
    return split(fields)[0] in ADDING or (fields[0] == b"EVALSHA" and fields[1] in _adding_scripts())


@cache
def _adding_scripts() -> frozenset[bytes]:
    # These two write before they add, which a full server accepts.
    names = {file.name.removesuffix(".lua") for file in _SCRIPTS.iterdir()} - {"mark", "trim"}
    scripts = [_script(name) for name in names]
    calls = [f"'{command.decode()}'" for command in ADDING]

    def adds(source: str) -> bool:
        return any(call in source for call in calls)

    return frozenset(sha.encode() for source, sha in scripts if adds(source))


def _of_the_file(unit: Sequence[Fields]) -> list[Any] | None:
    """Answers to what concerns only the append-only file, which is not simulated; None for the rest."""
    return [b"aof_enabled:0\r\n"] if unit[0] == [b"INFO", b"persistence"] else None


def _run_id(number: int) -> str:
    return f"{number:040x}"

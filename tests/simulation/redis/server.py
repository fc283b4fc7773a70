"""One Redis server: it applies commands, keeps a log of its writes, and serves blocked readers.

Invariant: what is in the log, replayed on an empty keyspace, gives the keyspace bit by bit. So a restart can
lose any suffix of the writes, as an append-only file does; a transaction and a script are one write.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from redis.exceptions import NoScriptError, RedisError, ResponseError

from tests.simulation.redis import collections, group_commands  # noqa: F401 (register their commands)
from tests.simulation.redis.keyspace import READS, Keyspace, split
from tests.simulation.redis.scripts import Scripts

Fields = list[bytes]
Unit = tuple[int, Sequence[Fields]]
"""The server's time in milliseconds, and the commands that it applied together."""

SCRIPTS = Scripts()
_READ_BY_GROUP = b"XREADGROUP"


@dataclass(eq=False, slots=True)
class Blocked:
    """A reader that waits for entries."""

    fields: Fields
    keys: list[bytes]
    answer: Callable[[Any], None]
    is_gone: Callable[[], bool]


class MemoryServer:
    """`clock` gives milliseconds since 1970. Commands come as lists of bytes, and are applied one by one."""

    def __init__(self, clock: Callable[[], int], run_id: str = "0" * 40) -> None:
        self.clock = clock
        self.run_id = run_id
        self.log: list[Unit] = []
        self.blocked: list[Blocked] = []
        self.is_replica = False
        self.on_append: Callable[[bytes, tuple[int, int], Fields], None] | None = None
        self._known: set[bytes] = set()
        self._replayed_ms: int | None = None
        self.space = Keyspace(self._now_ms)

    def apply(self, unit: Sequence[Fields]) -> list[Any]:
        """Run commands with nothing in between; errors are values, as in a pipeline."""
        replies = [self._apply(fields) for fields in unit]
        # An unknown script did nothing; replayed, when it is known, it would.
        done = [f for f, reply in zip(unit, replies, strict=True) if not isinstance(reply, NoScriptError)]
        if any(self._is_write(fields) for fields in done):
            self.log.append((self.clock(), done))
            self._tell_appended()
        return replies

    def block(self, waiting: Blocked) -> None:
        """Keep a reader until its streams have something for it, or its group is gone."""
        self.blocked.append(waiting)

    def unblock(self, waiting: Blocked) -> bool:
        """Stop keeping a reader whose time is up; False where it has its answer."""
        if waiting in self.blocked:
            self.blocked.remove(waiting)
            return True
        return False

    def restored(self, num_units: int, run_id: str) -> "MemoryServer":
        """A new server with the first `num_units` writes of this one."""
        server = MemoryServer(self.clock, run_id)
        server.log = self.log[:num_units]
        for time_ms, unit in server.log:
            server._replayed_ms = time_ms
            for fields in unit:
                server._apply(fields)
        server._replayed_ms = None
        server.space.appended.clear()
        server._known.clear()  # a restart forgets the scripts
        server.on_append = self.on_append
        return server

    def _now_ms(self) -> int:
        return self.clock() if self._replayed_ms is None else self._replayed_ms

    def _apply(self, fields: Fields) -> Any:
        try:
            return self._run(fields)
        except RedisError as error:
            return error

    def _run(self, fields: Fields) -> Any:
        name, args = split(fields)
        if name == b"EVALSHA":
            if args[0] not in self._known and self._replayed_ms is None:
                raise NoScriptError("No matching script. Please use EVAL.")
            return self._script(args[0], args)
        if name == b"EVAL":
            return self._script(SCRIPTS.compile(args[0]), args)
        if name == b"SCRIPT LOAD":
            sha = SCRIPTS.compile(args[0])
            self._known.add(sha)
            return sha
        if name == b"SCRIPT FLUSH":
            self._known.clear()
            return b"OK"
        if name == b"SCRIPT EXISTS":
            return [int(sha in self._known) for sha in args]
        if name == b"INFO":
            return self._info()
        return self.space.call(fields)

    def _script(self, sha: bytes, args: Fields) -> Any:
        num_keys = int(args[1])
        return SCRIPTS.run(self.space, sha, args[2 : 2 + num_keys], args[2 + num_keys :])

    def _is_write(self, fields: Fields) -> bool:
        name, _ = split(fields)
        return name not in READS and not name.startswith(b"SCRIPT")

    def _tell_appended(self) -> None:
        """Report new entries, and answer readers that wait for them in the order in which they came."""
        if not self.space.appended and self.space.values:
            return
        appended = self.space.appended
        self.space.appended = []
        for key, entry_id, fields in appended:
            if self.on_append is not None:
                self.on_append(key, entry_id, fields)
        touched = {key for key, _, _ in appended}
        # Readers of an emptied server get the error that their groups are gone.
        ready = [
            waiting
            for waiting in self.blocked
            if not self.space.values or not touched.isdisjoint(waiting.keys)
        ]
        for waiting in ready:
            if waiting.is_gone():
                self.blocked.remove(waiting)
                continue
            reply = self._apply(waiting.fields)
            if reply is None:
                continue
            self.blocked.remove(waiting)
            if not isinstance(reply, Exception) and waiting.fields[0] == _READ_BY_GROUP:
                self.log.append((self.clock(), [waiting.fields]))
            waiting.answer(reply)

    def _info(self) -> bytes:
        facts = {
            "redis_version": "7.0.15",
            "redis_mode": "standalone",
            "run_id": self.run_id,
            "role": "slave" if self.is_replica else "master",
            "master_host": "elsewhere",
            "master_port": "6379",
            "used_memory": "1000000",
            "used_memory_rss": "1000000",
            "mem_not_counted_for_evict": "0",
            "maxmemory": self.space.settings[b"maxmemory"].decode(),
            "maxmemory_policy": self.space.settings[b"maxmemory-policy"].decode(),
            "aof_enabled": "1",
            "aof_last_write_status": "ok",
            "evicted_keys": "0",
            "connected_clients": "1",
            "loading": "0",
        }
        return "".join(f"{name}:{value}\r\n" for name, value in facts.items()).encode()


def without_block(fields: Fields) -> tuple[Fields, float | None]:
    """A command without its BLOCK, and the seconds that it may block; None where it does not."""
    upper = [item.upper() for item in fields[:8]]
    if fields[0].upper() not in (b"XREAD", _READ_BY_GROUP) or b"BLOCK" not in upper:
        return fields, None
    index = upper.index(b"BLOCK")
    return fields[:index] + fields[index + 2 :], int(fields[index + 1]) / 1000


def stream_keys(fields: Fields) -> list[bytes]:
    """The streams that a read names."""
    upper = [item.upper() for item in fields]
    words = fields[upper.index(b"STREAMS") + 1 :]
    return words[: len(words) // 2]


__all__ = ["Blocked", "Fields", "MemoryServer", "ResponseError", "stream_keys", "without_block"]

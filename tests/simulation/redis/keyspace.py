"""Keys and their values: strings, hashes, sets, sorted sets; streams stand in a file of their own.

Replies are what a client that speaks RESP2 and converts nothing gets: bytes, numbers, None, lists.
"""

import fnmatch
from collections.abc import Callable
from typing import Any

from redis.exceptions import ResponseError

Arguments = list[bytes]
Command = Callable[["Keyspace", Arguments], Any]

COMMANDS: dict[bytes, Command] = {}
"""By upper-case name; of commands with subcommands, both words."""
CONTAINERS = {b"XGROUP", b"XINFO", b"MEMORY", b"CONFIG", b"SCRIPT", b"FUNCTION", b"CLIENT", b"ACL"}
READS = set(
    (
        b"GET MGET EXISTS TYPE KEYS DBSIZE PING TIME INFO TTL PTTL SCAN CONFIG_GET MEMORY_USAGE "
        b"HGET HGETALL HMGET HEXISTS HLEN HKEYS HVALS SMEMBERS SISMEMBER SCARD "
        b"ZCARD ZSCORE ZRANGE ZRANGEBYSCORE ZCOUNT LLEN LRANGE "
        b"XLEN XRANGE XREVRANGE XREAD XPENDING XINFO_STREAM XINFO_GROUPS XINFO_CONSUMERS"
    ).split()
)
READS |= {name.replace(b"_", b" ") for name in READS}
"""Commands that change nothing: they do not enter the log of writes, and a replica answers them."""


class SortedSet(dict[bytes, float]):
    """Members and their scores."""

    def in_order(self) -> list[tuple[bytes, float]]:
        return sorted(self.items(), key=lambda item: (item[1], item[0]))


class Keyspace:
    """All keys of one server. `now_ms` is the server's clock."""

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self.now_ms = now_ms
        self.values: dict[bytes, Any] = {}
        self.expires: dict[bytes, int] = {}
        self.appended: list[tuple[bytes, tuple[int, int], list[bytes]]] = []
        """Entries that were appended to streams since the server last took them."""
        self.settings: dict[bytes, bytes] = {b"maxmemory-policy": b"noeviction", b"maxmemory": b"0"}

    def call(self, fields: list[bytes]) -> Any:
        """Run one command.

        Raises:
            ResponseError: as the server would answer.
        """
        name, arguments = split(fields)
        command = COMMANDS.get(name)
        if command is None:
            raise ResponseError(
                f"unknown command '{name.decode(errors='replace')}', with args beginning with: "
            )
        return command(self, arguments)

    def get(self, key: bytes, kind: type, make: bool = False) -> Any:
        """The value of a key, None where there is none (or a new one, with `make`)."""
        self._expire(key)
        value = self.values.get(key)
        if value is None:
            if not make:
                return None
            value = kind()
            self.values[key] = value
        if type(value) is not kind:
            raise ResponseError("WRONGTYPE Operation against a key holding the wrong kind of value")
        return value

    def drop_if_empty(self, key: bytes) -> None:
        """Redis has no empty hashes, sets and lists."""
        if not self.values.get(key, True):
            self.remove(key)

    def remove(self, key: bytes) -> bool:
        self._expire(key)
        self.expires.pop(key, None)
        return self.values.pop(key, None) is not None

    def _expire(self, key: bytes) -> None:
        if self.expires and self.expires.get(key, 1 << 62) <= self.now_ms():
            del self.expires[key]
            self.values.pop(key, None)


def split(fields: list[bytes]) -> tuple[bytes, Arguments]:
    """A command's name, with its subcommand, and its arguments."""
    name = fields[0].upper()
    if name in CONTAINERS and len(fields) > 1:
        return name + b" " + fields[1].upper(), fields[2:]
    return name, fields[1:]


def command(name: str) -> Callable[[Command], Command]:
    """Register a function as a command."""

    def register(function: Command) -> Command:
        COMMANDS[name.encode()] = function
        return function

    return register


def number(text: bytes) -> int:
    try:
        return int(text)
    except ValueError:
        raise ResponseError("value is not an integer or out of range") from None


def shown(value: float) -> bytes:
    """A double as RESP2 has it."""
    return b"%d" % value if value == int(value) else repr(value).encode()


@command("PING")
def _ping(space: Keyspace, args: Arguments) -> Any:
    return b"PONG"


@command("TIME")
def _time(space: Keyspace, args: Arguments) -> Any:
    now = space.now_ms()
    return [b"%d" % (now // 1000), b"%d" % (now % 1000 * 1000)]


@command("GET")
def _get(space: Keyspace, args: Arguments) -> Any:
    return space.get(args[0], bytes)


@command("MGET")
def _mget(space: Keyspace, args: Arguments) -> Any:
    return [space.get(key, bytes) for key in args]


@command("SET")
def _set(space: Keyspace, args: Arguments) -> Any:
    key = args[0]
    value = args[1]
    options = [item.upper() for item in args[2:]]
    space._expire(key)
    if (b"NX" in options and key in space.values) or (b"XX" in options and key not in space.values):
        return None
    space.values[key] = bytes(value)
    space.expires.pop(key, None)
    for name, factor in ((b"EX", 1000), (b"PX", 1)):
        if name in options:
            space.expires[key] = space.now_ms() + factor * number(options[options.index(name) + 1])
    return b"OK"


@command("DEL")
@command("UNLINK")
def _del(space: Keyspace, args: Arguments) -> Any:
    return sum(space.remove(key) for key in args)


@command("EXISTS")
def _exists(space: Keyspace, args: Arguments) -> Any:
    for key in args:
        space._expire(key)
    return sum(key in space.values for key in args)


@command("EXPIRE")
def _expire(space: Keyspace, args: Arguments) -> Any:
    return _pexpire(space, [args[0], b"%d" % (1000 * number(args[1]))])


@command("PEXPIRE")
def _pexpire(space: Keyspace, args: Arguments) -> Any:
    space._expire(args[0])
    if args[0] not in space.values:
        return 0
    space.expires[args[0]] = space.now_ms() + number(args[1])
    return 1


@command("KEYS")
def _keys(space: Keyspace, args: Arguments) -> Any:
    pattern = args[0].decode()
    return [key for key in space.values if fnmatch.fnmatchcase(key.decode(), pattern)]


@command("FLUSHALL")
@command("FLUSHDB")
def _flushall(space: Keyspace, args: Arguments) -> Any:
    space.values.clear()
    space.expires.clear()
    return b"OK"


@command("CONFIG SET")
def _config_set(space: Keyspace, args: Arguments) -> Any:
    space.settings.update(zip(args[::2], args[1::2], strict=True))
    return b"OK"


@command("CONFIG GET")
def _config_get(space: Keyspace, args: Arguments) -> Any:
    settings = {key: value for key, value in space.settings.items() if fnmatch.fnmatchcase(key, args[0])}
    return [word for pair in settings.items() for word in pair]


@command("MEMORY USAGE")
def _memory_usage(space: Keyspace, args: Arguments) -> Any:
    value = space.values.get(args[0])
    if value is None:
        return None
    return getattr(value, "num_bytes", 0) + 100 + len(args[0])

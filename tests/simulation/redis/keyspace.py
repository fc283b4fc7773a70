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
    """All keys of one server. `now_ms` is the server's clock, `append` hears of every entry of a stream."""

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self.now_ms = now_ms
        self.values: dict[bytes, Any] = {}
        self.expires: dict[bytes, int] = {}
        self.appended: list[tuple[bytes, tuple[int, int], list[bytes]]] = []
        """Entries since somebody last emptied this."""
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
            value = self.values[key] = kind()
        if type(value) is not kind:
            raise ResponseError("WRONGTYPE Operation against a key holding the wrong kind of value")
        return value

    def drop_if_empty(self, key: bytes) -> None:
        """Redis knows no empty hashes, sets and lists."""
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
    key, value, options = args[0], args[1], [item.upper() for item in args[2:]]
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
    found = {key: value for key, value in space.settings.items() if fnmatch.fnmatchcase(key, args[0])}
    return [part for pair in found.items() for part in pair]


@command("MEMORY USAGE")
def _memory_usage(space: Keyspace, args: Arguments) -> Any:
    value = space.values.get(args[0])
    if value is None:
        return None
    return getattr(value, "num_bytes", 0) + 100 + len(args[0])


@command("HSET")
def _hset(space: Keyspace, args: Arguments) -> Any:
    found = space.get(args[0], dict, make=True)
    before = len(found)
    found.update(zip(args[1::2], args[2::2], strict=True))
    return len(found) - before


@command("HSETNX")
def _hsetnx(space: Keyspace, args: Arguments) -> Any:
    found = space.get(args[0], dict, make=True)
    if args[1] in found:
        return 0
    found[args[1]] = args[2]
    return 1


@command("HGET")
def _hget(space: Keyspace, args: Arguments) -> Any:
    return (space.get(args[0], dict) or {}).get(args[1])


@command("HMGET")
def _hmget(space: Keyspace, args: Arguments) -> Any:
    found = space.get(args[0], dict) or {}
    return [found.get(name) for name in args[1:]]


@command("HGETALL")
def _hgetall(space: Keyspace, args: Arguments) -> Any:
    return [part for pair in (space.get(args[0], dict) or {}).items() for part in pair]


@command("HKEYS")
def _hkeys(space: Keyspace, args: Arguments) -> Any:
    return list(space.get(args[0], dict) or {})


@command("HVALS")
def _hvals(space: Keyspace, args: Arguments) -> Any:
    return list((space.get(args[0], dict) or {}).values())


@command("HEXISTS")
def _hexists(space: Keyspace, args: Arguments) -> Any:
    return int(args[1] in (space.get(args[0], dict) or {}))


@command("HLEN")
def _hlen(space: Keyspace, args: Arguments) -> Any:
    return len(space.get(args[0], dict) or {})


@command("HDEL")
def _hdel(space: Keyspace, args: Arguments) -> Any:
    found = space.get(args[0], dict)
    if found is None:
        return 0
    count = sum(found.pop(name, None) is not None for name in args[1:])
    space.drop_if_empty(args[0])
    return count


@command("HINCRBY")
def _hincrby(space: Keyspace, args: Arguments) -> Any:
    found = space.get(args[0], dict, make=True)
    value = number(found.get(args[1], b"0")) + number(args[2])
    found[args[1]] = b"%d" % value
    return value


@command("HINCRBYFLOAT")
def _hincrbyfloat(space: Keyspace, args: Arguments) -> Any:
    found = space.get(args[0], dict, make=True)
    found[args[1]] = shown(float(found.get(args[1], b"0")) + float(args[2]))
    return found[args[1]]


@command("SADD")
def _sadd(space: Keyspace, args: Arguments) -> Any:
    found = space.get(args[0], set, make=True)
    before = len(found)
    found.update(args[1:])
    return len(found) - before


@command("SREM")
def _srem(space: Keyspace, args: Arguments) -> Any:
    found = space.get(args[0], set) or set()
    before = len(found)
    found.difference_update(args[1:])
    count = before - len(found)
    space.drop_if_empty(args[0])
    return count


@command("SMEMBERS")
def _smembers(space: Keyspace, args: Arguments) -> Any:
    return sorted(space.get(args[0], set) or ())


@command("ZADD")
def _zadd(space: Keyspace, args: Arguments) -> Any:
    key, rest, flags = args[0], args[1:], set[bytes]()
    while rest and rest[0].upper() in (b"NX", b"XX", b"GT", b"LT", b"CH"):
        flags.add(rest.pop(0).upper())
    found = space.get(key, SortedSet, make=True)
    added = changed = 0
    for score_text, member in zip(rest[::2], rest[1::2], strict=True):
        score, before = float(score_text), found.get(member)
        if (before is None and b"XX" in flags) or (before is not None and b"NX" in flags):
            continue
        if before is not None and (
            (b"GT" in flags and score <= before) or (b"LT" in flags and score >= before)
        ):
            continue
        added += before is None
        changed += before != score
        found[member] = score
    space.drop_if_empty(key)
    return changed if b"CH" in flags else added


@command("ZREM")
def _zrem(space: Keyspace, args: Arguments) -> Any:
    found = space.get(args[0], SortedSet) or SortedSet()
    count = sum(found.pop(member, None) is not None for member in args[1:])
    space.drop_if_empty(args[0])
    return count


@command("ZCARD")
def _zcard(space: Keyspace, args: Arguments) -> Any:
    return len(space.get(args[0], SortedSet) or ())


@command("ZSCORE")
def _zscore(space: Keyspace, args: Arguments) -> Any:
    score = (space.get(args[0], SortedSet) or {}).get(args[1])
    return None if score is None else shown(score)


@command("ZRANGE")
def _zrange(space: Keyspace, args: Arguments) -> Any:
    found = (space.get(args[0], SortedSet) or SortedSet()).in_order()
    last = number(args[2])
    part = found[number(args[1]) : last + 1 if last != -1 else None]
    if args[3:] and args[3].upper() == b"WITHSCORES":
        return [item for member, score in part for item in (member, shown(score))]
    return [member for member, _ in part]


@command("ZRANGEBYSCORE")
def _zrangebyscore(space: Keyspace, args: Arguments) -> Any:
    found = (space.get(args[0], SortedSet) or SortedSet()).in_order()
    is_in = _between(args[1], args[2])
    if args[3:] and args[3].upper() == b"WITHSCORES":
        return [item for member, score in found if is_in(score) for item in (member, shown(score))]
    return [member for member, score in found if is_in(score)]


@command("ZREMRANGEBYSCORE")
def _zremrangebyscore(space: Keyspace, args: Arguments) -> Any:
    found = space.get(args[0], SortedSet) or SortedSet()
    is_in = _between(args[1], args[2])
    gone = [member for member, score in found.items() if is_in(score)]
    for member in gone:
        del found[member]
    space.drop_if_empty(args[0])
    return len(gone)


@command("ZPOPMIN")
def _zpopmin(space: Keyspace, args: Arguments) -> Any:
    found = space.get(args[0], SortedSet)
    if not found:
        return []
    member, score = found.in_order()[0]
    del found[member]
    space.drop_if_empty(args[0])
    return [member, shown(score)]


def _between(low: bytes, high: bytes) -> Callable[[float], bool]:
    least, most = float(low.lstrip(b"(")), float(high.lstrip(b"("))
    return lambda score: (
        (score > least if low.startswith(b"(") else score >= least)
        and (score < most if high.startswith(b"(") else score <= most)
    )

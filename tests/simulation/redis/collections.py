"""The commands on hashes, sets and sorted sets."""

from collections.abc import Callable
from typing import Any

from tests.simulation.redis.keyspace import Arguments, Keyspace, SortedSet, command, number, shown


@command("HSET")
def _hset(space: Keyspace, args: Arguments) -> Any:
    fields = space.get(args[0], dict, make=True)
    before = len(fields)
    fields.update(zip(args[1::2], args[2::2], strict=True))
    return len(fields) - before


@command("HSETNX")
def _hsetnx(space: Keyspace, args: Arguments) -> Any:
    fields = space.get(args[0], dict, make=True)
    if args[1] in fields:
        return 0
    fields[args[1]] = args[2]
    return 1


@command("HGET")
def _hget(space: Keyspace, args: Arguments) -> Any:
    return (space.get(args[0], dict) or {}).get(args[1])


@command("HMGET")
def _hmget(space: Keyspace, args: Arguments) -> Any:
    fields = space.get(args[0], dict) or {}
    return [fields.get(name) for name in args[1:]]


@command("HGETALL")
def _hgetall(space: Keyspace, args: Arguments) -> Any:
    return [word for pair in (space.get(args[0], dict) or {}).items() for word in pair]


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
    fields = space.get(args[0], dict)
    if fields is None:
        return 0
    count = sum(fields.pop(name, None) is not None for name in args[1:])
    space.drop_if_empty(args[0])
    return count


@command("HINCRBY")
def _hincrby(space: Keyspace, args: Arguments) -> Any:
    fields = space.get(args[0], dict, make=True)
    value = number(fields.get(args[1], b"0")) + number(args[2])
    fields[args[1]] = b"%d" % value
    return value


@command("HINCRBYFLOAT")
def _hincrbyfloat(space: Keyspace, args: Arguments) -> Any:
    fields = space.get(args[0], dict, make=True)
    fields[args[1]] = shown(float(fields.get(args[1], b"0")) + float(args[2]))
    return fields[args[1]]


@command("SADD")
def _sadd(space: Keyspace, args: Arguments) -> Any:
    members = space.get(args[0], set, make=True)
    before = len(members)
    members.update(args[1:])
    return len(members) - before


@command("SREM")
def _srem(space: Keyspace, args: Arguments) -> Any:
    members = space.get(args[0], set) or set()
    before = len(members)
    members.difference_update(args[1:])
    count = before - len(members)
    space.drop_if_empty(args[0])
    return count


@command("SMEMBERS")
def _smembers(space: Keyspace, args: Arguments) -> Any:
    return sorted(space.get(args[0], set) or ())


@command("ZADD")
def _zadd(space: Keyspace, args: Arguments) -> Any:
    key = args[0]
    words = args[1:]
    flags = set[bytes]()
    while words and words[0].upper() in (b"NX", b"XX", b"GT", b"LT", b"CH"):
        flags.add(words.pop(0).upper())
    scores = space.get(key, SortedSet, make=True)
    added = 0
    changed = 0
    for score_text, member in zip(words[::2], words[1::2], strict=True):
        score = float(score_text)
        before = scores.get(member)
        if (before is None and b"XX" in flags) or (before is not None and b"NX" in flags):
            continue
        if before is not None and (
            (b"GT" in flags and score <= before) or (b"LT" in flags and score >= before)
        ):
            continue
        added += before is None
        changed += before != score
        scores[member] = score
    space.drop_if_empty(key)
    return changed if b"CH" in flags else added


@command("ZREM")
def _zrem(space: Keyspace, args: Arguments) -> Any:
    scores = space.get(args[0], SortedSet) or SortedSet()
    count = sum(scores.pop(member, None) is not None for member in args[1:])
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
    in_order = (space.get(args[0], SortedSet) or SortedSet()).in_order()
    last = number(args[2])
    chosen = in_order[number(args[1]) : last + 1 if last != -1 else None]
    if args[3:] and args[3].upper() == b"WITHSCORES":
        return [item for member, score in chosen for item in (member, shown(score))]
    return [member for member, _ in chosen]


@command("ZRANGEBYSCORE")
def _zrangebyscore(space: Keyspace, args: Arguments) -> Any:
    in_order = (space.get(args[0], SortedSet) or SortedSet()).in_order()
    is_in = _between(args[1], args[2])
    if args[3:] and args[3].upper() == b"WITHSCORES":
        return [item for member, score in in_order if is_in(score) for item in (member, shown(score))]
    return [member for member, score in in_order if is_in(score)]


@command("ZREMRANGEBYSCORE")
def _zremrangebyscore(space: Keyspace, args: Arguments) -> Any:
    scores = space.get(args[0], SortedSet) or SortedSet()
    is_in = _between(args[1], args[2])
    gone = [member for member, score in scores.items() if is_in(score)]
    for member in gone:
        del scores[member]
    space.drop_if_empty(args[0])
    return len(gone)


@command("ZPOPMIN")
def _zpopmin(space: Keyspace, args: Arguments) -> Any:
    scores = space.get(args[0], SortedSet)
    if not scores:
        return []
    member, score = scores.in_order()[0]
    del scores[member]
    space.drop_if_empty(args[0])
    return [member, shown(score)]


def _between(low: bytes, high: bytes) -> Callable[[float], bool]:
    least = float(low.lstrip(b"("))
    most = float(high.lstrip(b"("))
    return lambda score: (
        (score > least if low.startswith(b"(") else score >= least)
        and (score < most if high.startswith(b"(") else score <= most)
    )

"""The commands on streams as logs, with the errors and replies of Redis 7.0."""

from typing import Any

from redis.exceptions import ResponseError

from tests.simulation.redis.keyspace import Arguments, Keyspace, command, number
from tests.simulation.redis.stream import FIRST, EntryId, Stream, first_of, last_of, parse_id, text_of


def option(args: Arguments, name: bytes) -> bytes | None:
    upper = [item.upper() for item in args]
    return args[upper.index(name) + 1] if name in upper else None


@command("XADD")
def _xadd(space: Keyspace, args: Arguments) -> Any:
    key = args[0]
    wanted = args[1]
    fields = args[2:]
    if not fields or len(fields) % 2:
        raise ResponseError("wrong number of arguments for 'xadd' command")
    stream = space.get(key, Stream) or Stream()
    entry_id = _next_id(space, stream, wanted)
    space.values[key] = stream
    stream.add(entry_id, list(fields))
    space.appended.append((key, entry_id, stream.entries[entry_id]))
    return text_of(entry_id)


def _next_id(space: Keyspace, stream: Stream, wanted: bytes) -> EntryId:
    last_ms, last_seq = stream.last_id
    if wanted == b"*":
        now = space.now_ms()
        return (now, 0) if now > last_ms else (last_ms, last_seq + 1)
    if wanted.endswith(b"-*"):
        ms = parse_id(wanted[:-2])[0]
        entry_id = (ms, last_seq + 1) if ms == last_ms else (ms, 0)
    else:
        entry_id = parse_id(wanted)
    if entry_id == FIRST:
        raise ResponseError("The ID specified in XADD must be greater than 0-0")
    if entry_id <= stream.last_id:
        raise ResponseError("The ID specified in XADD is equal or smaller than the target stream top item")
    return entry_id


@command("XLEN")
def _xlen(space: Keyspace, args: Arguments) -> Any:
    stream = space.get(args[0], Stream)
    return len(stream.ids) if stream else 0


@command("XRANGE")
def _xrange(space: Keyspace, args: Arguments) -> Any:
    stream = space.get(args[0], Stream)
    first = first_of(args[1])
    last = last_of(args[2])
    if stream is None:
        return []
    start, end = stream.between(first, last)
    count = option(args[3:], b"COUNT")
    if count is not None:
        end = min(end, start + number(count))
    return [stream.shown(entry_id) for entry_id in stream.ids[start:end]]


@command("XREVRANGE")
def _xrevrange(space: Keyspace, args: Arguments) -> Any:
    stream = space.get(args[0], Stream)
    last = last_of(args[1])
    first = first_of(args[2])
    if stream is None:
        return []
    start, end = stream.between(first, last)
    count = option(args[3:], b"COUNT")
    if count is not None:
        start = max(start, end - number(count))
    return [stream.shown(entry_id) for entry_id in reversed(stream.ids[start:end])]


@command("XDEL")
def _xdel(space: Keyspace, args: Arguments) -> Any:
    stream = space.get(args[0], Stream)
    if stream is None:
        return 0
    gone = [entry_id for entry_id in map(parse_id, args[1:]) if stream.remove(entry_id)]
    stream.max_deleted = max([stream.max_deleted, *gone])
    return len(gone)


@command("XTRIM")
def _xtrim(space: Keyspace, args: Arguments) -> Any:
    stream = space.get(args[0], Stream)
    if args[1].upper() != b"MINID":
        raise ResponseError("syntax error")
    return stream.trim_before(parse_id(args[-1])) if stream else 0


@command("XSETID")
def _xsetid(space: Keyspace, args: Arguments) -> Any:
    stream = space.get(args[0], Stream)
    entry_id = parse_id(args[1])
    if stream is None:
        raise ResponseError("no such key")
    if stream.ids and entry_id < stream.ids[-1]:
        raise ResponseError("The ID specified in XSETID is smaller than the target stream top item")
    stream.last_id = entry_id
    return b"OK"


@command("XREAD")
def _xread(space: Keyspace, args: Arguments) -> Any:
    keys, positions = streams_of(args)
    count = option(args[: -2 * len(keys)], b"COUNT")
    answer = []
    for key, position in zip(keys, positions, strict=True):
        stream = space.get(key, Stream)
        if stream is None or position == b"$":
            continue
        entries = [
            stream.shown(i) for i in stream.after(parse_id(position), number(count) if count else None)
        ]
        if entries:
            answer.append([key, entries])
    return answer or None


def streams_of(args: Arguments) -> tuple[Arguments, Arguments]:
    upper = [item.upper() for item in args]
    if b"STREAMS" not in upper:
        raise ResponseError("syntax error")
    words = args[upper.index(b"STREAMS") + 1 :]
    if not words or len(words) % 2:
        raise ResponseError(
            "Unbalanced XREAD list of streams: for each stream key an ID or '$' must be specified."
        )
    return words[: len(words) // 2], words[len(words) // 2 :]


@command("XINFO STREAM")
def _xinfo_stream(space: Keyspace, args: Arguments) -> Any:
    stream = existing(space, args[0])
    first = stream.shown(stream.ids[0]) if stream.ids else None
    last = stream.shown(stream.ids[-1]) if stream.ids else None
    facts = {
        b"length": len(stream.ids),
        b"radix-tree-keys": 1,
        b"radix-tree-nodes": 2,
        b"last-generated-id": text_of(stream.last_id),
        b"max-deleted-entry-id": text_of(stream.max_deleted),
        b"entries-added": stream.num_added,
        b"recorded-first-entry-id": text_of(stream.ids[0] if stream.ids else FIRST),
        b"groups": len(stream.groups),
        b"first-entry": first,
        b"last-entry": last,
    }
    return [word for pair in facts.items() for word in pair]


def existing(space: Keyspace, key: bytes) -> Stream:
    stream: Stream | None = space.get(key, Stream)
    if stream is None:
        raise ResponseError("no such key")
    return stream

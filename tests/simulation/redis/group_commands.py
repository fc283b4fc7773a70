"""The commands on consumer groups, with the errors and replies of Redis 7.0."""

from typing import Any

from redis.exceptions import ResponseError

from tests.simulation.redis.keyspace import Arguments, Keyspace, command, number
from tests.simulation.redis.stream import (
    FIRST,
    EntryId,
    Group,
    Pending,
    Stream,
    first_of,
    last_of,
    parse_id,
    text_of,
)
from tests.simulation.redis.stream_commands import existing, option, streams_of

NEEDS_KEY = (
    "The XGROUP subcommand requires the key to exist. Note that for CREATE you may want to use the MKSTREAM "
    "option to create an empty stream automatically."
)


def _group(space: Keyspace, key: bytes, name: bytes, suffix: str = "") -> tuple[Stream, Group]:
    stream = space.get(key, Stream)
    group = stream.groups.get(name) if stream else None
    if group is None:
        raise ResponseError(
            f"NOGROUP No such key '{key.decode()}' or consumer group '{name.decode()}'{suffix}"
        )
    return stream, group


@command("XREADGROUP")
def _xreadgroup(space: Keyspace, args: Arguments) -> Any:
    _, group_name, consumer, *options = args
    keys, positions = streams_of(options)
    count = option(options[: -2 * len(keys)], b"COUNT")
    limit = number(count) if count else None
    now = space.now_ms()
    answer = []
    for key, position in zip(keys, positions, strict=True):
        stream, group = _group(space, key, group_name, " in XREADGROUP with GROUP option")
        group.consumers[consumer] = now
        if position != b">":
            answer.append([key, _history(stream, group, consumer, parse_id(position), limit, now)])
            continue
        entries = []
        for entry_id in stream.after(group.last_delivered, limit):
            group.pending[entry_id] = Pending(consumer, now, 1)
            group.last_delivered = entry_id
            entries.append(stream.shown(entry_id))
        if group.entries_read is not None:
            group.entries_read += len(entries)
        if entries:
            answer.append([key, entries])
    return answer or None


def _history(
    stream: Stream, group: Group, consumer: bytes, after: EntryId, limit: int | None, now: int
) -> list[Any]:
    """What the consumer holds already; it counts as delivered once more."""
    ids = [i for i in group.held() if i > after and group.pending[i].consumer == consumer][:limit]
    for held in (group.pending[i] for i in ids if i in stream.entries):
        held.delivered_ms = now
        held.num_deliveries = held.num_deliveries + 1
    return [stream.shown(i) if i in stream.entries else [text_of(i), None] for i in ids]


@command("XACK")
def _xack(space: Keyspace, args: Arguments) -> Any:
    stream = space.get(args[0], Stream)
    group = stream.groups.get(args[1]) if stream else None
    if group is None:
        return 0
    return sum(group.pending.pop(parse_id(text), None) is not None for text in args[2:])


@command("XPENDING")
def _xpending(space: Keyspace, args: Arguments) -> Any:
    _, group = _group(space, args[0], args[1])
    if len(args) == 2:
        return _summary(group)
    options = args[2:]
    least_idle = 0
    if options[0].upper() == b"IDLE":
        least_idle = number(options[1])
        options = options[2:]
    first = first_of(options[0])
    last = last_of(options[1])
    count = number(options[2])
    only = options[3] if len(options) > 3 else None
    now = space.now_ms()
    rows = list[Any]()
    if first == last:  # the common question, about one entry
        ids = [first] if first in group.pending else []
    else:
        ids = [entry_id for entry_id in group.held() if first <= entry_id <= last]
    for entry_id in ids:
        held = group.pending[entry_id]
        idle = max(0, now - held.delivered_ms)
        if (only is None or held.consumer == only) and idle >= least_idle:
            rows.append([text_of(entry_id), held.consumer, idle, held.num_deliveries])
            if len(rows) == count:
                break
    return rows


def _summary(group: Group) -> list[Any]:
    ids = group.held()
    if not ids:
        return [0, None, None, None]
    counts: dict[bytes, int] = {}
    for held in group.pending.values():
        counts[held.consumer] = counts.get(held.consumer, 0) + 1
    return [
        len(ids),
        text_of(ids[0]),
        text_of(ids[-1]),
        [[name, b"%d" % n] for name, n in sorted(counts.items())],
    ]


@command("XCLAIM")
def _xclaim(space: Keyspace, args: Arguments) -> Any:
    stream, group = _group(space, args[0], args[1])
    consumer = args[2]
    least_idle = number(args[3])
    ids = list[EntryId]()
    index = 4
    while index < len(args) and args[index][:1].isdigit():
        ids.append(parse_id(args[index]))
        index += 1
    options = args[index:]
    flags = {item.upper() for item in options}
    now = space.now_ms()
    idle = option(options, b"IDLE")
    retries = option(options, b"RETRYCOUNT")
    delivered = now - number(idle) if idle else now
    group.consumers[consumer] = now
    claimed = []
    for entry_id in ids:
        if entry_id not in stream.entries:
            group.pending.pop(entry_id, None)
            continue
        held = group.pending.get(entry_id)
        if held is None:
            if b"FORCE" not in flags:
                continue
            held = Pending(consumer, now, 1)
            group.pending[entry_id] = held
        elif least_idle and now - held.delivered_ms < least_idle:
            continue
        held.consumer = consumer
        held.delivered_ms = delivered
        if retries is not None:
            held.num_deliveries = number(retries)
        elif b"JUSTID" not in flags:
            held.num_deliveries += 1
        claimed.append(entry_id)
    return [text_of(i) if b"JUSTID" in flags else stream.shown(i) for i in claimed]


@command("XGROUP CREATE")
def _xgroup_create(space: Keyspace, args: Arguments) -> Any:
    key, name, position = args[:3]
    stream = space.get(key, Stream)
    if stream is None:
        if not any(item.upper() == b"MKSTREAM" for item in args[3:]):
            raise ResponseError(NEEDS_KEY)
        stream = space.get(key, Stream, make=True)
    if name in stream.groups:
        raise ResponseError("BUSYGROUP Consumer Group name already exists")
    entry_id = stream.last_id if position == b"$" else parse_id(position)
    stream.groups[name] = Group(entry_id, 0 if entry_id == FIRST else None)
    return b"OK"


def _named_group(space: Keyspace, args: Arguments) -> tuple[Stream, Group]:
    stream = space.get(args[0], Stream)
    if stream is None:
        raise ResponseError(NEEDS_KEY)
    if args[1] not in stream.groups:
        raise ResponseError(
            f"NOGROUP No such consumer group '{args[1].decode()}' for key name '{args[0].decode()}'"
        )
    return stream, stream.groups[args[1]]


@command("XGROUP SETID")
def _xgroup_setid(space: Keyspace, args: Arguments) -> Any:
    stream, group = _named_group(space, args)
    group.last_delivered = stream.last_id if args[2] == b"$" else parse_id(args[2])
    group.entries_read = None
    return b"OK"


@command("XGROUP DESTROY")
def _xgroup_destroy(space: Keyspace, args: Arguments) -> Any:
    stream = space.get(args[0], Stream)
    if stream is None:
        raise ResponseError(NEEDS_KEY)
    return int(stream.groups.pop(args[1], None) is not None)


@command("XGROUP DELCONSUMER")
def _xgroup_delconsumer(space: Keyspace, args: Arguments) -> Any:
    _, group = _named_group(space, args)
    gone = [entry_id for entry_id, held in group.pending.items() if held.consumer == args[2]]
    for entry_id in gone:
        del group.pending[entry_id]
    group.consumers.pop(args[2], None)
    return len(gone)


@command("XINFO GROUPS")
def _xinfo_groups(space: Keyspace, args: Arguments) -> Any:
    stream = existing(space, args[0])
    rows = []
    for name, group in sorted(stream.groups.items()):
        facts = {
            b"name": name,
            b"consumers": len(group.consumers),
            b"pending": len(group.pending),
            b"last-delivered-id": text_of(group.last_delivered),
            b"entries-read": group.entries_read,
            b"lag": stream.lag(group),
        }
        rows.append([word for pair in facts.items() for word in pair])
    return rows


@command("XINFO CONSUMERS")
def _xinfo_consumers(space: Keyspace, args: Arguments) -> Any:
    stream = existing(space, args[0])
    if args[1] not in stream.groups:
        raise ResponseError(
            f"NOGROUP No such consumer group '{args[1].decode()}' for key name '{args[0].decode()}'"
        )
    group = stream.groups[args[1]]
    now = space.now_ms()
    rows = []
    for name, seen_ms in sorted(group.consumers.items()):
        pending = sum(held.consumer == name for held in group.pending.values())
        rows.append([b"name", name, b"pending", pending, b"idle", max(0, now - seen_ms)])
    return rows

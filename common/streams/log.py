"""Streams as logs: append, read, scan, trim, and where consumer groups stand.

Appends that must happen once carry an explicit entry id, so that repeating them does no harm. An entry that
cannot be decoded is not lost: it is returned as a `Garbled`, with its bytes. Streams are trimmed from their
beginning, and the server remembers up to which id.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from redis import exceptions as redis_errors

from tidemill.common.errors import TidemillError
from tidemill.common.redis import scripts
from tidemill.common.redis.broker import MAX_BLOCK_S, Broker
from tidemill.common.redis.scripts import NO_MARK, AppendReply
from tidemill.common.streams.entries import (
    START,
    Entry,
    Fields,
    Garbled,
    decoded,
    entry_id_of,
    id_after,
    id_before,
    id_order,
)
from tidemill.common.wire import codec
from tidemill.common.wire.codec import PAYLOAD_FIELD, SCHEMA, VERSION_FIELD
from tidemill.common.wire.messages import Message, Trajectory

UNIT_BYTES = 256 << 10
"""Payload bytes after which a transaction is closed, so that Redis serves other clients, such as readers."""
ENTRY_OVERHEAD_BYTES = 1 << 10
"""Bytes that an entry counts besides its payload; bounds the number of small ones in a transaction."""
MAX_UNIT_ENTRIES = UNIT_BYTES // ENTRY_OVERHEAD_BYTES
READ_BYTES = 64 << 20
"""Aimed limit on an answer, unless it is one entry. Redis closes the connection of a client whose answer
exceeds its output limit (1 GiB, see redis.conf), and would do so again for the same command."""
UNSEEN_SHARE = 8
"""Before any entry was seen, its size is taken as the largest possible one divided by this."""
KEPT_COMMITS = 32
"""Newest commits that trimming keeps, for people who watch the run."""
KEPT_LETTERS = 256
"""Newest dead letters that trimming keeps without an archive, for people who may put them back."""

M = TypeVar("M", bound=Message)
T = TypeVar("T")


async def append(broker: Broker, key: str, *messages: Message) -> list[str]:
    """Append messages under new ids, in order, in transactions of bounded size; returns the ids."""
    # All are encoded before the first is sent: one that cannot be must not leave a part of them appended.
    entries = [(codec.schema_of(message), codec.encode_payload(message)) for message in messages]
    return await append_encoded(broker, key, entries)


async def append_encoded(broker: Broker, key: str, entries: Sequence[tuple[bytes, bytes]]) -> list[str]:
    """Like `append`, for messages as their schema and payload."""
    ids: list[str] = []
    while unit := _first_unit(entries[len(ids) : len(ids) + MAX_UNIT_ENTRIES]):
        # A repeat after a lost answer appends again: messages that must exist once need explicit ids.
        commands = [("XADD", key, "*", VERSION_FIELD, v, PAYLOAD_FIELD, payload) for v, payload in unit]
        for reply in await broker.pipeline(commands, atomic=len(unit) > 1):
            if isinstance(reply, Exception):
                raise reply
            ids.append(reply.decode())
    return ids


def _first_unit(entries: Iterable[tuple[T, bytes]]) -> list[tuple[T, bytes]]:
    """As many entries as one transaction takes, at least one; the second of each pair is its payload."""
    unit = []
    num_bytes = 0
    for entry in entries:
        unit.append(entry)
        num_bytes += len(entry[1]) + ENTRY_OVERHEAD_BYTES
        if num_bytes >= UNIT_BYTES:
            break
    return unit


async def append_missing(
    broker: Broker, key: str, numbers: Sequence[int], make: Callable[[int], Message]
) -> list[int]:
    """Append the messages of all `numbers` (ascending) that lie beyond the end of the stream; returns those.

    The end is checked and appended to in one atomic unit: whatever Redis loses in between, no number is
    skipped, which could not be appended after a later one. There may be several units; a tail that Redis
    loses between two of them is appended again.
    """
    appended: set[int] = set()
    while True:
        last = await last_id(broker, key)
        # Only beyond the end: Redis refuses ids below the last one, also where there is a gap.
        missing = [number for number in numbers if id_order(entry_id_of(number)) > id_order(last)]
        if not missing:
            return sorted(appended)
        unit = _first_unit((number, codec.encode_payload(make(number))) for number in missing)
        appended.update(number for number, _ in unit)
        entries = [(entry_id_of(number), payload) for number, payload in unit]
        # Whether it was appended does not matter here: the next iteration checks the end again.
        await scripts.append_after(broker, stream=key, last=last, schema=SCHEMA, entries=entries)


@dataclass(frozen=True, slots=True)
class Mark:
    """A value in a hash. A server that has it has all earlier writes, too: Redis loses its newest ones.

    Example: `key` the hash of the run's state, `value` b'"9f2c01d4a7e3b658"', which one trainer has drawn.
    """

    key: str
    field: str
    value: bytes


@dataclass(frozen=True, slots=True)
class HeldTickets:
    """Where the leases and the progress of a lane's tickets are.

    Example: of training: `group` "rollout", `progress_prefix` the key of ticket 7's progress without its 7,
    `progress_suffix` "". Of evaluation the suffix is ":eval".
    """

    group: str
    """The consumer group that holds them."""
    progress_prefix: str
    progress_suffix: str
    """Before and after the number of a ticket, in the key of its progress."""


class MarkLostError(TidemillError):
    """A mark is gone, and with it perhaps what was written before it."""


async def append_after(
    broker: Broker, key: str, last: str, entry_id: str, message: Message, mark: Mark | None = None
) -> bool:
    """Append a message under an id if the stream still ends with the id `last`; False where it does not.

    Raises:
        MarkLostError: the server has not got the `mark`; nothing was appended.
    """
    reply = await scripts.append_after(
        broker,
        stream=key,
        marks=mark.key if mark else None,
        last=last,
        schema=SCHEMA,
        mark_field=mark.field if mark else None,
        mark=mark.value if mark else None,
        entries=[(entry_id, codec.encode_payload(message))],
    )
    if mark is not None and reply is AppendReply.MARK_LOST:
        raise MarkLostError(f"Redis has lost a mark in {mark.key}")
    return reply is AppendReply.APPENDED


class ReadSize:
    """Limits the number of entries in a read, by the largest entry seen so far, whose size counts half with
    each later answer."""

    def __init__(self, max_bytes: int | None) -> None:
        """`max_bytes`: limit on a message; None where unknown: then the first answer is not limited."""
        self._entry_bytes = (max_bytes or 0) // UNSEEN_SHARE

    def limit(self, count: int) -> int:
        # At least one, however large it is: a reader that asks for none would never get past it.
        return max(min(1, count), min(count, READ_BYTES // max(1, self._entry_bytes)))

    def saw(self, replies: Iterable[Collection[bytes] | None]) -> None:
        """Note the sizes of an answer's entries, each given as its fields and values."""
        sizes = [sum(map(len, raw)) for raw in replies if raw]
        self._entry_bytes = max([self._entry_bytes // 2, *sizes])


async def read_range(
    broker: Broker,
    key: str,
    message_type: type[M],
    first: str = "-",
    last: str = "+",
    count: int | None = None,
    size: ReadSize | None = None,
) -> list[Entry[M] | Garbled]:
    """Entries with ids from `first` to `last`, inclusive; `size` says how many of `count` at once."""
    limit = ("COUNT", size.limit(count) if size else count) if count else ()
    reply = await broker.execute("XRANGE", key, first, last, *limit)
    if size:
        size.saw(raw for _, raw in reply)
    return await entries_of(broker, reply, message_type)


async def read_back(
    broker: Broker, key: str, message_type: type[M], last: str = "+", first: str = "-", count: int = 256
) -> list[Entry[M] | Garbled]:
    """Entries with ids from `last` back to `first`, inclusive, the newest first."""
    reply = await broker.execute("XREVRANGE", key, last, first, "COUNT", count)
    return await entries_of(broker, reply, message_type)


async def read_raw(
    broker: Broker, key: str, first: str = "-", last: str = "+", count: int = 256
) -> list[tuple[str, Fields]]:
    """Entries with ids from `first` to `last`, inclusive, as they are."""
    reply = await broker.execute("XRANGE", key, first, last, "COUNT", count)
    return [(entry_id.decode(), fields_of(raw)) for entry_id, raw in reply]


async def entries_of(broker: Broker, reply: Any, message_type: type[M]) -> list[Entry[M] | Garbled]:
    """The decoded entries of an answer; payloads that they claim are read on threads."""
    entries = [decoded(i, fields_of(raw), message_type, broker.max_bytes) for i, raw in reply]
    messages = [entry.message for entry in entries if isinstance(entry, Entry)]
    if not broker.has_opened_claims and not any(map(_names_a_payload, messages)):
        return entries
    claims = broker.claims
    is_patient = broker.waits_for_claims
    if claims is None or all(map(claims.is_whole, messages)):
        return entries
    from tidemill.common.store import resolved

    async def whole(entry: Entry[M] | Garbled) -> Entry[M] | Garbled:
        if isinstance(entry, Garbled) or claims.is_whole(entry.message):
            return entry
        return Entry(entry.entry_id, await resolved(claims, entry.message, is_patient))

    return await asyncio.gather(*map(whole, entries))


def block_for(block_s: float) -> tuple[str, int] | tuple[()]:
    """The BLOCK option for a wait of `block_s`, empty for 0; never BLOCK 0, which would wait for ever."""
    return ("BLOCK", max(1, int(min(block_s, MAX_BLOCK_S) * 1000))) if block_s > 0 else ()


def has_claim(message: Message) -> bool:
    """Whether the message is only a claim to a payload that is stored elsewhere."""
    return isinstance(message, Trajectory) and message.claim is not None


def _names_a_payload(message: Message) -> bool:
    """Whether the message, or what the engine chose with it, is stored elsewhere."""
    return isinstance(message, Trajectory) and (message.claim is not None or message.lacks_choices)


def fields_of(raw: Sequence[bytes]) -> Fields:
    """Fields of an entry or a hash by name: Redis sends names and values as one flat list."""
    return dict(zip(raw[::2], raw[1::2], strict=True))


async def scan(
    broker: Broker, key: str, message_type: type[M], first: str = "-", batch: int = 256
) -> AsyncIterator[Entry[M] | Garbled]:
    """All entries from `first` on, a batch at a time, without holding the whole stream."""
    size = ReadSize(broker.max_bytes)
    while entries := await read_range(broker, key, message_type, first, "+", batch, size):
        for entry in entries:
            yield entry
        first = f"({entries[-1].entry_id}"


async def read_newest(broker: Broker, key: str, message_type: type[M]) -> Entry[M] | None:
    """The last entry that can be decoded, or None for an empty stream."""
    last = "+"
    while entries := await read_back(broker, key, message_type, last=last, count=8):
        for entry in entries:
            if isinstance(entry, Entry):
                return entry
        last = id_before(entries[-1].entry_id)
    return None


async def has_entry(broker: Broker, key: str, entry_id: str) -> bool:
    return bool(await broker.execute("XRANGE", key, entry_id, entry_id))


async def length(broker: Broker, key: str) -> int:
    return int(await broker.execute("XLEN", key))


async def memory_bytes(broker: Broker, key: str) -> int:
    """Memory of the stream, as Redis estimates it; 0 where there is no stream."""
    return int(await broker.execute("MEMORY", "USAGE", key) or 0)


async def last_id(broker: Broker, key: str) -> str:
    """The greatest id the stream has given out, or `START` where there is no stream."""
    info = await _info(broker, "STREAM", key)
    # Not the id of the last entry: an empty stream still refuses ids that it has used.
    return str(_by_name(info)[b"last-generated-id"].decode()) if info else START


async def _info(broker: Broker, *about: str) -> list[Any]:
    """The answer to XINFO; empty where stream or group do not exist."""
    try:
        reply: list[Any] = await broker.execute("XINFO", *about)
    except redis_errors.ResponseError as error:
        if "no such key" in str(error) or is_without_group(error):
            return []
        raise
    return reply


def _by_name(flat: Sequence[Any]) -> dict[bytes, Any]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


async def ensure_group(broker: Broker, key: str, group: str) -> None:
    """Create the consumer group, and the stream, unless they are there."""
    try:
        # From the beginning: entries may be older than the group. Where a group was lost, what is left is
        # delivered once more, and readers keep the first entry of a key.
        await broker.execute("XGROUP", "CREATE", key, group, "0", "MKSTREAM")
    except redis_errors.ResponseError as error:
        if not str(error).startswith("BUSYGROUP"):
            raise


def is_without_group(error: redis_errors.ResponseError) -> bool:
    """Whether stream or group have vanished: Redis lost its data, or someone deleted them."""
    return str(error).startswith(("NOGROUP", "The XGROUP subcommand requires the key to exist"))


@dataclass(frozen=True, slots=True)
class GroupStatus:
    pending: int
    last_delivered: str
    consumers: int
    lag: int | None = None
    """Entries that no consumer has been given yet; None where the server does not say (before Redis 7)."""


async def group_status(broker: Broker, key: str, group: str) -> GroupStatus | None:
    """State of the group, or None where stream or group do not exist."""
    for info in map(_by_name, await _info(broker, "GROUPS", key)):
        if info[b"name"] == group.encode():
            position = info[b"last-delivered-id"].decode()
            return GroupStatus(info[b"pending"], position, info[b"consumers"], info.get(b"lag"))
    return None


async def forget_consumers(broker: Broker, key: str, group: str, after_s: float) -> int:
    """Remove consumers that hold nothing and have not asked for so long; returns how many. One that asks
    again is a consumer again."""
    consumers = map(_by_name, await _info(broker, "CONSUMERS", key, group))
    silent = [info[b"name"] for info in consumers if not info[b"pending"] and info[b"idle"] > 1000 * after_s]
    num_removed = 0
    try:
        for name in silent:
            # The script looks at what is pending again: the consumer may have got something meanwhile.
            num_removed += await scripts.leave(broker, stream=key, group=group, consumer=name)
        return num_removed
    except redis_errors.ResponseError as error:
        if is_without_group(error):
            return 0
        raise


async def pending_ids(broker: Broker, key: str, group: str, first: str, last: str, count: int) -> list[str]:
    """Ids between `first` and `last` that some consumer holds."""
    reply = await broker.execute("XPENDING", key, group, first, last, count)
    return [row[0].decode() for row in reply]


async def trim_before(
    broker: Broker,
    key: str,
    entry_id: str,
    mark: Mark | None = None,
    held: HeldTickets | None = None,
) -> int:
    """Remove entries below `entry_id`; returns how many. With `held`, leases and progress of removed tickets
    are removed, too.

    Raises:
        MarkLostError: the server has not got the `mark`; nothing was removed.
    """
    if mark is None:
        # Not `~`, by which Redis would leave some of them.
        return int(await broker.execute("XTRIM", key, "MINID", entry_id))
    num_removed = await scripts.trim(
        broker,
        stream=key,
        marks=mark.key,
        entry_id=entry_id,
        mark_field=mark.field,
        mark=mark.value,
        trim_field=_trim_field(key),
        group=held.group if held else None,
        progress_prefix=held.progress_prefix if held else None,
        progress_suffix=held.progress_suffix if held else None,
    )
    if num_removed == NO_MARK:
        raise MarkLostError(f"Redis has lost a mark in {mark.key}")
    return num_removed


async def newest_begin(broker: Broker, key: str, num_kept: int = KEPT_LETTERS) -> str:
    """An id with only entries below it that are not among the newest `num_kept`: all of these, or the oldest
    `num_kept` of them. `START` where there are none."""
    num_older = await length(broker, key) - num_kept
    # Reads the entries that go, not those that stay: over all calls, each once.
    older = await read_raw(broker, key, count=min(num_older, num_kept)) if num_older > 0 else []
    return id_after(older[-1][0]) if older else START


async def trimmed_below(broker: Broker, state_key: str, key: str) -> str:
    """The id below which this server has trimmed the stream under a mark; `START` where it has not."""
    raw = await broker.execute("HGET", state_key, _trim_field(key))
    return START if raw is None else str(json.loads(raw))


def _trim_field(key: str) -> str:
    """Field of the run's state for a stream: the id below which this server has trimmed it. One that has lost
    the trim has lost the field too."""
    return f"trimmed:{key.partition('}:')[2]}"

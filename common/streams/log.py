"""Streams as logs: append, read by offset, scan.

Appends that must happen once carry an explicit entry id, so that repeating them fails harmlessly. An
entry that cannot be decoded is never lost: it comes back as a `Garbled`, bytes and all.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from redis import exceptions as redis_errors

from tidemill.common import store
from tidemill.common.errors import TidemillError
from tidemill.common.redis.broker import MAX_BLOCK_S, Broker
from tidemill.common.streams.entries import (
    START,
    Entry,
    Fields,
    Garbled,
    decoded,
    entry_id_of,
    id_before,
    id_order,
)
from tidemill.common.streams.read_size import ReadSize
from tidemill.common.streams.trail import Trail
from tidemill.common.wire import codec
from tidemill.common.wire.codec import PAYLOAD_FIELD, SCHEMA, VERSION_FIELD
from tidemill.common.wire.messages import Message, Trajectory

BYTES_IN_ONE_TRANSACTION = 256 << 10
"""Payload bytes after which a transaction is closed: Redis serves others again, and its readers start."""
ENTRY_OVERHEAD_BYTES = 1 << 10
"""What an entry counts besides its payload; bounds the number of small ones in a transaction."""

M = TypeVar("M", bound=Message)


async def append(broker: Broker, key: str, *messages: Message) -> list[str]:
    """Append messages under new ids, in order; returns the ids."""
    ids = await _append(broker, key, [("*", message) for message in messages])
    return [entry_id.decode() for entry_id in ids]


async def append_numbered(broker: Broker, key: str, numbered: Iterable[tuple[int, Message]]) -> int:
    """Append each message under the id of its number, unless the stream is past it already.

    Numbers must ascend. Safe to repeat, and safe against a second writer: the first one wins. Returns how
    many were new.
    """
    pairs = [(entry_id_of(number), message) for number, message in numbered]
    return sum(bool(entry_id) for entry_id in await _append(broker, key, pairs))


async def append_missing(
    broker: Broker, key: str, numbers: Sequence[int], make: Callable[[int], Message]
) -> list[int]:
    """Append the messages of all `numbers` (ascending) that lie behind the end of the stream; returns those.

    The end is looked at and appended to in the same atomic unit: whatever Redis loses in between, a number is
    never passed over, because behind a later one there would be no place for it any more. What cannot stand
    in one unit is appended in several, and a tail that is lost between two of them comes back as well.
    """
    appended: dict[int, None] = {}
    while True:
        last = await last_id(broker, key)
        missing = [number for number in numbers if id_order(entry_id_of(number)) > id_order(last)]
        if not missing:
            return sorted(appended)
        part: list[Any] = []
        num_bytes = 0
        for number in missing:
            if num_bytes >= BYTES_IN_ONE_TRANSACTION:
                break
            payload = codec.encode_payload(make(number))
            part += [entry_id_of(number), payload]
            appended[number] = None
            num_bytes += len(payload) + ENTRY_OVERHEAD_BYTES
        await broker.script("append_after", [key], [last, SCHEMA, *part])


@dataclass(frozen=True, slots=True)
class Mark:
    """A value in a hash. A server that has it has all that was written before: it loses the newest first."""

    key: str
    field: str
    value: bytes


class MarkLostError(TidemillError):
    """A mark is gone, and with it perhaps what was written before it."""


async def append_after(
    broker: Broker, key: str, last: str, entry_id: str, message: Message, mark: Mark | None = None
) -> bool:
    """Append a message under an id if the stream still ends with the id `last`; False where it does not.

    Raises:
        MarkLostError: the server has not got the `mark`; nothing was appended.
    """
    keys, condition = ([key, mark.key], (mark.field, mark.value)) if mark else ([key], ())
    pair = (entry_id, codec.encode_payload(message))
    reply = int(await broker.script("append_after", keys, [last, SCHEMA, *condition, *pair]))
    if reply < 0:
        raise MarkLostError(f"Redis has lost a mark in {keys[-1]}")
    return bool(reply)


async def _append(broker: Broker, key: str, pairs: Sequence[tuple[str, Message]]) -> list[bytes]:
    """Append (id, message) pairs in transactions of bounded size; the ids, b"" where one was taken.

    Transactions, because while Redis is full a later entry could be admitted after an earlier one was
    refused, and a number that was passed can never be appended any more.
    """
    ids: list[bytes] = []
    commands: list[tuple[Any, ...]] = []
    num_bytes = 0
    # All before the first goes out: a message that cannot be sent must not leave those before it behind.
    encoded = [(entry_id, codec.schema_of(m), codec.encode_payload(m)) for entry_id, m in pairs]
    for entry_id, schema, payload in encoded:
        if num_bytes >= BYTES_IN_ONE_TRANSACTION:
            ids += await _append_together(broker, commands)
            commands, num_bytes = [], 0
        commands.append(("XADD", key, entry_id, VERSION_FIELD, schema, PAYLOAD_FIELD, payload))
        num_bytes += len(payload) + ENTRY_OVERHEAD_BYTES
    return ids + await _append_together(broker, commands) if commands else ids


async def _append_together(broker: Broker, commands: Sequence[Sequence[Any]]) -> list[bytes]:
    replies = await broker.pipeline(commands, atomic=len(commands) > 1)
    return [b"" if _was_there(reply) else reply for reply in replies]


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
    return await resolved(broker, _decoded(broker, reply, message_type))


def _decoded(broker: Broker, reply: Any, message_type: type[M]) -> list[Entry[M] | Garbled]:
    return [decoded(i, fields_of(raw), message_type, broker.max_bytes) for i, raw in reply]


async def resolved(broker: Broker, records: list[Entry[M] | Garbled]) -> list[Entry[M] | Garbled]:
    """The same, with the payloads that they only claim, read on threads."""
    if broker.claims is None or not any(isinstance(r, Entry) and has_claim(r.message) for r in records):
        return records
    claims, is_patient = broker.claims, broker.waits_for_claims

    async def whole(record: Entry[M] | Garbled) -> Entry[M] | Garbled:
        if isinstance(record, Garbled) or not has_claim(record.message):
            return record
        return Entry(record.entry_id, await store.resolved(claims, record.message, is_patient))

    return await asyncio.gather(*map(whole, records))


def has_claim(message: Message) -> bool:
    """Whether the message is elsewhere, and this only its claim."""
    return isinstance(message, Trajectory) and message.claim is not None


async def read_raw(
    broker: Broker, key: str, first: str = "-", last: str = "+", count: int = 256
) -> list[tuple[str, Fields]]:
    """Entries with ids from `first` to `last`, inclusive, as they are."""
    reply = await broker.execute("XRANGE", key, first, last, "COUNT", count)
    return [(entry_id.decode(), fields_of(raw)) for entry_id, raw in reply]


async def read_back(
    broker: Broker, key: str, message_type: type[M], last: str = "+", first: str = "-", count: int = 256
) -> list[Entry[M] | Garbled]:
    """Entries with ids from `last` back to `first`, inclusive, the newest first."""
    reply = await broker.execute("XREVRANGE", key, last, first, "COUNT", count)
    return await resolved(broker, _decoded(broker, reply, message_type))


async def memory_bytes(broker: Broker, key: str) -> int:
    """Of the stream in Redis, by its estimate; 0 where there is no stream."""
    return int(await broker.execute("MEMORY", "USAGE", key) or 0)


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


async def length(broker: Broker, key: str) -> int:
    """Entries in the stream now."""
    return int(await broker.execute("XLEN", key))


async def last_id(broker: Broker, key: str) -> str:
    """The greatest id the stream has given out, or `START` where there is no stream."""
    try:
        raw = await broker.execute("XINFO", "STREAM", key)
    except redis_errors.ResponseError as error:
        if "no such key" in str(error):
            return START
        raise
    return str(dict(zip(raw[::2], raw[1::2], strict=True))[b"last-generated-id"].decode())


async def ensure_group(broker: Broker, key: str, group: str, position: str = "0") -> None:
    """Create the consumer group, and the stream, unless they are there."""
    try:
        await broker.execute("XGROUP", "CREATE", key, group, position, "MKSTREAM")
    except redis_errors.ResponseError as error:
        if not str(error).startswith("BUSYGROUP"):
            raise


@dataclass(frozen=True, slots=True)
class GroupStatus:
    """Where a consumer group stands."""

    pending: int
    last_delivered: str
    consumers: int
    lag: int | None = None
    """Entries that no consumer has been given yet; None where the server does not say (before Redis 7)."""


async def group_status(broker: Broker, key: str, group: str) -> GroupStatus | None:
    """Where the group stands, or None where stream or group do not exist."""
    try:
        groups = await broker.execute("XINFO", "GROUPS", key)
    except redis_errors.ResponseError as error:
        if "no such key" in str(error):
            return None
        raise
    for raw in groups:
        info = dict(zip(raw[::2], raw[1::2], strict=True))
        if info[b"name"] == group.encode():
            position = info[b"last-delivered-id"].decode()
            return GroupStatus(info[b"pending"], position, info[b"consumers"], info.get(b"lag"))
    return None


async def forget_consumers(broker: Broker, key: str, group: str, after_s: float) -> int:
    """Remove consumers that hold nothing and have not asked for so long; returns how many. One that asks
    again is a consumer again."""
    try:
        consumers = await broker.execute("XINFO", "CONSUMERS", key, group)
        found = [dict(zip(raw[::2], raw[1::2], strict=True)) for raw in consumers]
        silent = [info[b"name"] for info in found if not info[b"pending"] and info[b"idle"] > 1000 * after_s]
        return sum([int(await broker.script("leave", [key], [group, name])) for name in silent])
    except redis_errors.ResponseError as error:
        if "no such key" in str(error) or is_without_group(error):
            return 0
        raise


async def pending_ids(broker: Broker, key: str, group: str, first: str, last: str, count: int) -> list[str]:
    """Ids between `first` and `last` that some consumer holds."""
    reply = await broker.execute("XPENDING", key, group, first, last, count)
    return [row[0].decode() for row in reply]


class OffsetReader(Generic[M]):
    """Reads a stream by offset, without a consumer group: the position is the reader's own to keep."""

    def __init__(
        self,
        broker: Broker,
        key: str,
        message_type: type[M],
        position: str = START,
        trail: Trail | None = None,
    ) -> None:
        """With a `trail` of what was read before, the stream is looked at before `position` is relied on."""
        self.broker, self.key, self.message_type = broker, key, message_type
        self.position = position
        self.trail = Trail() if trail is None else trail
        self._is_sure, self._size = trail is None, ReadSize(broker.max_bytes)

    @property
    def safe_position(self) -> str:
        """A position that nothing unread lies below."""
        return self.position if self._is_sure else START

    async def read(self, count: int = 256, block_s: float = 0.0) -> list[Entry[M] | Garbled]:
        """The next entries after the position, which moves on; waits up to `block_s` for the first."""
        if not self._is_sure:
            standing = await self.trail.last_standing(self.broker, self.key)
            self.position = min(self.position, standing, key=id_order)
            self._is_sure = True
        block = ("BLOCK", block_ms(block_s)) if block_s > 0 else ()
        most = self._size.limit(count)
        reply = await self.broker.execute("XREAD", "COUNT", most, *block, "STREAMS", self.key, self.position)
        if not reply:
            return []
        self._size.saw(raw for _, raw in reply[0][1])
        entries = await resolved(self.broker, _decoded(self.broker, reply[0][1], self.message_type))
        for entry_id, raw in reply[0][1]:
            self.trail.follow(entry_id.decode(), raw)
        self.position = entries[-1].entry_id
        return entries

    def reread(self, position: str) -> "OffsetReader[M]":
        """A reader that goes back to `position`, or further where the stream has lost its tail since."""
        # A trail of its own: this reader may still be given an answer of the server that is gone.
        return OffsetReader(self.broker, self.key, self.message_type, position, Trail(self.trail.sure))


def is_without_group(error: redis_errors.ResponseError) -> bool:
    """Whether stream or group have vanished: Redis lost its data, or someone deleted them."""
    return str(error).startswith(("NOGROUP", "The XGROUP subcommand requires the key to exist"))


def fields_of(raw: Sequence[bytes]) -> Fields:
    """Field names and values, which Redis sends as one flat list."""
    return dict(zip(raw[::2], raw[1::2], strict=True))


def block_ms(block_s: float) -> int:
    """Seconds to the milliseconds of BLOCK: never 0, which would block for ever."""
    return max(1, int(min(block_s, MAX_BLOCK_S) * 1000))


def _was_there(reply: Any) -> bool:
    """Whether a numbered append found its id taken; any other error is raised."""
    if isinstance(reply, redis_errors.ResponseError) and "equal or smaller" in str(reply):
        return True
    if isinstance(reply, Exception):
        raise reply
    return False

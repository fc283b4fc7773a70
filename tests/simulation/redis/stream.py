"""Streams and their consumer groups, as Redis 7.0 has them."""

import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from redis.exceptions import ResponseError

EntryId = tuple[int, int]
FIRST: EntryId = (0, 0)
LAST: EntryId = ((1 << 64) - 1, (1 << 64) - 1)


@dataclass(slots=True)
class Pending:
    """One entry that a consumer holds."""

    consumer: bytes
    delivered_ms: int
    num_deliveries: int


@dataclass(slots=True)
class Group:
    """A consumer group: its position, and the entries that its consumers hold, by id."""

    last_delivered: EntryId
    entries_read: int | None = 0
    pending: dict[EntryId, Pending] = field(default_factory=dict)
    consumers: dict[bytes, int] = field(default_factory=dict)
    """Name -> when it was last seen, in milliseconds."""

    def held(self) -> list[EntryId]:
        """Ids of what is pending, in order."""
        return sorted(self.pending)


@dataclass(slots=True)
class Stream:
    """Entries in order of their ids."""

    ids: list[EntryId] = field(default_factory=list)
    entries: dict[EntryId, list[bytes]] = field(default_factory=dict)
    last_id: EntryId = FIRST
    max_deleted: EntryId = FIRST
    num_added: int = 0
    num_bytes: int = 0
    groups: dict[bytes, Group] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return True  # a stream without entries is still there

    def add(self, entry_id: EntryId, fields: list[bytes]) -> None:
        self.ids.append(entry_id)
        self.entries[entry_id] = fields
        self.last_id = entry_id
        self.num_added += 1
        self.num_bytes += sum(map(len, fields)) + 16

    def between(self, first: EntryId, last: EntryId) -> tuple[int, int]:
        """Slice of `ids` from `first` to `last`, inclusive."""
        return bisect.bisect_left(self.ids, first), bisect.bisect_right(self.ids, last)

    def after(self, entry_id: EntryId, count: int | None) -> Iterator[EntryId]:
        start = bisect.bisect_right(self.ids, entry_id)
        return iter(self.ids[start : None if count is None else start + count])

    def remove(self, entry_id: EntryId) -> bool:
        fields = self.entries.pop(entry_id, None)
        if fields is None:
            return False
        self.ids.pop(bisect.bisect_left(self.ids, entry_id))
        self.num_bytes -= sum(map(len, fields)) + 16
        return True

    def trim_before(self, entry_id: EntryId) -> int:
        end = bisect.bisect_left(self.ids, entry_id)
        for gone in self.ids[:end]:
            self.num_bytes -= sum(map(len, self.entries.pop(gone))) + 16
        del self.ids[:end]
        return end

    def lag(self, group: Group) -> int | None:
        """Entries that the group was not given; None where a deletion makes that unknown, as in Redis."""
        if self.max_deleted > group.last_delivered and self.ids:
            return None
        return len(self.ids) - bisect.bisect_right(self.ids, group.last_delivered)

    def shown(self, entry_id: EntryId) -> list[Any]:
        return [text_of(entry_id), self.entries[entry_id]]


def text_of(entry_id: EntryId) -> bytes:
    return b"%d-%d" % entry_id


def parse_id(text: bytes, missing: int = 0) -> EntryId:
    """An id; `missing` stands for a sequence number that is not given."""
    ms, dash, seq = text.partition(b"-")
    if not ms.isdigit() or (dash and not seq.isdigit()):
        raise ResponseError("Invalid stream ID specified as stream command argument")
    entry_id = int(ms), int(seq) if dash else missing
    if entry_id > LAST:
        raise ResponseError("Invalid stream ID specified as stream command argument")
    return entry_id


def first_of(text: bytes) -> EntryId:
    """The lower end of a range."""
    if text == b"-":
        return FIRST
    if text.startswith(b"("):
        ms, seq = parse_id(text[1:])
        return (ms, seq + 1) if seq < LAST[1] else (ms + 1, 0)
    return parse_id(text)


def last_of(text: bytes) -> EntryId:
    """The upper end of a range."""
    if text == b"+":
        return LAST
    if text.startswith(b"("):
        ms, seq = parse_id(text[1:])
        return (ms, seq - 1) if seq else (ms - 1, LAST[1])
    return parse_id(text, LAST[1])

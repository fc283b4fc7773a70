"""Finds unexpected entries in the streams whose entries the trainer numbers, and dead-letters them.

The trainer gives tickets, versions and commits the ids of their numbers. One `XADD ... *` by hand leaves such
a stream at an id far beyond, where it refuses every number that follows. So the trainer takes the stream back
to its own last entry; bytes and id of the unexpected entry are in its dead letter. What has the envelope of
our messages and an id of ours is never touched: it may come from a newer release.
"""

from collections.abc import Callable, Mapping
from typing import Any

import structlog

from tidemill.common.redis import scripts
from tidemill.common.redis.broker import Broker
from tidemill.common.redis.scripts import NO_STREAM
from tidemill.common.streams import (
    START,
    DeadLetterWriter,
    Entry,
    Garbled,
    dead_letter,
    entry_id_of,
    id_before,
    id_order,
    last_id,
    read_back,
)
from tidemill.common.telemetry import metrics
from tidemill.common.wire import codec
from tidemill.common.wire.codec import PAYLOAD_FIELD, SCHEMA, VERSION_FIELD
from tidemill.common.wire.keys import Keys
from tidemill.common.wire.messages import Commit, Message, Ticket, WeightManifest

log = structlog.get_logger(__name__)

SCAN_COUNT = 64
GREATEST_NUMBER = 10**9
"""No run has so many tickets or steps: an id beyond is a time in milliseconds."""
UNEXPECTED = "no service of this run wrote it; the stream takes numbered entries of the trainer only"

_NUMBER_OF: dict[type[Message], Callable[[Any], int]] = {
    Ticket: lambda ticket: int(ticket.ticket),
    WeightManifest: lambda manifest: int(manifest.version),
    Commit: lambda commit: int(commit.step),
}

Record = Entry[Any] | Garbled


async def remove_unexpected(
    broker: Broker, keys: Keys, key: str, message_type: type[Message], floor: str = START
) -> int:
    """Dead-letter unexpected entries at the end of a numbered stream; returns how many, at least 1 where its
    last id was taken back or the stream has vanished meanwhile. Where it has no entry of its own left, its
    last id becomes `floor`: what lies below was trimmed."""
    newest = await last_id(broker, key)
    last_entries = await read_back(broker, key, message_type, count=1)
    if not last_entries and newest in (START, floor):
        return 0
    if last_entries and last_entries[0].entry_id == newest and not is_unexpected(last_entries[0]):
        return 0
    unexpected = await _unexpected_at_end(broker, key, message_type)
    if not unexpected and not last_entries and not _is_beyond(newest):
        return 0
    name = keys.name_of(key)
    writer = DeadLetterWriter(broker, keys, key)
    dead_letters: dict[str, bytes] = {}
    for entry in unexpected:
        fields = entry.fields if isinstance(entry, Garbled) else codec.encode(entry.message)
        dead = dead_letter(name, entry.entry_id, fields, UNEXPECTED, "trainer")
        # A worker may have dead-lettered it already.
        is_known = await writer.has(entry.entry_id)
        dead_letters[entry.entry_id] = b"" if is_known else codec.encode_payload(dead)
    # Without dead letters: an entry was removed by hand, and only the last id is left to be taken back.
    moved = await take_back(broker, keys, key, dead_letters, floor)
    if moved == NO_STREAM:
        return 1
    log.error(
        "unexpected entries were dead-lettered, and the stream taken back to its own last entry",
        stream=name,
        entries=[entry.entry_id for entry in unexpected],
        last_id=newest,
    )
    metrics.UNEXPECTED_ENTRIES.labels(name).inc(max(1, moved))
    return max(1, moved)


async def take_back(
    broker: Broker, keys: Keys, key: str, dead_letters: Mapping[str, bytes], floor: str
) -> int:
    """Remove entries from a numbered stream, add their dead letters (empty: none), and set its last id back
    to its own newest entry or to `floor`, in one unit; returns how many entries there were, NO_STREAM where
    the stream has vanished."""
    entries = list(dead_letters.items())
    return await scripts.move_aside(
        broker, stream=key, dead=keys.dead, schema=SCHEMA, floor=floor, entries=entries
    )


async def _unexpected_at_end(broker: Broker, key: str, message_type: type[Message]) -> list[Record]:
    """The unexpected entries behind the stream's own last entry, oldest first."""
    unexpected: list[Record] = []
    last = "+"
    while records := await read_back(broker, key, message_type, last=last, count=SCAN_COUNT):
        for record in records:
            if not is_unexpected(record):
                return unexpected[::-1]
            unexpected.append(record)
        last = id_before(records[-1].entry_id)
    return unexpected[::-1]


def is_unexpected(record: Record) -> bool:
    """Whether the trainer has not written this entry of a numbered stream."""
    if isinstance(record, Entry):
        own_id = entry_id_of(_NUMBER_OF[type(record.message)](record.message))
        if isinstance(record.message, WeightManifest):  # one version may be announced more than once
            return id_order(record.entry_id)[0] != id_order(own_id)[0]
        return record.entry_id != own_id
    return _is_beyond(record.entry_id) or not {VERSION_FIELD, PAYLOAD_FIELD} <= record.fields.keys()


def _is_beyond(entry_id: str) -> bool:
    """Whether no entry of our own can have this id."""
    number, sequence = id_order(entry_id)
    return sequence != 0 or number > GREATEST_NUMBER

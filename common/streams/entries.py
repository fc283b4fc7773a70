"""Entries of a stream, their ids, and entries that cannot be decoded.

Independent of Redis's client, for readers of archives and histories.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from tidemill.common.errors import CodecError
from tidemill.common.wire import codec
from tidemill.common.wire.messages import Message

START = "0-0"
"""An id before every entry."""
NOBODY = "requeued"
"""Consumer that holds messages which were given back; no worker has this name. The next look takes them."""

M = TypeVar("M", bound=Message)
Fields = dict[bytes, bytes]


@dataclass(frozen=True, slots=True)
class Entry(Generic[M]):
    """A message in a stream.

    Example: `entry_id` "1764350000000-3", `message` the trajectory of sample 3 of ticket 12.
    """

    entry_id: str
    message: M


@dataclass(frozen=True, slots=True)
class Garbled:
    """An entry that cannot be decoded, with its bytes and the reason.

    Example: `entry_id` "1764350000000-3", `fields` {b"v": b"9", b"p": its payload}, `error` that schema 9 is
    not known.
    """

    entry_id: str
    fields: Fields
    error: str


@dataclass(eq=False, slots=True)
class Delivery(Generic[M]):
    """A message held by this consumer. `attempts` counts deliveries, this one included; for a ticket, those
    since a sample of it was last published, or a part of one kept.

    Example: `entry_id` "13-0", `message` ticket 12, `attempts` 2: the worker that had it first has died.
    """

    entry_id: str
    fields: Fields
    message: M
    attempts: int
    is_lost: bool = False
    """True once another consumer has taken the message over: stop working on it."""
    on_lost: Callable[[], object] | None = None
    """Called when the message is lost; cheaper than a waiting task for each of thousands of messages."""


def entry_id_of(number: int) -> str:
    """Entry id of ticket, step or version `number`: appending it twice fails harmlessly. -1 has `START`."""
    # Redis takes no entry with the id 0-0.
    return f"{number + 1}-0"


# Milliseconds have 64 bits, so no id lies above the second.
ENDS = {"-": (0, 0), "+": (2**64, 0)}
"""Symbols for the least and the greatest id in commands."""


def id_order(entry_id: str) -> tuple[int, int]:
    """Sort key of an entry id, or of one of `ENDS`."""
    if entry_id in ENDS:
        return ENDS[entry_id]
    milliseconds, _, sequence = entry_id.partition("-")
    return int(milliseconds), int(sequence or 0)


def id_before(entry_id: str) -> str:
    """The greatest id below `entry_id`: reading after it starts with `entry_id` itself."""
    milliseconds, sequence = id_order(entry_id)
    if sequence:
        return f"{milliseconds}-{sequence - 1}"
    # The sequence has 64 bits too, and starts again with each millisecond.
    return f"{milliseconds - 1}-{2**64 - 1}" if milliseconds else START


def id_after(entry_id: str) -> str:
    """The smallest id above `entry_id`; the inverse of `id_before`."""
    milliseconds, sequence = id_order(entry_id)
    return f"{milliseconds}-{sequence + 1}" if sequence < 2**64 - 1 else f"{milliseconds + 1}-0"


def decoded(
    raw_id: bytes, fields: Fields, message_type: type[M], max_bytes: int | None = None
) -> Entry[M] | Garbled:
    """Decode one entry; what cannot be decoded is kept with its bytes and the reason."""
    entry_id = raw_id.decode()
    try:
        return Entry(entry_id, codec.decode(fields, message_type, max_bytes))
    except CodecError as error:
        return Garbled(entry_id, fields, str(error))

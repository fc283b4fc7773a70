"""What a stream holds: entries, their ids, and what cannot be decoded. Knows nothing of Redis's client.

Readers of archives and of whole histories need this much of a stream and no more.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from tidemill.common.errors import CodecError
from tidemill.common.wire import codec
from tidemill.common.wire.messages import Message

START = "0-0"
"""Before every entry."""
NOBODY = "requeued"
"""The holder of messages that were given back: no worker's name. What it holds is for the first that asks."""

M = TypeVar("M", bound=Message)
Fields = dict[bytes, bytes]


@dataclass(frozen=True, slots=True)
class Entry(Generic[M]):
    entry_id: str
    message: M


@dataclass(frozen=True, slots=True)
class Garbled:
    """An entry that cannot be decoded, with its bytes and the reason."""

    entry_id: str
    fields: Fields
    error: str


@dataclass(eq=False, slots=True)
class Delivery(Generic[M]):
    """A message held by this consumer. `attempts` counts deliveries, this one included; of a ticket, since a
    sample of it, or a part of one, was published."""

    entry_id: str
    fields: Fields
    message: M
    attempts: int
    is_lost: bool = False
    """True once another consumer has taken the message over: stop working on it."""
    on_lost: Callable[[], object] | None = None
    """Called then, for holders of thousands that want no task for each that waits."""


def entry_id_of(number: int) -> str:
    """Entry id of ticket, step or version `number`: appending it twice fails harmlessly. -1 has `START`."""
    # Redis takes no entry with the id 0-0.
    return f"{number + 1}-0"


# Milliseconds have 64 bits, so no id lies above the second.
ENDS = {"-": (0, 0), "+": (2**64, 0)}
"""What commands take in place of the least and the greatest id."""


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

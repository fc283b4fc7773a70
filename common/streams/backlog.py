"""What waits in a stream for a consumer group, and what the group holds."""

from dataclasses import dataclass
from typing import Generic, TypeVar

from tidemill.common.redis.broker import Broker
from tidemill.common.streams.entries import Entry, Garbled, id_order
from tidemill.common.streams.log import group_status, last_id, length, read_range
from tidemill.common.wire.messages import Message

M = TypeVar("M", bound=Message)

MAX_COUNTED = 100
"""Where the server does not say how many entries wait, they are counted up to so many."""


@dataclass(frozen=True, slots=True)
class Backlog(Generic[M]):
    """A group on one stream. `lag` is exact from Redis 7 on, and at most `MAX_COUNTED` before."""

    lag: int
    pending: int
    consumers: int
    oldest_waiting: Entry[M] | Garbled | None
    oldest_held: Entry[M] | Garbled | None


async def backlog(broker: Broker, key: str, group: str, message_type: type[M]) -> Backlog[M]:
    """Where the group stands; a group that does not exist yet has everything before it."""
    status = await group_status(broker, key, group)
    if status is None:
        first = await _first(broker, key, "-", message_type)
        return Backlog(await length(broker, key), 0, 0, first, None)
    held = None
    if status.pending:
        _, oldest_id, _, _ = await broker.execute("XPENDING", key, group)
        if oldest_id is not None:  # acknowledged in between
            held = await _first(broker, key, oldest_id.decode(), message_type, oldest_id.decode())
    if id_order(status.last_delivered) >= id_order(await last_id(broker, key)):
        return Backlog(0, status.pending, status.consumers, None, held)
    waiting = await _first(broker, key, f"({status.last_delivered}", message_type)
    lag = status.lag
    if lag is None:
        after = await broker.execute("XRANGE", key, f"({status.last_delivered}", "+", "COUNT", MAX_COUNTED)
        lag = len(after)
    return Backlog(lag, status.pending, status.consumers, waiting, held)


async def _first(
    broker: Broker, key: str, first: str, message_type: type[M], last: str = "+"
) -> Entry[M] | Garbled | None:
    found = await read_range(broker, key, message_type, first, last, 1)
    return found[0] if found else None

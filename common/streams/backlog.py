"""How much waits for a consumer group, and how much it holds."""

from dataclasses import dataclass
from typing import Generic, TypeVar

from tidemill.common.redis.broker import Broker
from tidemill.common.streams.entries import Entry, Garbled, id_order
from tidemill.common.streams.log import group_status, last_id, length, read_range, read_raw
from tidemill.common.wire.messages import Message

MAX_COUNTED = 100
"""Waiting entries are counted up to this where the server does not report their number."""

M = TypeVar("M", bound=Message)


@dataclass(frozen=True, slots=True)
class Backlog(Generic[M]):
    """Entries that wait for a group, and those that it holds. `lag` is exact where Redis reports it (from
    Redis 7 on, mostly), else counted up to `MAX_COUNTED`.

    Example: `lag` 40, `pending` 8, `consumers` 2: two workers hold 8 entries, and 40 wait.
    """

    lag: int
    pending: int
    consumers: int
    oldest_waiting: Entry[M] | Garbled | None
    oldest_held: Entry[M] | Garbled | None


async def backlog(broker: Broker, key: str, group: str, message_type: type[M]) -> Backlog[M]:
    """The group's backlog; for a group that does not exist yet, all entries wait."""

    async def first_of(first: str, last: str = "+") -> Entry[M] | Garbled | None:
        entries = await read_range(broker, key, message_type, first, last, 1)
        return entries[0] if entries else None

    status = await group_status(broker, key, group)
    if status is None:
        return Backlog(await length(broker, key), 0, 0, await first_of("-"), None)
    held = None
    if status.pending:
        _, oldest, _, _ = await broker.execute("XPENDING", key, group)
        if oldest is not None:  # acknowledged in between
            held = await first_of(oldest.decode(), oldest.decode())
    if id_order(status.last_delivered) >= id_order(await last_id(broker, key)):
        return Backlog(0, status.pending, status.consumers, None, held)
    undelivered = f"({status.last_delivered}"
    lag = status.lag
    # Redis 6.2 never says, and Redis 7 does not while deleted entries lie ahead of the group.
    if lag is None:
        lag = len(await read_raw(broker, key, undelivered, count=MAX_COUNTED))
    return Backlog(lag, status.pending, status.consumers, await first_of(undelivered), held)

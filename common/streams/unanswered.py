"""Deliveries whose answer was lost with the connection.

Redis has them as held by a consumer that never saw them, and nobody would look before their leases end.
"""

from typing import Any, Protocol

from tidemill.common.redis.broker import Broker
from tidemill.common.streams.entries import Fields, id_before
from tidemill.common.streams.log import fields_of


class Holder(Protocol):
    """What is asked of a consumer."""

    broker: Broker
    key: str
    group: str
    name: str
    held: Any


async def read_unanswered(consumer: Holder, count: int) -> list[tuple[bytes, Fields, int]]:
    """Up to `count` entries that the consumer holds and does not know, as (id, fields, attempts).

    Each is read by itself: Redis counts what is read as delivered once more, and that must not befall what
    the consumer works on. Entries that were trimmed meanwhile are acknowledged, and take no place.

    Raises:
        ResponseError: stream or group are gone.
    """
    broker, key, group = consumer.broker, consumer.key, consumer.group
    place = ("XREADGROUP", "GROUP", group, consumer.name, "COUNT", 1, "STREAMS", key)
    most = count + len(consumer.held)
    unanswered: dict[bytes, tuple[bytes, Fields, int]] = {}
    while True:
        rows = await broker.execute("XPENDING", key, group, "-", "+", most, consumer.name)
        known = {entry_id.encode() for entry_id in consumer.held} | unanswered.keys()
        attempts = {row[0]: int(row[3]) for row in rows if row[0] not in known}
        asked = list(attempts)[: count - len(unanswered)]
        replies = await broker.pipeline([(*place, id_before(i.decode())) for i in asked])
        found = dict(entry for reply in replies if isinstance(reply, list) for entry in reply[0][1])
        # An id that was not asked for stands behind one that is held no more.
        unanswered |= {i: (i, fields_of(found[i]), attempts[i]) for i in asked if found.get(i)}
        trimmed = [i for i in asked if i in found and not found[i]]
        if not trimmed:
            return list(unanswered.values())
        await broker.execute("XACK", key, group, *trimmed)

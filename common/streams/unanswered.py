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
    the consumer works on.

    Raises:
        ResponseError: stream or group are gone.
    """
    broker, key = consumer.broker, consumer.key
    most = count + len(consumer.held)
    rows = await broker.execute("XPENDING", key, consumer.group, "-", "+", most, consumer.name)
    attempts = {row[0]: int(row[3]) for row in rows if row[0].decode() not in consumer.held}
    place = ("XREADGROUP", "GROUP", consumer.group, consumer.name, "COUNT", 1, "STREAMS", key)
    replies = await broker.pipeline([(*place, id_before(i.decode())) for i in list(attempts)[:count]])
    found = dict(entry for reply in replies if isinstance(reply, list) for entry in reply[0][1])
    # Without fields is what was trimmed; an id that was not asked for stands behind one that is held no more.
    return [(i, fields_of(raw), attempts[i]) for i, raw in found.items() if raw and i in attempts]

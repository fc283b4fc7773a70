"""Entries under the ids of their numbers, as the trainer appends them."""

from collections.abc import Iterable

from tidemill.common.redis.broker import Broker
from tidemill.common.streams import append_missing
from tidemill.common.wire.messages import Message


async def append_numbered(broker: Broker, key: str, numbered: Iterable[tuple[int, Message]]) -> int:
    """Append each message that lies behind the end of the stream; returns how many."""
    messages = dict(numbered)
    return len(await append_missing(broker, key, list(messages), messages.__getitem__))

"""New messages that are asked for in the round trip of an acknowledgement, and wait for the next fetch.

They are held from the moment they come, like all that a consumer was given: whoever asked may be cancelled.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from tidemill.common.redis.broker import Broker
from tidemill.common.streams.entries import Delivery, Garbled
from tidemill.common.wire.messages import Message

M = TypeVar("M", bound=Message)
Found = list[Delivery[M] | Garbled]


class ReadAhead(Generic[M]):
    """`hold` makes messages of a reply to XREADGROUP."""

    def __init__(self, broker: Broker, hold: Callable[[Any], Found[M]]) -> None:
        self._broker, self._hold = broker, hold
        self._waiting: deque[Delivery[M] | Garbled] = deque()

    def ask(self, *command: Any) -> None:
        """Send a request with what leaves next. It is not repeated: `Consumer.fetch` asks anyway."""
        asked = self._broker.redis.ask(command)
        if asked is not None:
            asked.add_done_callback(self._receive)

    def _receive(self, asked: asyncio.Future[list[Any]]) -> None:
        if asked.cancelled() or asked.exception() is not None:
            self._broker.num_interruptions += 1  # Redis may have given messages that never came
            return
        (reply,) = asked.result()
        if not isinstance(reply, Exception):
            self._waiting.extend(self._hold(reply))

    def take(self, count: int) -> Found[M]:
        """Up to `count` of those that have come and are not lost since."""
        taken: Found[M] = []
        while self._waiting and len(taken) < count:
            entry = self._waiting.popleft()
            if isinstance(entry, Garbled) or not entry.is_lost:
                taken.append(entry)
        return taken

    def clear(self) -> None:
        """Forget them: the consumer hands back all that it holds."""
        self._waiting.clear()

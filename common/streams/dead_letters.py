"""Dead letters: messages that could not be processed. `requeueing.py` puts them back."""

import structlog

from tidemill.common.redis.broker import Broker
from tidemill.common.streams.entries import Entry, Fields, Garbled
from tidemill.common.streams.log import append, scan
from tidemill.common.telemetry import metrics
from tidemill.common.wire.keys import Keys
from tidemill.common.wire.messages import DeadLetter, Message

log = structlog.get_logger(__name__)

SCAN_BATCH = 16


def dead_letter(
    origin: str,
    entry_id: str,
    fields: Fields,
    error: str,
    worker: str = "",
    *,
    message: Message | None = None,
    attempts: int = 1,
) -> DeadLetter:
    """The dead letter of an entry of the stream `origin`; `message` is the decoded entry, if it could be."""
    return DeadLetter(
        origin=origin,
        entry_id=entry_id,
        fields={name.decode(errors="replace"): value for name, value in fields.items()},
        error=error,
        attempts=attempts,
        ticket=getattr(message, "ticket", -1),
        index=getattr(message, "index", -1),
        worker=worker,
    )


async def append_dead_letter(broker: Broker, dead_key: str, dead: DeadLetter) -> None:
    """Append the dead letter of an entry of a log that is read by offset; else `Consumer.dead_letter`."""
    await append(broker, dead_key, dead)
    metrics.DEAD_LETTERS.labels(dead.origin).inc()


class DeadLetterWriter:
    """Appends dead letters about one stream's entries, one for each entry; reads existing ones only once."""

    def __init__(self, broker: Broker, keys: Keys, key: str) -> None:
        self._broker = broker
        self._dead_key = keys.dead
        self._origin = keys.name_of(key)
        self._known: set[str] = set()
        self._first = "-"

    async def has(self, entry_id: str) -> bool:
        async for entry in scan(self._broker, self._dead_key, DeadLetter, self._first, SCAN_BATCH):
            self._first = f"({entry.entry_id}"
            if isinstance(entry, Entry) and entry.message.origin == self._origin:
                self._known.add(entry.message.entry_id)
        return entry_id in self._known

    async def append_unread(self, garbled: Garbled, worker: str) -> None:
        """Dead-letter an entry that cannot be decoded, unless it has a dead letter already."""
        # The log keeps the entry and no consumer group has it: it is read again after each restart.
        if not await self.has(garbled.entry_id):
            dead = dead_letter(self._origin, garbled.entry_id, garbled.fields, garbled.error, worker)
            await append_dead_letter(self._broker, self._dead_key, dead)
            log.error(
                "moved to the dead letters",
                stream=self._origin,
                entry=garbled.entry_id,
                error=garbled.error,
            )

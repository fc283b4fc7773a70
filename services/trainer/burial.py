"""Buries what the trainer alone reads and cannot decode: scores, which have no consumer group.

Trajectories that cannot be decoded are buried by the reward workers, tickets by the rollout workers.
"""

import structlog

from common import metrics
from common.broker import Broker
from common.keys import Keys
from common.messages import DeadLetter
from common.streams import Entry, Garbled, append, scan

log = structlog.get_logger(__name__)

SCAN_BATCH = 16


async def bury_unread(broker: Broker, keys: Keys, key: str, garbled: Garbled, worker: str) -> None:
    """Put an entry of a log into the dead letters, unless it is there already.

    The log keeps the entry, so it may be read again after a restart. Looking through all letters is dear,
    but there are few, and this happens for each of them once.
    """
    origin = keys.name_of(key)
    if await is_buried(broker, keys, origin, garbled.entry_id):
        return
    buried = DeadLetter(
        origin=origin,
        entry_id=garbled.entry_id,
        fields={name.decode(errors="replace"): value for name, value in garbled.fields.items()},
        error=garbled.error,
        worker=worker,
    )
    await append(broker, keys.dead, buried)
    metrics.DEAD_LETTERS.labels(origin).inc()
    log.error("moved to the dead letters", stream=origin, entry=garbled.entry_id, error=garbled.error)


async def is_buried(broker: Broker, keys: Keys, origin: str, entry_id: str) -> bool:
    """Whether the dead letters hold this entry of a stream."""
    async for entry in scan(broker, keys.dead, DeadLetter, batch=SCAN_BATCH):
        letter = entry.message if isinstance(entry, Entry) else None
        if letter and (letter.origin, letter.entry_id) == (origin, entry_id):
            return True
    return False

"""Dead letters as entries of a stream: put back exactly once, or removed.

Putting a message back and removing its letter are one atomic unit, so that a letter can be put back once
only, whoever asks and however often. The message itself is never appended a second time where its stream
still holds it: its entry becomes pending again in its consumer group.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from common.redis.broker import Broker
from common.streams.entries import Fields

DONE, LETTER_GONE, MESSAGE_GONE = 1, 0, -1
"""What `requeue` answers: put back; the letter is gone; the stream has let go of the message."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What is known of a half-done group: where, what is published, and the version it was started at."""

    key: str
    published: Sequence[int] = ()
    started_version: int | None = None


async def requeue(
    broker: Broker,
    dead_key: str,
    letter_id: str,
    key: str,
    group: str,
    entry_id: str,
    *,
    lease_s: float,
    progress: Progress,
) -> int:
    """Make entry `entry_id` of `key` pending again, as a first delivery, and remove its letter.

    Whoever reclaims next takes it. Returns DONE, LETTER_GONE or MESSAGE_GONE.
    """
    version = "" if progress.started_version is None else progress.started_version
    args = [letter_id, group, entry_id, int(lease_s * 1000) + 1, version, *progress.published]
    return int(await broker.script("requeue", [dead_key, key, progress.key], args))


async def reappend(broker: Broker, dead_key: str, letter_id: str, key: str, fields: Fields) -> bool:
    """Append the letter's bytes to a log that is read by offset; False where the letter is gone."""
    flat = [part for pair in fields.items() for part in pair]
    return bool(await broker.script("reappend", [dead_key, key], [letter_id, *flat]))


async def remove_entries(broker: Broker, key: str, entry_ids: Iterable[str]) -> int:
    """Remove entries by id; returns how many were there. Of all streams, only dead letters end this way."""
    ids = list(entry_ids)
    return int(await broker.execute("XDEL", key, *ids)) if ids else 0


async def has_entry(broker: Broker, key: str, entry_id: str) -> bool:
    """Whether the stream holds this entry now."""
    return bool(await broker.execute("XRANGE", key, entry_id, entry_id))

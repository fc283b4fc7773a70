"""Puts messages back whose dead letters are removed.

Both are one atomic unit: repeated or concurrent requests put a message back once. A message that its stream
still holds is not appended again: its entry becomes pending again in its consumer group.
"""

from collections.abc import Iterable, Sequence

from tidemill.common.redis import lease_scripts
from tidemill.common.redis.broker import Broker
from tidemill.common.redis.lease_scripts import RequeueReply
from tidemill.common.streams.entries import NOBODY


async def requeue(
    broker: Broker,
    dead_key: str,
    dead_id: str,
    key: str,
    group: str,
    entry_id: str,
    *,
    lease_s: float,
    progress_key: str,
    published: Sequence[int] = (),
    started_version: int | None = None,
) -> RequeueReply:
    """Make an entry pending, as a first delivery, and remove its dead letter: the next reclaim takes it.

    Args:
        broker, dead_key, dead_id: The dead letter.
        key, group, entry_id: The entry, and the consumer group that shall have it.
        lease_s: Lease of the group: the entry counts as idle for longer, so that no worker has to wait.
        progress_key, published, started_version: For a ticket, the progress of its incomplete group.
    """
    return await lease_scripts.requeue(
        broker,
        dead=dead_key,
        stream=key,
        progress=progress_key,
        dead_id=dead_id,
        group=group,
        entry_id=entry_id,
        # As if its holder had been silent for more than a lease: the next look takes it.
        idle_ms=int(lease_s * 1000) + 1,
        version=started_version,
        holder=NOBODY,
        published=published,
    )


async def remove_entries(broker: Broker, key: str, entry_ids: Iterable[str]) -> int:
    """Remove entries by id; returns how many were there. Used for dead letters only."""
    ids = list(entry_ids)
    return int(await broker.execute("XDEL", key, *ids)) if ids else 0

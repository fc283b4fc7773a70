"""What there is of a stream, without reading it: counts, ends and bytes."""

from dataclasses import dataclass

from common.archive.manifest import Manifest
from common.broker import Broker
from common.entries import START, Entry, Garbled, id_order
from common.history.selection import StreamName, time_of
from common.keys import Keys
from common.messages import Message
from common.streams import length, memory_bytes, read_back, read_range


@dataclass(frozen=True, slots=True)
class StreamSummary:
    """One stream of a run, wherever its entries are. Times are seconds since 1970, None where unknown."""

    name: StreamName
    redis_entries: int = 0
    redis_bytes: int = 0
    """Of Redis's memory, as it estimates it."""
    archived_entries: int = 0
    archived_bytes: int = 0
    """On the disk."""
    segments: int = 0
    removed_entries: int = 0
    """Archived once, and gone by the run's retention."""
    entries: int = 0
    """In the archive, in Redis, or in both, each once; an entry that is in both counts for the archive."""
    first_id: str = ""
    last_id: str = ""
    first_time: float | None = None
    last_time: float | None = None


async def summarise(
    broker: Broker | None, keys: Keys, manifest: Manifest, stream: StreamName
) -> StreamSummary:
    """The summary of one stream, from its manifest and from the ends of what Redis holds."""
    first = last = None
    in_redis = redis_bytes = beyond = 0
    if broker is not None:
        key = stream.key(keys)
        in_redis, redis_bytes = await length(broker, key), await memory_bytes(broker, key)
        ends = await read_range(broker, key, stream.message_type, count=1)
        newest = await read_back(broker, key, stream.message_type, count=1)
        first, last = (ends[0] if ends else None), (newest[0] if newest else None)
        beyond = await _beyond(broker, key, stream, manifest, in_redis)
    archived = manifest.segments
    is_newer = last is not None and id_order(last.entry_id) > id_order(manifest.last_id)
    return StreamSummary(
        stream,
        redis_entries=in_redis,
        redis_bytes=redis_bytes,
        archived_entries=manifest.entries,
        archived_bytes=manifest.num_bytes,
        segments=len(archived),
        removed_entries=manifest.removed.entries,
        entries=manifest.entries + beyond,
        first_id=archived[0].first_id if archived else first.entry_id if first else "",
        last_id=last.entry_id if last and is_newer else archived[-1].last_id if archived else "",
        first_time=_archived_time(manifest, 0, 0) if archived else _time(first),
        last_time=_time(last) if is_newer else _archived_time(manifest, -1, 1),
    )


async def _beyond(broker: Broker, key: str, stream: StreamName, manifest: Manifest, in_redis: int) -> int:
    """How many entries Redis holds that the archive does not."""
    if manifest.last_id == START:
        return in_redis
    count, first = 0, f"({manifest.last_id}"
    while entries := await read_range(broker, key, stream.message_type, first, count=1024):
        count, first = count + len(entries), f"({entries[-1].entry_id}"
    return count


def _time(record: Entry[Message] | Garbled | None) -> float | None:
    return time_of(record.message) if isinstance(record, Entry) else None


def _archived_time(manifest: Manifest, segment: int, end: int) -> float | None:
    if not manifest.segments:
        return None
    bounds = manifest.segments[segment].bounds.get("time")
    return bounds[end] if bounds else None

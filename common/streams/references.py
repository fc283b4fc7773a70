"""Reads trajectories again that were acknowledged: those of a group that is scored as a whole.

They stay in their stream: nothing is trimmed that a group without all of its scores needs (`trimming.py` for
our own trainer, `serve/gateway.py` for others).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from redis import exceptions as redis_errors

from tidemill.common.redis.broker import Broker
from tidemill.common.streams.entries import START, Entry, decoded
from tidemill.common.streams.log import entries_of, read_range, read_raw
from tidemill.common.wire.messages import Trajectory, TrajectoryKey, fault_of

READ_AT_ONCE = 8
"""Most trajectories in one answer of Redis, which limits the size of answers: each may be a whole message."""
SEARCH_COUNT = 64


@dataclass(frozen=True, slots=True)
class Reference:
    """A trajectory in its stream: the entry, and by what a copy of it is recognised.

    Example: `entry_id` "1764350000000-3", `key` (12, 3), `tokens_digest` the 16 digits of its tokens.
    """

    entry_id: str
    key: TrajectoryKey
    tokens_digest: str

    def matches(self, trajectory: Trajectory) -> bool:
        # Also after Redis has lost its tail and given the id of the entry to another one.
        return trajectory.key == self.key and trajectory.tokens_digest == self.tokens_digest


async def read_trajectories(
    broker: Broker, key: str, references: Sequence[Reference]
) -> dict[Reference, Trajectory]:
    """The trajectories that the stream `key` still has, with their payloads.

    An entry that is gone is looked for by its key: an append whose answer was lost is repeated, so that there
    may be two copies, of which only the later one is known to who trims the stream.
    """
    trajectories: dict[Reference, Trajectory] = {}
    for start in range(0, len(references), READ_AT_ONCE):
        asked = references[start : start + READ_AT_ONCE]
        reads = [("XRANGE", key, reference.entry_id, reference.entry_id) for reference in asked]
        for reference, reply in zip(asked, await broker.pipeline(reads), strict=True):
            if isinstance(reply, redis_errors.RedisError):
                raise reply
            for entry in await entries_of(broker, reply, Trajectory):
                if isinstance(entry, Entry) and _is_whole(entry.message) and reference.matches(entry.message):
                    trajectories[reference] = entry.message
    missing = {reference.key: reference for reference in references if reference not in trajectories}
    for reference, entry_id in (await _copies_of(broker, key, missing)).items():
        for entry in await read_range(broker, key, Trajectory, entry_id, entry_id):
            if isinstance(entry, Entry) and _is_whole(entry.message) and reference.matches(entry.message):
                trajectories[reference] = entry.message
    return trajectories


def _is_whole(trajectory: Trajectory) -> bool:
    return not fault_of(trajectory)


async def _copies_of(
    broker: Broker, key: str, missing: dict[TrajectoryKey, Reference]
) -> dict[Reference, str]:
    """Ids of entries with these keys."""
    copies: dict[Reference, str] = {}
    position = START
    # Payloads are left where they are: only keys are read here.
    while missing and (rows := await read_raw(broker, key, f"({position}", count=SEARCH_COUNT)):
        for entry_id, fields in rows:
            entry = decoded(entry_id.encode(), fields, Trajectory, broker.max_bytes)
            if isinstance(entry, Entry) and entry.message.key in missing:
                copies[missing[entry.message.key]] = entry_id
        position = rows[-1][0]
    return copies

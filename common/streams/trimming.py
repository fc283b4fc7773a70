"""The only way in which entries leave a stream: from its beginning. The server remembers how far."""

import json
from collections.abc import Sequence

from tidemill.common.redis.broker import Broker
from tidemill.common.streams.entries import START, id_after
from tidemill.common.streams.log import Mark, MarkLostError, length, read_raw

KEPT_COMMITS = 32
"""The newest stay, for people who watch the run."""
KEPT_LETTERS = 256
"""So many dead letters stay that are in no archive, for people who may put them back."""
TRIMMED = "trimmed:{}"
"""Field of the run's state for a stream: the id below which this server has trimmed it. One that has lost the
trim has lost the field too."""


async def trim_before(
    broker: Broker, key: str, entry_id: str, mark: Mark | None = None, held: Sequence[str] = ()
) -> int:
    """Remove entries below `entry_id`; returns how many. `held`: of tickets, the group whose workers may hold
    some of them, and what the keys of their progress begin with; both go with them.

    Raises:
        MarkLostError: the server has not got the `mark`; nothing was removed.
    """
    if mark is None:
        return int(await broker.execute("XTRIM", key, "MINID", entry_id))
    values = [entry_id, mark.field, mark.value, _field(key), *held]
    removed = int(await broker.script("trim", [key, mark.key], values))
    if removed < 0:
        raise MarkLostError(f"Redis has lost a mark in {mark.key}")
    return removed


async def newest_begin(broker: Broker, key: str, num_kept: int = KEPT_LETTERS) -> str:
    """The id below which entries lie that are not among the newest `num_kept`; perhaps not all of them, where
    there are many. `START` where there are none."""
    num_older = await length(broker, key) - num_kept
    # Read from the beginning, each once: what goes, not what stays.
    older = await read_raw(broker, key, count=min(num_older, num_kept)) if num_older > 0 else []
    return id_after(older[-1][0]) if older else START


async def trimmed_below(broker: Broker, state_key: str, key: str) -> str:
    """The id below which this server has trimmed the stream under a mark; `START` where it has not."""
    raw = await broker.execute("HGET", state_key, _field(key))
    return START if raw is None else str(json.loads(raw))


async def continue_after(broker: Broker, key: str, known: str, entry_id: str, *, is_numbered: bool) -> bool:
    """Have new entries come after `entry_id`, though Redis has lost what lies between `known` and it. False
    where the stream has new ones there already. Numbered entries choose their ids themselves."""
    return bool(await broker.script("continue_after", [key], [known, entry_id, 0 if is_numbered else 1]))


def _field(key: str) -> str:
    return TRIMMED.format(key.partition("}:")[2])

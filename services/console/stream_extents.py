"""How much of each stream there is, where it is kept, and how far its readers are."""

import time
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from common.history import History, StreamName
from common.history.selection import time_of
from common.keys import REWARD_GROUP, ROLLOUT_GROUP
from common.messages import Ticket, Trajectory
from common.streams import Entry, group_status, last_id, length
from services.console.shown_text import NOTHING, took, when

GROUPS = {Ticket: ROLLOUT_GROUP, Trajectory: REWARD_GROUP}
"""Consumer groups by what they consume."""


@dataclass(frozen=True, slots=True)
class Extent:
    """One stream of a run."""

    stream: StreamName
    num_redis: int
    first_id: str
    last_id: str
    last_at: float | None
    """When the newest message was made."""
    group: str = ""
    pending: int | None = None
    """Entries that a consumer holds."""
    lag: int | None = None
    """Entries that no consumer has been given; None where that is not known."""

    def as_tree(self) -> dict[str, Any]:
        """For programs."""
        age_s = time.time() - self.last_at if self.last_at else None
        return asdict(self) | {"stream": self.stream.value, "age_s": age_s}


async def extents(history: History) -> list[Extent]:
    """All streams, in the order in which messages flow."""
    return [await _extent(history, stream) for stream in StreamName]


def extents_table(found: list[Extent]) -> Table:
    """For people."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for title in ("stream", "in Redis", "first", "last", "newest", "age", "readers"):
        is_number = title in ("in Redis", "age")
        table.add_column(title, justify="right" if is_number else "left", no_wrap=title != "readers")
    for extent in found:
        table.add_row(
            extent.stream.value,
            f"{extent.num_redis:,}",
            extent.first_id or NOTHING,
            extent.last_id or NOTHING,
            when(extent.last_at or 0.0),
            took(time.time() - extent.last_at) if extent.last_at else NOTHING,
            Text(_readers(extent)),
        )
    return table


def _readers(extent: Extent) -> str:
    if not extent.group:
        return ""
    lag = "not known" if extent.lag is None else f"{extent.lag:,}"
    return f"{extent.group}: {extent.pending:,} held, {lag} to come"


async def _extent(history: History, stream: StreamName) -> Extent:
    first, _ = await _end(history, stream, newest=False)
    last, last_at = await _end(history, stream, newest=True)
    extent = Extent(stream, 0, first, last, last_at)
    if history.broker is None:
        return extent
    key, group = stream.key(history.keys), GROUPS.get(stream.message_type, "")
    extent = replace(extent, num_redis=await length(history.broker, key))
    status = await group_status(history.broker, key, group) if group else None
    if status is None:
        return extent
    # A group that has read to the end lags behind by nothing, also where the server cannot count.
    lag = 0 if status.last_delivered == await last_id(history.broker, key) else status.lag
    return replace(extent, group=group, pending=status.pending, lag=lag)


async def _end(history: History, stream: StreamName, newest: bool) -> tuple[str, float | None]:
    """The id of the first or the last entry, and when it was made."""
    async for record in history.scan(stream, newest_first=newest):
        return record.entry_id, time_of(record.message) if isinstance(record, Entry) else None
    return "", None

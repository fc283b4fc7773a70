"""How much of each stream there is, where it is kept, and how far its readers are."""

import time
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from common.history import History, StreamSummary
from common.keys import REWARD_GROUP, ROLLOUT_GROUP
from common.messages import Ticket, Trajectory
from common.streams import group_status, last_id
from services.console.shown_text import NOTHING, took, when

GROUPS = {Ticket: ROLLOUT_GROUP, Trajectory: REWARD_GROUP}
"""Consumer groups by what they consume."""


@dataclass(frozen=True, slots=True)
class Extent:
    """One stream of a run, with its consumer group where it has one."""

    summary: StreamSummary
    group: str = ""
    pending: int | None = None
    """Entries that a consumer holds."""
    lag: int | None = None
    """Entries that no consumer has been given; None where that is not known."""

    @property
    def age_s(self) -> float | None:
        """Since the newest message was made."""
        return time.time() - self.summary.last_time if self.summary.last_time else None

    def as_tree(self) -> dict[str, Any]:
        """For programs."""
        summary = asdict(self.summary)
        readers = {"group": self.group, "pending": self.pending, "lag": self.lag}
        return {"stream": summary.pop("name").value, **summary, "age_s": self.age_s, **readers}


async def extents(history: History) -> list[Extent]:
    """All streams, in the order in which messages flow."""
    return [await _with_readers(history, summary) for summary in await history.summary()]


def extents_table(found: list[Extent]) -> Table:
    """For people."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for title in ("stream", "entries", "in Redis", "archived", "first", "last", "newest", "age", "readers"):
        is_number = title in ("entries", "in Redis", "archived", "age")
        table.add_column(title, justify="right" if is_number else "left", no_wrap=title != "readers")
    for extent in found:
        summary = extent.summary
        table.add_row(
            summary.name.value,
            f"{summary.entries:,}",
            _amount(summary.redis_entries, summary.redis_bytes),
            _amount(summary.archived_entries, summary.archived_bytes),
            summary.first_id or NOTHING,
            summary.last_id or NOTHING,
            when(summary.last_time or 0.0),
            took(extent.age_s),
            Text(_readers(extent)),
        )
    return table


def _amount(entries: int, num_bytes: int) -> str:
    return f"{entries:,} ({num_bytes / 1e6:,.1f} MB)" if entries else NOTHING


def _readers(extent: Extent) -> str:
    if not extent.group:
        return ""
    lag = "not known how many" if extent.lag is None else f"{extent.lag:,}"
    return f"{extent.group}: {extent.pending:,} held, {lag} to come"


async def _with_readers(history: History, summary: StreamSummary) -> Extent:
    key, group = summary.name.key(history.keys), GROUPS.get(summary.name.message_type, "")
    status = await group_status(history.broker, key, group) if history.broker and group else None
    if status is None or history.broker is None:
        return Extent(summary)
    # A group that has read to the end lags behind by nothing, also where the server cannot count.
    lag = 0 if status.last_delivered == await last_id(history.broker, key) else status.lag
    return Extent(summary, group, status.pending, lag)

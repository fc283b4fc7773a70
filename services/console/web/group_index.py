"""All groups of a run in memory, in step with its streams, so that pages answer in milliseconds.

Guarantees: streams are read through `History`, each entry once; the loop gets its turn after every few
entries; no more than `MAX_GROUPS` rows of a lane are kept, the newest, and how many were given up is counted.
"""

import asyncio
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from common.entries import Entry, id_order
from common.history import History, Selection, StreamName
from common.messages import Commit, Lane, Message, Score, Ticket, Trajectory
from services.console.web.group_row import WHOLE_GROUP, GroupRow

MAX_GROUPS = 250_000
"""Of each lane."""
TURN_ENTRIES = 64
"""Entries between two turns of everybody else on the loop."""

_STREAMS = {
    Lane.TRAIN: (StreamName.PROMPTS, StreamName.TRAJECTORIES, StreamName.SCORES),
    Lane.EVAL: (StreamName.PROMPTS_EVAL, StreamName.TRAJECTORIES_EVAL, StreamName.SCORES_EVAL),
}


@dataclass(slots=True)
class StepRow:
    """One committed step: its numbers, and which groups it used."""

    step: int
    metrics: dict[str, float]
    started_at: float = 0.0
    finished_at: float = 0.0
    groups: tuple[int, ...] = ()
    num_dropped: int = 0


@dataclass(slots=True)
class GroupIndex:
    """Groups by lane and ticket, and steps by number."""

    groups: dict[Lane, dict[int, GroupRow]] = field(default_factory=lambda: {lane: {} for lane in Lane})
    steps: dict[int, StepRow] = field(default_factory=dict)
    num_forgotten: int = 0
    num_garbled: int = 0
    is_complete: bool = False
    """Whether everything that was there at the start has been read."""
    generation: int = 0
    """Grows with every change."""
    max_groups: int = MAX_GROUPS
    _positions: dict[StreamName, str] = field(default_factory=dict)
    _order: dict[Lane, deque[int]] = field(default_factory=lambda: {lane: deque() for lane in Lane})
    _floor: dict[Lane, int] = field(default_factory=lambda: dict.fromkeys(Lane, -1))
    """Tickets up to here were given up."""

    def get(self, ticket: int, lane: Lane) -> GroupRow | None:
        """The row of a ticket."""
        return self.groups[lane].get(ticket)

    def rows(self, lane: Lane) -> Iterator[GroupRow]:
        """All rows of a lane, by when they were first seen."""
        return iter(self.groups[lane].values())

    async def follow(self, history: History) -> int:
        """Read what is new in all streams; returns how many entries that were."""
        names = [StreamName.COMMITS, *_STREAMS[Lane.TRAIN], *_STREAMS[Lane.EVAL]]
        num_new = 0
        for name in names:
            num_new += await self._follow(history, name)
        self.is_complete = True
        return num_new

    async def _follow(self, history: History, name: StreamName) -> int:
        num_new = 0
        selection = Selection(first_id=self._positions.get(name, "-"))
        async for record in history.scan(name, selection):
            self._positions[name] = _next_id(record.entry_id)
            self.generation += 1
            if isinstance(record, Entry):
                self._add(name.lane, record.entry_id, record.message)
            else:
                self.num_garbled += 1
            num_new += 1
            if num_new % TURN_ENTRIES == 0:
                await asyncio.sleep(0)
        return num_new

    def _add(self, lane: Lane, entry_id: str, message: Message) -> None:
        match message:
            case Ticket():
                self._row(message.ticket, lane).add_ticket(message)
            case Trajectory():
                self._row(message.ticket, lane).add_trajectory(entry_id, message)
            case Score():
                self._row(message.ticket, lane).add_score(entry_id, message)
            case Commit():
                self._add_commit(message)

    def _add_commit(self, commit: Commit) -> None:
        self.steps[commit.step] = StepRow(
            commit.step,
            dict(commit.metrics),
            commit.started_at,
            commit.finished_at,
            commit.groups,
            len(commit.dropped),
        )
        for ticket in commit.groups:
            self._row(ticket, Lane.TRAIN).trained_step = commit.step
        for ticket, index, reason in commit.dropped:
            row = self._row(ticket, Lane.TRAIN)
            if index == WHOLE_GROUP:
                row.drop(commit.step, reason)
            else:
                row.num_dropped += 1

    def _row(self, ticket: int, lane: Lane) -> GroupRow:
        """The row of a ticket; one that is kept nowhere where the ticket was given up."""
        rows, order = self.groups[lane], self._order[lane]
        row = rows.get(ticket)
        if row is not None:
            return row
        row = GroupRow(ticket)
        if ticket > self._floor[lane]:
            rows[ticket] = row
            order.append(ticket)
            if len(order) > self.max_groups:
                oldest = order.popleft()
                del rows[oldest]
                self._floor[lane] = max(self._floor[lane], oldest)
                self.num_forgotten += 1
        return row


def _next_id(entry_id: str) -> str:
    """The smallest id above: reading from it on goes on behind `entry_id`."""
    milliseconds, sequence = id_order(entry_id)
    return f"{milliseconds}-{sequence + 1}"

"""Reads groups back as the trainer found them, step after step, from streams that may be larger than memory.

Guarantees: a group's trajectories and scores come in the order of their streams, as the trainer took them in
(`streams/recorded_group.py`); every entry is read once; open groups are bounded by what admission allowed,
until `close`.
"""

from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self, cast

from tidemill.common.errors import TidemillError
from tidemill.common.history.history import History, Record
from tidemill.common.streams.entries import START, Entry, id_after
from tidemill.common.streams.recorded_group import GroupEntry, RecordedGroup
from tidemill.common.streams.selection import Selection, StreamName
from tidemill.common.wire.messages import (
    Commit,
    Message,
    Score,
    Ticket,
    Trajectory,
    TrajectoryKey,
    is_demonstration,
)

SPARE_TICKETS = 256
"""Groups that may be open beyond twice what admission allows: a resumed run may have had other limits."""


class MissingRecordsError(TidemillError):
    """A group that a commit names is not in the run's streams, or only a part of it."""

    def __init__(self, tickets: Sequence[int]) -> None:
        self.tickets = tuple(tickets)
        super().__init__(
            f"the streams hold no complete group for {len(tickets)} ticket(s), the first is {tickets[0]}: "
            "they were trimmed, or Redis has lost them"
        )


class GroupCursor:
    """Reads trajectories and scores forward. `async with GroupCursor(...) as cursor:`"""

    def __init__(
        self,
        history: History,
        group_size: int,
        max_tickets: int,
        positions: Mapping[StreamName, str] | None = None,
        is_wanted: Callable[[int], bool] = lambda _: True,
    ) -> None:
        """No group has more samples than `group_size`; at most `max_tickets` are outstanding; reading starts
        after the ids in `positions`."""
        self.group_size = group_size
        self.is_wanted = is_wanted
        self.most_open = 2 * max_tickets + SPARE_TICKETS
        self.open: dict[int, RecordedGroup] = {}
        self._closed: set[int] = set()
        positions = positions or {}
        self._trajectories = _follow(history, StreamName.TRAJECTORIES, positions)
        self._scores = _follow(history, StreamName.SCORES, positions)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._trajectories.aclose()
        await self._scores.aclose()

    async def groups(self, tickets: Sequence[int]) -> dict[int, RecordedGroup]:
        """The complete groups of these tickets, which stay open until `close`.

        Raises:
            MissingRecordsError: the streams do not have all of them.
        """
        for ticket in tickets:
            self.open.setdefault(ticket, RecordedGroup(ticket, group_size=self.group_size))
        # First: trajectories tell how many samples a group has, and of which tokens a score has to be.
        missing = await self._read(self._trajectories, "trajectories", tickets)
        missing |= await self._read(self._scores, "scores", tickets)
        if missing:
            raise MissingRecordsError(sorted(missing))
        return {ticket: self.open[ticket] for ticket in tickets}

    def close(self, tickets: Iterable[int]) -> None:
        """Forget groups; what is read of them later does not count."""
        for ticket in tickets:
            self.open.pop(ticket, None)
            self._closed.add(ticket)

    async def _read(
        self, stream: AsyncGenerator[Record, None], attribute: str, tickets: Sequence[int]
    ) -> set[int]:
        """Read until this part of every group is whole, the stream ends, or more is open than can have been
        outstanding; returns the tickets of which something is missing."""
        missing = {ticket for ticket in tickets if self._lacks(ticket, attribute)}
        while missing and len(self.open) <= self.most_open:
            record = await anext(stream, None)
            if record is None:
                break
            if isinstance(record, Entry):
                ticket = self._take(record)
                if ticket in missing and not self._lacks(ticket, attribute):
                    missing.remove(ticket)
        return missing

    def _lacks(self, ticket: int, attribute: str) -> bool:
        group = self.open[ticket]
        if attribute == "scores" and is_demonstration(ticket):
            return False
        return len(getattr(group, attribute)) < group.group_size

    def _take(self, entry: Entry[Message]) -> int:
        """Keep an entry if it counts; returns its ticket."""
        message = entry.message
        assert isinstance(message, Trajectory | Score)
        ticket = message.ticket
        if ticket not in self._closed and self.is_wanted(ticket):
            group = self.open.setdefault(ticket, RecordedGroup(ticket, group_size=self.group_size))
            if isinstance(message, Trajectory) and not group.trajectories:
                group.group_size = min(message.group_size, group.group_size)
            group.take(cast(GroupEntry, entry))
        return ticket


def _follow(
    history: History, stream: StreamName, positions: Mapping[StreamName, str]
) -> AsyncGenerator[Record, None]:
    records = history.scan(stream, Selection(first_id=id_after(positions.get(stream, START))))
    # `scan` returns an async generator, though its annotation says less.
    return cast(AsyncGenerator[Record, None], records)


WHOLE_GROUP = -1
"""The index under which a commit names a group that was dropped as a whole."""


def dropped_groups(commit: Commit) -> list[tuple[int, str]]:
    """(ticket, reason) of each group that was replaced before the step."""
    return [(ticket, reason) for ticket, index, reason in commit.dropped if index == WHOLE_GROUP]


def left_out(commit: Commit) -> list[tuple[int, int, str]]:
    """(ticket, index, reason) of each sample that its group was trained without."""
    return [drop for drop in commit.dropped if drop[1] != WHOLE_GROUP]


def micro_batches_of(commit: Commit) -> Iterator[tuple[int, int, list[TrajectoryKey]]]:
    """(mini-batch, micro-batch, keys of its samples), in the order in which they were trained."""
    for mini, micros in enumerate(commit.mini_batches):
        for micro, keys in enumerate(micros):
            yield mini, micro, [(ticket, index) for ticket, index in keys]


def advantages_of(commit: Commit, ticket: int) -> dict[int, float]:
    """Advantage of each trained sample of a ticket. The commit lists them by index, less those left out."""
    trained = sorted({index for number, index in commit.trained_keys if number == ticket})
    values = commit.advantages.get(str(ticket), [])
    return dict(zip(trained, values, strict=True)) if len(values) == len(trained) else {}


@dataclass(slots=True)
class TicketOutcomes:
    """How tickets of training ended, by number.

    Example: `trained` {12: 3}, `dropped` {13: 3}, `replaced_by` {13: 20}: step 3 trained ticket 12, and left
    out 13, for which ticket 20 was issued.
    """

    trained: dict[int, int] = field(default_factory=dict)
    """Ticket -> step that trained its group."""
    dropped: dict[int, int] = field(default_factory=dict)
    """Ticket -> step whose commit says that it was replaced."""
    replaced_by: dict[int, int] = field(default_factory=dict)
    """Ticket -> the ticket that was issued in its place."""

    def __contains__(self, ticket: int) -> bool:
        return ticket in self.trained or ticket in self.dropped

    def add(self, message: Commit | Ticket) -> None:
        if isinstance(message, Commit):
            self.trained.update((ticket, message.step) for ticket in message.groups)
            self.dropped.update((ticket, message.step) for ticket, _ in dropped_groups(message))
        elif message.replaces >= 0:
            self.replaced_by[message.replaces] = message.ticket

    @classmethod
    async def read(cls, history: History) -> "TicketOutcomes":
        outcomes = cls()
        async for commit in history.messages(StreamName.COMMITS, Commit):
            outcomes.add(commit)
        async for ticket in history.messages(StreamName.PROMPTS, Ticket):
            outcomes.add(ticket)
        return outcomes

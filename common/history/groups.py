"""Reads groups back as the trainer found them, step after step, from streams that may be larger than memory.

Guarantees: the first entry of a key wins, and a group's trajectories and scores come in the order of their
streams, as the trainer took them in; every entry is read once; open groups are bounded by what admission
allowed, until `close`.
"""

from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self, cast

from tidemill.common.errors import TidemillError
from tidemill.common.history.history import History, Record
from tidemill.common.streams.entries import START, Entry, id_after
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


GroupEntry = Entry[Trajectory] | Entry[Score]


@dataclass(slots=True)
class RecordedGroup:
    """Trajectories and scores of one ticket, by index: as they arrive, or as a replay reads them.

    Example: `ticket` 12, `group_size` 4, `trajectories` with the indices 0, 1 and 3, `scores` with 0 and 3:
    sample 1 waits for its score, and sample 2 is still generated.
    """

    ticket: int
    step: int = -1
    """Step that the ticket was issued for; -1: not known."""
    trajectories: dict[int, Trajectory] = field(default_factory=dict)
    scores: dict[int, Score] = field(default_factory=dict)
    group_size: int = 0
    trajectory_ids: dict[int, str] = field(default_factory=dict)
    score_ids: dict[int, str] = field(default_factory=dict)
    """Ids of their entries; both are empty where a committed step is trained again."""
    other_scores: list[Entry[Score]] = field(default_factory=list)
    """Further scores of keys without a trajectory, of other tokens than the first: the trajectory decides."""

    @property
    def is_demonstration(self) -> bool:
        """Whether the group is trained on as it is: it has no scores, and no version produced it."""
        return is_demonstration(self.ticket)

    def take(self, entry: GroupEntry) -> list[GroupEntry]:
        """Keep the first trajectory of a key, and the first score of that trajectory's tokens. Returns what
        does not count: this entry, or a score that came before its trajectory and is of other tokens."""
        message = entry.message
        index = entry.message.index
        ids = self.trajectory_ids if isinstance(message, Trajectory) else self.score_ids
        if isinstance(message, Score):
            trajectory = self.trajectories.get(index)
            first = self.scores.get(index)
            # A demonstration is complete without a score, and must not become complete twice.
            if self.is_demonstration or self.is_of_other_tokens(message):
                return [entry]
            is_of_others = trajectory is None and first is not None and not message.is_of(first.tokens_digest)
            if is_of_others and len(self.other_scores) < self.group_size:  # memory is bounded
                self.other_scores.append(Entry(entry.entry_id, message))
                return []
        if index in ids or index >= self.group_size:
            return [entry]
        ids[index] = entry.entry_id
        if isinstance(message, Score):
            self.scores[index] = message
            return []
        self.trajectories[index] = message
        return self._choose_score(message)

    def is_of_other_tokens(self, message: Trajectory | Score) -> bool:
        """Whether it is a score of other tokens than the key's trajectory, as after Redis lost the first."""
        trajectory = self.trajectories.get(message.index)
        return (
            isinstance(message, Score)
            and trajectory is not None
            and not message.is_of(trajectory.tokens_digest)
        )

    def _choose_score(self, sample: Trajectory) -> list[GroupEntry]:
        """Of the scores that came before their trajectory, keep the first one of its tokens."""
        if sample.index not in self.scores:
            return []
        came = [entry for entry in self.other_scores if entry.message.index == sample.index]
        self.other_scores = [entry for entry in self.other_scores if entry.message.index != sample.index]
        if self.scores[sample.index].is_of(sample.tokens_digest):
            return []
        refused = Entry(self.score_ids.pop(sample.index), self.scores.pop(sample.index))
        for entry in came:
            if entry.message.is_of(sample.tokens_digest):
                # Through `take`, which notes the entry's id too: a checkpoint's positions must lie below it.
                self.take(entry)
                break
        return [refused]


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

"""What commits and tickets say of tickets: trained, dropped, replaced, and where in a step."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from common.history.history import History
from common.streams.selection import StreamName
from common.wire.messages import Commit, Ticket, TrajectoryKey

WHOLE_GROUP = -1
"""The index under which a commit names a group that was dropped as a whole."""


def dropped_groups(commit: Commit) -> list[tuple[int, str]]:
    """(ticket, reason) of each group that was replaced before the step."""
    return [(ticket, reason) for ticket, index, reason in commit.dropped if index == WHOLE_GROUP]


def left_out(commit: Commit) -> list[tuple[int, int, str]]:
    """(ticket, index, reason) of each sample that its group was trained without."""
    return [drop for drop in commit.dropped if drop[1] != WHOLE_GROUP]


def tickets_of(commit: Commit) -> list[int]:
    """Every ticket that the commit names, trained or not."""
    return [*commit.groups, *(ticket for ticket, _, _ in commit.dropped)]


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
    """The ends that tickets of training have come to, by number."""

    trained: dict[int, int] = field(default_factory=dict)
    """Ticket -> step that trained its group."""
    dropped: dict[int, int] = field(default_factory=dict)
    """Ticket -> step whose commit tells that it was replaced."""
    replaced_by: dict[int, int] = field(default_factory=dict)
    """Ticket -> the ticket that was issued in its place."""

    def __contains__(self, ticket: int) -> bool:
        return ticket in self.trained or ticket in self.dropped

    def add(self, message: Commit | Ticket) -> None:
        """Take in what a commit or a ticket tells."""
        if isinstance(message, Commit):
            self.trained.update((ticket, message.step) for ticket in message.groups)
            self.dropped.update((ticket, message.step) for ticket, _ in dropped_groups(message))
        elif message.replaces >= 0:
            self.replaced_by[message.replaces] = message.ticket

    @classmethod
    async def read(cls, history: History) -> "TicketOutcomes":
        """From all commits and tickets of a run."""
        outcomes = cls()
        async for commit in history.messages(StreamName.COMMITS, Commit):
            outcomes.add(commit)
        async for ticket in history.messages(StreamName.PROMPTS, Ticket):
            outcomes.add(ticket)
        return outcomes

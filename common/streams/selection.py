"""Selects entries of a run's streams by their ids and messages."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tidemill.common.streams.entries import Entry, Garbled, entry_id_of, id_after, id_order
from tidemill.common.wire.keys import StreamName as StreamName
from tidemill.common.wire.messages import Commit, Message, Trajectory

Range = tuple[float | None, float | None]
"""A closed range; None: no bound."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Conditions that all have to hold. A message without the field of a condition is excluded.

    Example: `steps` (40, 45), `rewards` (0.9, None): of steps 40 to 45, with a reward of 0.9 or more.
    """

    first_id: str = "-"
    last_id: str = "+"
    tickets: Range | None = None
    """For a commit: any ticket that it trained on or dropped."""
    index: int | None = None
    steps: Range | None = None
    """Step that a ticket was issued for, or a commit's own."""
    versions: Range | None = None
    """Version of any token; for manifests and commits, their own."""
    times: Range | None = None
    """Seconds since 1970: when the message was finished, scored, issued or announced."""
    rewards: Range | None = None
    worker: str = ""

    def has_id(self, entry_id: str) -> bool:
        return id_order(self.first_id) <= id_order(entry_id) <= id_order(self.last_id)

    def takes(self, record: Entry[Message] | Garbled) -> bool:
        if isinstance(record, Garbled):
            # Selected only where nothing but ids is asked for.
            return replace(self, first_id="-", last_id="+") == ALL and self.has_id(record.entry_id)
        return self.matches(record.entry_id, record.message)

    def beyond(self, position: str) -> "Selection":
        return replace(self, first_id=max(self.first_id, id_after(position), key=id_order))

    def matches(self, entry_id: str, message: Message) -> bool:
        if not self.has_id(entry_id):
            return False
        if self.index is not None and getattr(message, "index", None) != self.index:
            return False
        if self.worker and getattr(message, "worker", None) != self.worker:
            return False
        ranges = (
            (self.tickets, tickets_of(message)),
            (self.steps, [getattr(message, "step", None)]),
            (self.times, [time_of(message)]),
            (self.rewards, [getattr(message, "value", None)]),
            (self.versions, versions_of(message) if self.versions else []),
        )
        for wanted, values in ranges:
            if wanted is not None and not any(overlap(wanted, value, value) for value in values):
                return False
        return True


ALL = Selection()


def overlap(wanted: Range | None, least: float | None, greatest: float | None) -> bool:
    """Whether `least` to `greatest` overlaps `wanted`; never without values, always without `wanted`."""
    if wanted is None:
        return True
    if least is None or greatest is None:
        return False
    low, high = wanted
    return (low is None or greatest >= low) and (high is None or least <= high)


def time_of(message: Message) -> float | None:
    """When the message was made, in seconds since 1970; None where it has no time."""
    for name in ("finished_at", "scored_at", "issued_at", "announced_at", "died_at"):
        time = getattr(message, name, None)
        if time:
            return float(time)
    return None


def numbered(stream: StreamName, selection: Selection) -> Selection:
    """The selection with its range of numbers expressed as ids, too, for streams whose ids are numbers."""
    by_name = {
        StreamName.PROMPTS: selection.tickets,
        StreamName.PROMPTS_EVAL: selection.tickets,
        StreamName.COMMITS: selection.steps,
        StreamName.WEIGHTS: selection.versions,
    }
    wanted = by_name.get(stream)
    if wanted is None:
        return selection
    low, high = wanted
    first = selection.first_id
    last = selection.last_id
    if low is not None and math.isfinite(low):
        first = max(entry_id_of(max(math.ceil(low), 0)), first, key=id_order)
    if high is not None and math.isfinite(high):
        last = min(entry_id_of(max(math.floor(high), -1)), last, key=id_order)
    return replace(selection, first_id=first, last_id=last)


def said_in(messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """(path, text) of all texts in chat messages, without roles, types and ids."""
    for path, text in texts_in("messages", messages):
        if path.rpartition(".")[2] not in ("role", "type", "id", "tool_call_id"):
            yield path, text


def texts_in(path: str, value: Any) -> Iterator[tuple[str, str]]:
    """(path, text) of every text inside of a plain value."""
    return ((where, leaf) for where, leaf in leaves_in(path, value) if isinstance(leaf, str))


def leaves_in(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """(path, value) of everything inside of a plain value that is no mapping and no list."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from leaves_in(f"{path}.{name}", item)
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from leaves_in(f"{path}.{number}", item)
    else:
        yield path, value


def tickets_of(message: Message) -> list[int]:
    """The tickets that a message is about; for a commit, those trained or dropped."""
    if isinstance(message, Commit):
        return [*message.groups, *(ticket for ticket, _, _ in message.dropped)]
    ticket = getattr(message, "ticket", None)
    return [] if ticket is None else [ticket]


def versions_of(message: Message) -> list[int]:
    """The versions that a message is about; for a trajectory, those that produced its tokens."""
    if isinstance(message, Trajectory):
        return [version for segment in message.segments for version, _ in segment.spans]
    version = getattr(message, "version", None)
    return [] if version is None else [version]

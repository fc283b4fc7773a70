"""Entries of a stream, selected also by what is written of the same samples in another stream.

The reward of a trajectory stands in its score, the versions behind a score in its trajectory, the step of a
score in its ticket. Selecting by one of them reads that other stream first, and keeps the keys it finds.
"""

from collections.abc import AsyncIterator
from dataclasses import replace

from common.entries import Entry
from common.history import History, Record, Selection, StreamName
from common.history.selection import Range
from common.messages import Message, Score, Trajectory

Keys = set[tuple[int, int]]
WHOLE_TICKET = -1
"""The index that stands for all samples of a ticket."""


async def selected_records(
    history: History, stream: StreamName, selection: Selection, newest_first: bool = False
) -> AsyncIterator[Record]:
    """What the selection selects, as it is found."""
    allowed: list[Keys] = []
    own = _own(stream, selection)
    for other, wanted in _others(stream, selection):
        keys = {key_of(r.message) async for r in history.scan(other, wanted) if isinstance(r, Entry)}
        if not keys:
            return
        allowed.append(keys)
        own = replace(own, tickets=_both(own.tickets, (min(keys)[0], max(keys)[0])))
    async for record in history.scan(stream, own, newest_first):
        if not allowed or (isinstance(record, Entry) and _is_in_all(record.message, allowed)):
            yield record


def key_of(message: Message) -> tuple[int, int]:
    """The ticket and the index of a message, where it is of one sample only."""
    return getattr(message, "ticket", -1), getattr(message, "index", WHOLE_TICKET)


def _both(one: Range | None, other: tuple[float, float]) -> Range:
    """What lies in both ranges."""
    low, high = one or (None, None)
    first, last = other
    return max(first, first if low is None else low), min(last, last if high is None else high)


def _is_in_all(message: Message, allowed: list[Keys]) -> bool:
    ticket, index = key_of(message)
    return all((ticket, index) in keys or (ticket, WHOLE_TICKET) in keys for keys in allowed)


def _others(stream: StreamName, selection: Selection) -> list[tuple[StreamName, Selection]]:
    """The other streams to ask, and what for."""
    suffix = ":eval" if stream.endswith(":eval") else ""
    near = Selection(tickets=selection.tickets, steps=selection.steps)
    found = []
    if stream.message_type is Trajectory and selection.rewards:
        found.append((StreamName("scores" + suffix), replace(near, rewards=selection.rewards)))
    if stream.message_type is Score and selection.versions:
        found.append((StreamName("trajectories" + suffix), replace(near, versions=selection.versions)))
    elif stream.message_type is Score and selection.steps:
        # A step's tickets are no range: those that replaced others have later numbers.
        found.append((StreamName("prompts" + suffix), near))
    return found


def _own(stream: StreamName, selection: Selection) -> Selection:
    """What the messages of the stream can be asked themselves."""
    if stream.message_type is Trajectory:
        return replace(selection, rewards=None)
    return replace(selection, versions=None) if stream.message_type is Score else selection

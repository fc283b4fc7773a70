"""Where in a long stream the entries of some tickets lie: found by halving, so that nobody reads all of it.

Tickets are outstanding for a few steps only. An entry of a ticket far below means that ours came later; one
of a ticket far above, that ours had reached their end. Both hold for the entries that count, the first ones
of their keys: a copy that comes much later is not looked for.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from tidemill.common.history.history import History
from tidemill.common.redis.broker import Broker
from tidemill.common.streams import read_back, read_newest, read_range
from tidemill.common.streams.entries import Entry, id_order
from tidemill.common.streams.selection import Selection, StreamName
from tidemill.common.wire.messages import Commit, Lane, Message, Ticket

SPARE_STEPS, SPARE_TICKETS = 2, 64
"""Tickets may be outstanding together whose numbers lie so many times as far apart as admission alone allows:
others were replaced, and a resumed run may have had other limits."""
PROBED = 4
"""Entries that are looked at in one place: one of them may be a late copy."""


async def near_tickets(history: History, stream: StreamName, first: int, last: int) -> Selection:
    """What selects tickets `first` to `last` in a stream without reading far beyond them."""
    everywhere = Selection(tickets=(first, last))
    if history.broker is None or stream not in (StreamName.TRAJECTORIES, StreamName.SCORES):
        return everywhere
    spread = await _spread(history, history.broker, first, last)
    if spread is None:
        return everywhere
    search = _Search(history.broker, stream.key(history.keys), stream.message_type)
    oldest, newest = await search.ends()
    below = await search.last(oldest, newest, lambda tickets: max(tickets) + spread < first)
    before = await search.last(below, newest, lambda tickets: min(tickets) - spread <= last)
    # The archive has what lies below the first entry of Redis: that end stays open where it was not passed.
    return replace(
        everywhere,
        first_id=f"{below}-0" if below > oldest else "-",
        last_id=f"{before + 1}-0" if before < newest else "+",
    )


async def _spread(history: History, broker: Broker, first: int, last: int) -> int | None:
    """How far apart the numbers of tickets may be that are outstanding together; None if nothing tells."""
    newest = await read_newest(broker, StreamName.COMMITS.key(history.keys), Commit)
    youngest = await read_newest(broker, StreamName.PROMPTS.key(history.keys), Ticket)
    issued = [await history.ticket(number) for number in (first, last)]
    issued += [youngest.message] if youngest else []
    known = [ticket for ticket in issued if ticket is not None and ticket.min_version > 0]
    if newest is None or not known:
        return None
    commits = [newest.message] + [c for t in known if (c := await history.commit(t.step))]
    per_step = max(len({*c.groups, *(ticket for ticket, _, _ in c.dropped)}) for c in commits)
    bound = 1 + max(ticket.step - ticket.min_version for ticket in known)
    return SPARE_STEPS * bound * per_step + SPARE_TICKETS


class _Search:
    """Looks into a stream here and there. Places are milliseconds: the first number of an entry id."""

    def __init__(self, broker: Broker, key: str, kind: type[Message]) -> None:
        self._broker, self._key, self._kind = broker, key, kind

    async def ends(self) -> tuple[int, int]:
        """Places of the first and the last entry."""
        first = await read_range(self._broker, self._key, self._kind, count=1)
        last = await read_back(self._broker, self._key, self._kind, count=1)
        return (id_order(first[0].entry_id)[0], id_order(last[0].entry_id)[0]) if first and last else (0, 0)

    async def last(self, low: int, high: int, holds: Callable[[list[int]], bool]) -> int:
        """A place where a condition on tickets holds, just before one where it does not; `high` if it holds
        there. At `low` it is taken to hold."""
        if await self._holds(high, holds):
            return high
        while high - low > 1:
            middle = (low + high) // 2
            if await self._holds(middle, holds):
                low = middle
            else:
                high = middle
        return low

    async def _holds(self, place: int, holds: Callable[[list[int]], bool]) -> bool:
        found = await read_range(self._broker, self._key, self._kind, f"{place}-0", count=PROBED)
        if len(found) < PROBED:
            found = await read_back(self._broker, self._key, self._kind, count=PROBED)
        tickets = [getattr(entry.message, "ticket", -1) for entry in found if isinstance(entry, Entry)]
        return bool(tickets) and holds(tickets)


@dataclass(frozen=True, slots=True)
class KnownPlaces:
    """Where a group's entries are, for readers that know: nothing else is searched."""

    trajectories: tuple[str, str] | None = None
    """First and last entry id; None for none."""
    scores: tuple[str, str] | None = None
    step: int = -1
    """Whose commit names the group; -1 for none."""
    has_letters: bool = True


EVERYWHERE = KnownPlaces(("-", "+"), ("-", "+"))


async def nearby(history: History, number: int, lane: Lane) -> KnownPlaces:
    """Where the entries of a ticket lie that count."""
    streams = (StreamName.TRAJECTORIES.of(lane), StreamName.SCORES.of(lane))
    made, scored = [await near_tickets(history, stream, number, number) for stream in streams]
    return KnownPlaces((made.first_id, made.last_id), (scored.first_id, scored.last_id))

"""Reads a run's streams as one history, without saying where an entry is kept.

Guarantees: an entry comes once and in the order of its stream; what cannot be decoded comes as `Garbled`;
reading changes nothing.
"""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

from common.broker import Broker
from common.history.selection import ALL, Selection, StreamName
from common.keys import Keys
from common.messages import Commit, Lane, Message, Score, Ticket, Trajectory
from common.streams import START, Entry, Garbled, entry_id_of, scan

Record = Entry[Message] | Garbled


class History:
    """The history of one run. `broker` is None where its Redis is gone: then the archive alone is read."""

    def __init__(self, run_id: str, run_dir: Path | None, broker: Broker | None) -> None:
        self.run_id, self.run_dir, self.broker = run_id, run_dir, broker
        self.keys = Keys(run_id)

    async def scan(
        self, stream: StreamName, selection: Selection = ALL, newest_first: bool = False
    ) -> AsyncIterator[Record]:
        """Selected entries, oldest first unless told otherwise, while they are found.

        `selection.steps` of a stream whose messages carry no step (scores) selects by the steps of tickets.
        Garbled entries come where the selection asks for nothing but ids.
        """
        selection = await self._by_tickets(stream, selection)
        # Redis first-to-last; the archive joins here.
        found: list[Record] = []
        async for record in self._scan_redis(stream, selection):
            if newest_first:
                found.append(record)
            else:
                yield record
        for record in reversed(found):
            yield record

    async def trajectories(self, ticket: int, lane: Lane = Lane.TRAIN) -> list[Trajectory]:
        """All trajectories of a ticket, by index; the first of each, as the trainer takes them."""
        name = StreamName.TRAJECTORIES if lane is Lane.TRAIN else StreamName.TRAJECTORIES_EVAL
        found = [m for m in await self._of_ticket(name, ticket) if isinstance(m, Trajectory)]
        return list(
            {message.index: message for message in sorted(found[::-1], key=lambda m: m.index)}.values()
        )

    async def scores(self, ticket: int, lane: Lane = Lane.TRAIN) -> list[Score]:
        """All scores of a ticket, by index; the first of each."""
        name = StreamName.SCORES if lane is Lane.TRAIN else StreamName.SCORES_EVAL
        found = [m for m in await self._of_ticket(name, ticket) if isinstance(m, Score)]
        return list(
            {message.index: message for message in sorted(found[::-1], key=lambda m: m.index)}.values()
        )

    async def ticket(self, ticket: int, lane: Lane = Lane.TRAIN) -> Ticket | None:
        """The ticket itself."""
        name = StreamName.PROMPTS if lane is Lane.TRAIN else StreamName.PROMPTS_EVAL
        found = [m for m in await self._of_ticket(name, ticket) if isinstance(m, Ticket)]
        return found[0] if found else None

    async def commit(self, step: int) -> Commit | None:
        """The commit of a step."""
        number = entry_id_of(step)
        async for record in self.scan(StreamName.COMMITS, Selection(first_id=number, last_id=number)):
            if isinstance(record, Entry) and isinstance(record.message, Commit):
                return record.message
        return None

    async def commit_of_ticket(self, ticket: int) -> Commit | None:
        """The commit of the step that trained on (or dropped) the ticket; None while there is none."""
        async for record in self.scan(StreamName.COMMITS):
            if isinstance(record, Entry) and isinstance(record.message, Commit):
                commit = record.message
                if ticket in commit.groups or any(ticket == dropped for dropped, _, _ in commit.dropped):
                    return commit
        return None

    async def _of_ticket(self, stream: StreamName, ticket: int) -> list[Message]:
        selection = Selection(tickets=(ticket, ticket))
        return [r.message async for r in self.scan(stream, selection) if isinstance(r, Entry)]

    async def _by_tickets(self, stream: StreamName, selection: Selection) -> Selection:
        """The selection with steps told as a range of tickets, for streams that know no steps."""
        if selection.steps is None or "step" in stream.message_type.model_fields:
            return selection
        prompts = StreamName.PROMPTS if stream.lane is Lane.TRAIN else StreamName.PROMPTS_EVAL
        wanted = self.scan(prompts, Selection(steps=selection.steps))
        tickets = [
            r.message.ticket async for r in wanted if isinstance(r, Entry) and isinstance(r.message, Ticket)
        ]
        span = (float(min(tickets)), float(max(tickets))) if tickets else (0.0, -1.0)
        return replace(selection, steps=None, tickets=span)

    async def _scan_redis(self, stream: StreamName, selection: Selection) -> AsyncIterator[Record]:
        if self.broker is None:
            return
        first = "-" if selection.first_id == START else selection.first_id
        wants_all = replace(selection, first_id="-", last_id="+") == ALL
        async for entry in scan(self.broker, stream.key(self.keys), stream.message_type, first):
            if isinstance(entry, Garbled):
                if wants_all:
                    yield entry
            elif selection.matches(entry.entry_id, entry.message):
                yield entry

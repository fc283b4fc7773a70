"""The admission gate: the only throttle of a run.

With v committed versions, B groups per step and staleness bound k, at most (v + 1 + k) * B tickets have been
issued, plus one for each replaced group. A commit frees B slots. That bounds staleness, Redis memory and
wasted work.

A ticket's number says which prompt it has (`prompt_plan.py`) and, plus one, is its entry id. So issuing is
idempotent: after a crash, tickets in the stream are adopted, and the others are issued again unchanged.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from tidemill.common.config import RunConfig
from tidemill.common.errors import TidemillError
from tidemill.common.history import History, Selection, StreamName
from tidemill.common.redis.broker import Broker
from tidemill.common.streams import START, Entry, append_missing, entry_id_of, id_order, last_id, read_range
from tidemill.common.telemetry import metrics
from tidemill.common.wire.codec import SCHEMA
from tidemill.common.wire.keys import Keys
from tidemill.common.wire.messages import Outcome, Ticket
from tidemill.services.trainer.batch.curriculum import outcome_of
from tidemill.services.trainer.batch.prompt_plan import PromptPlan
from tidemill.services.trainer.batch.unexpected_entries import remove_unexpected

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Outstanding:
    """A ticket that was issued and has reached no end yet."""

    ticket: int
    step: int
    min_version: int
    replaces: int = -1
    group_size: int = 0
    """0 is the run's."""
    outcome: Outcome | None = None
    """What the replaced group says of its prompt, where a curriculum wants it."""


class Scheduler:
    """Issues tickets in order, and remembers which are outstanding. `expect` is told of tickets before the
    stream has them: a worker may answer sooner than Redis does."""

    def __init__(
        self,
        broker: Broker,
        keys: Keys,
        config: RunConfig,
        prompts: PromptPlan,
        expect: Callable[[list[Outstanding]], None],
    ) -> None:
        self.broker, self.keys, self.prompts, self.expect = broker, keys, prompts, expect
        self.trainer = config.trainer
        self.next_ticket = 0
        self.num_replacements = 0
        self.outstanding: dict[int, Outstanding] = {}

    def limit(self, version: int) -> int:
        """Most tickets that may have been issued when `version` steps are committed."""
        steps = min(version + 1 + self.trainer.max_staleness, self.trainer.steps)
        return steps * self.trainer.groups_per_step + self.num_replacements

    async def admit(self, version: int) -> list[Outstanding]:
        """Issue every regular ticket that the gate lets in now."""
        num_new = self.limit(version) - self.next_ticket
        return await self._issue([self._regular(self.next_ticket + i) for i in range(num_new)])

    async def replace(self, ticket: int, step: int, rewards: Sequence[float] = ()) -> list[Outstanding]:
        """Issue a fresh ticket in place of one whose group cannot be trained, while `step` is in progress.
        `rewards` are those of a group without variance.

        With `as_ready` the old ticket may have been for an earlier step; a group that starts only now must
        not be older than the step in progress allows.
        """
        old = self.outstanding.pop(ticket)
        outcome = self.prompts.replaced(ticket, rewards) if rewards else None
        self.prompts.forget(ticket)
        self.num_replacements += 1
        return await self._issue([self._ticket(self.next_ticket, max(old.step, step), ticket, outcome)])

    def settle(self, ticket: int) -> None:
        """The group was trained: its ticket is outstanding no more."""
        self.outstanding.pop(ticket, None)
        self.prompts.forget(ticket)

    async def adopt_issued(self, history: History | None = None) -> list[Ticket]:
        """Take in tickets that an earlier process issued after the state this one was restored from."""
        adopted: list[Ticket] = []
        orphans: list[Entry[Ticket]] = []
        history = history or History(self.keys.run_id, None, self.broker)
        async for entry in history.scan(StreamName.PROMPTS, Selection(entry_id_of(self.next_ticket))):
            if isinstance(entry, Entry) and isinstance(ticket := entry.message, Ticket):
                if ticket.ticket == self.next_ticket:
                    self._adopt(ticket)
                    adopted.append(ticket)
                else:
                    orphans.append(Entry(entry.entry_id, ticket))
        if orphans:
            await self._withdraw(orphans)
        return adopted

    async def find_skipped(self) -> list[int]:
        """Outstanding tickets that the stream has not got although it goes beyond them.

        Redis had lost them, and the trainer before this one, which had trained them, gave back only those
        that follow. There is no place for them any more.
        """
        key = self.keys.prompts()
        end = id_order(await last_id(self.broker, key))
        places = {n: entry_id_of(n) for n in sorted(self.outstanding) if id_order(entry_id_of(n)) <= end}
        if not places:
            return []
        found = await self.broker.pipeline([("XRANGE", key, place, place) for place in places.values()])
        return [number for number, entries in zip(places, found, strict=True) if entries == []]

    async def _withdraw(self, orphans: list[Entry[Ticket]]) -> None:
        """Take tickets back that follow no other: an earlier trainer gave them to a Redis that was emptied.
        This trainer will issue their numbers once more."""
        log.warning(
            "taking back tickets of a lost history", first=orphans[0].message.ticket, count=len(orphans)
        )
        key, keep = self.keys.prompts(), min([*self.outstanding, self.next_ticket])
        pairs = [part for entry in orphans for part in (entry.entry_id, "")]
        floor = entry_id_of(keep - 1) if keep else START
        await self.broker.script("move_aside", [key, self.keys.dead], [SCHEMA, floor, *pairs])
        numbers = [entry.message.ticket for entry in orphans]
        # A mark that says "published" would hold for the ticket that gets this number next.
        await self.broker.execute("DEL", *map(self.keys.progress, numbers), *map(self.keys.results, numbers))

    async def reissue_lost(self) -> int:
        """Issue again, unchanged, the outstanding tickets above the stream's last id: Redis has lost them."""
        return len(await self._append_missing())

    async def remove_unexpected(self) -> int:
        """Remove what others have written into the stream; returns how many entries."""
        key, first = self.keys.prompts(), min(self.outstanding, default=self.next_ticket)
        floor = entry_id_of(first - 1) if first else START
        return await remove_unexpected(self.broker, self.keys, key, Ticket, floor)

    def state(self) -> dict[str, Any]:
        return {
            "next_ticket": self.next_ticket,
            "num_replacements": self.num_replacements,
            "outstanding": [[item.ticket, item.step, item.replaces] for item in self.outstanding.values()],
            "outcomes": [
                [item.ticket, list(item.outcome)] for item in self.outstanding.values() if item.outcome
            ],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint's state."""
        self.next_ticket = int(state["next_ticket"])
        self.num_replacements = int(state["num_replacements"])
        outcomes = {int(ticket): outcome for ticket, outcome in state["outcomes"]}
        for ticket, step, replaces in state["outstanding"]:
            size, saved = self.prompts.group_size(ticket), outcomes.get(ticket)
            outcome = None if saved is None else outcome_of(saved)
            min_version = self._min_version(step)
            self.outstanding[ticket] = Outstanding(ticket, step, min_version, replaces, size, outcome)

    def _adopt(self, ticket: Ticket) -> None:
        self.prompts.adopt(ticket)
        if ticket.replaces >= 0:
            self.num_replacements += 1
            self.outstanding.pop(ticket.replaces, None)
            self.prompts.forget(ticket.replaces)
        self.outstanding[ticket.ticket] = _outstanding(ticket)
        self.next_ticket = ticket.ticket + 1

    async def _issue(self, tickets: list[Ticket]) -> list[Outstanding]:
        if not tickets:
            return []
        issued = [_outstanding(ticket) for ticket in tickets]
        self.next_ticket = tickets[-1].ticket + 1
        self.outstanding |= {item.ticket: item for item in issued}
        self.expect(issued)
        appended = await self._append_missing(tickets)
        if not {ticket.ticket for ticket in tickets} <= appended:
            await self._check_issued(tickets)
        for item in issued:
            metrics.TICKETS_ISSUED.labels("replacement" if item.replaces >= 0 else "regular").inc()
        return issued

    async def _append_missing(self, new: Sequence[Ticket] = ()) -> set[int]:
        """Append what is outstanding and not in the stream: what Redis has lost before what is new."""
        tickets = {ticket.ticket: ticket for ticket in new}

        def ticket_of(number: int) -> Ticket:
            item = self.outstanding[number]
            return tickets.get(number) or self._ticket(number, item.step, item.replaces, item.outcome)

        key = self.keys.prompts()
        appended = await append_missing(self.broker, key, sorted(self.outstanding), ticket_of)
        if lost := [number for number in appended if number not in tickets]:
            log.warning("issued tickets again that Redis has lost", count=len(lost), first=lost[0])
        return set(appended)

    async def _check_issued(self, tickets: list[Ticket]) -> None:
        """Some ids were taken: by these tickets, if Redis did the append before the connection broke."""
        key, first, last = self.keys.prompts(), tickets[0].ticket, tickets[-1].ticket
        found = await read_range(self.broker, key, Ticket, entry_id_of(first), entry_id_of(last))
        there = {entry.message.ticket for entry in found if isinstance(entry, Entry)}
        if first not in there and await self.remove_unexpected():
            there |= await self._append_missing(tickets)
        if missing := [ticket.ticket for ticket in tickets if ticket.ticket not in there]:
            raise TidemillError(
                f"ticket {missing[0]} cannot be issued: {key} stands at {await last_id(self.broker, key)}, "
                f"beyond {entry_id_of(missing[0])}. Something other than this trainer has written to it; "
                "remove those entries (XDEL, then XSETID and XGROUP SETID to the last ticket), and restart."
            )

    def _regular(self, number: int) -> Ticket:
        return self._ticket(number, (number - self.num_replacements) // self.trainer.groups_per_step)

    def _ticket(self, number: int, step: int, replaces: int = -1, outcome: Outcome | None = None) -> Ticket:
        min_version = self._min_version(step)
        return Ticket(
            ticket=number,
            step=step,
            min_version=min_version,
            replaces=replaces,
            outcome=outcome,
            **self.prompts.fields(number, min_version),
        )

    def _min_version(self, step: int) -> int:
        return max(0, step - self.trainer.max_staleness)


def _outstanding(ticket: Ticket) -> Outstanding:
    return Outstanding(
        ticket.ticket, ticket.step, ticket.min_version, ticket.replaces, ticket.group_size, ticket.outcome
    )

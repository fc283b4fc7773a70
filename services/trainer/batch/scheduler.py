"""The admission gate: the only throttle of a run.

With v committed versions, B groups per step and staleness bound k, at most (v + 1 + k) * B tickets have been
issued, plus one for each replaced group. A commit frees B slots. That bounds staleness, Redis memory and
wasted work.

A ticket's number says which prompt it has (`prompt_plan.py`) and, plus one, is its entry id. So issuing is
idempotent: after a crash, tickets in the stream are adopted, and the others are issued again unchanged.
"""

from collections.abc import Callable, Collection, Container, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import structlog

from tidemill.common.config import RunConfig
from tidemill.common.errors import TidemillError
from tidemill.common.redis.broker import Broker
from tidemill.common.streams import Entry, append, append_missing, entry_id_of, id_order, last_id, read_range
from tidemill.common.telemetry import metrics
from tidemill.common.wire.keys import Keys, StreamName
from tidemill.common.wire.messages import Outcome, Ticket, Trajectory, outcome_of
from tidemill.services.trainer.batch.prompt_plan import PromptPlan
from tidemill.services.trainer.batch.unexpected_entries import remove_unexpected, take_back

if TYPE_CHECKING:
    from tidemill.common.history import History

log = structlog.get_logger(__name__)


class Scheduler:
    """Issues tickets in order, and remembers which are outstanding: neither trained nor replaced."""

    def __init__(
        self,
        broker: Broker,
        keys: Keys,
        config: RunConfig,
        prompts: PromptPlan,
        expect: Callable[[Iterable[Ticket | Trajectory]], None],
    ) -> None:
        """Args:
        broker: Redis.
        keys: the run's keys.
        config: the run's config.
        prompts: which prompt each ticket has.
        expect: gets tickets before the stream has them: a worker may answer sooner than Redis does.
        """
        self.broker = broker
        self.keys = keys
        self.prompts = prompts
        self.expect = expect
        self.trainer = config.trainer
        self.next_ticket = 0
        self.num_replacements = 0
        self.outstanding: dict[int, Ticket] = {}
        self._demonstrated_to = 0
        """The step up to which this process has published demonstrations, that one not included."""

    def limit(self, version: int) -> int:
        """Most tickets that may have been issued when `version` steps are committed."""
        return self.prompts.num_tickets(self._num_open_steps(version)) + self.num_replacements

    def _num_open_steps(self, version: int) -> int:
        """How many steps, from the first one on, the gate lets in when `version` steps are committed."""
        return min(version + 1 + self.trainer.max_staleness, self.trainer.steps)

    async def admit(self, version: int) -> list[Ticket]:
        """Issue every regular ticket that the gate lets in now."""
        await self._demonstrate(version)
        tickets: list[Ticket] = []
        for number in range(self.next_ticket, self.limit(version)):
            # Replacements have taken numbers too; without them, regular tickets keep their steps.
            step = self.prompts.step_of(number - self.num_replacements)
            tickets.append(self._next(number, step))
        return await self._issue(tickets)

    async def _demonstrate(self, version: int) -> None:
        """Publish the demonstrations of every step that the gate lets in. A trainer that starts publishes
        the same bytes once more: the first of a key counts."""
        places = self.prompts.demonstration_places
        if places is None:
            return
        end = self._num_open_steps(version)
        for step in range(max(self._demonstrated_to, version), end):
            await self.publish_demonstrations(places.tickets(step))
        self._demonstrated_to = end

    async def publish_demonstrations(self, tickets: Sequence[int]) -> None:
        """Publish these demonstrations; again where Redis has lost them."""
        places = self.prompts.demonstration_places
        assert places is not None
        trajectories = [places.trajectory(ticket) for ticket in tickets]
        # Before they are appended, as with tickets: the reader may get them before `append` returns.
        self.expect(trajectories)
        await append(self.broker, self.keys.trajectories(), *trajectories)

    async def replace(self, ticket: int, step: int, rewards: Sequence[float] = ()) -> list[Ticket]:
        """Issue a fresh ticket in place of one whose group cannot be trained, while `step` is in progress.
        `rewards` are those of a group without variance."""
        old = self.outstanding.pop(ticket)
        outcome = self.prompts.replaced(old, rewards) if rewards else None
        self.num_replacements += 1
        # With `as_ready` the old ticket may have been for an earlier step; a group that starts only now must
        # not be older than the step in progress allows.
        step_of_new = max(old.step, step)
        return await self._issue([self._next(self.next_ticket, step_of_new, ticket, outcome)])

    def settle(self, ticket: int) -> None:
        self.outstanding.pop(ticket, None)

    async def adopt_issued(self, history: "History") -> list[Ticket]:
        """Take in tickets that an earlier process issued after the state this one was restored from."""
        adopted: list[Ticket] = []
        orphans: list[Entry[Ticket]] = []
        async for entry in history.scan_from(StreamName.PROMPTS, entry_id_of(self.next_ticket)):
            if not isinstance(entry, Entry) or not isinstance(entry.message, Ticket):
                continue
            ticket = entry.message
            if ticket.ticket == self.next_ticket:
                self._adopt(ticket)
                adopted.append(ticket)
            else:
                orphans.append(Entry(entry.entry_id, ticket))
        if orphans:
            await self._withdraw(orphans)
        return adopted

    def _adopt(self, ticket: Ticket) -> None:
        self.prompts.adopt(ticket)
        if ticket.replaces >= 0:
            self.num_replacements += 1
            # Replaced after the state was saved: else the trainer would wait for both.
            self.outstanding.pop(ticket.replaces, None)
        self.outstanding[ticket.ticket] = ticket
        self.next_ticket += 1

    async def find_skipped(self) -> list[int]:
        """Outstanding tickets that the stream lacks although it goes beyond them: it takes them no more.

        An earlier trainer had trained them, and issued only the following ones again when Redis had lost all
        of these. In the state that this trainer continues from they are not trained yet.
        """
        key = self.keys.prompts()
        end = id_order(await last_id(self.broker, key))
        numbers = [n for n in sorted(self.outstanding) if id_order(entry_id_of(n)) <= end]
        if not numbers:
            return []
        commands = [("XRANGE", key, entry_id_of(number), entry_id_of(number)) for number in numbers]
        replies = await self.broker.pipeline(commands)
        return [number for number, entries in zip(numbers, replies, strict=True) if entries == []]

    async def _withdraw(self, orphans: list[Entry[Ticket]]) -> None:
        """Take tickets back that follow no other: an earlier trainer gave them to a Redis that was emptied.
        This trainer will issue their numbers once more."""
        log.warning(
            "taking back tickets of a lost history", first=orphans[0].message.ticket, count=len(orphans)
        )
        without_letters = dict.fromkeys((entry.entry_id for entry in orphans), b"")
        await take_back(self.broker, self.keys, self.keys.prompts(), without_letters, self._floor)
        numbers = [entry.message.ticket for entry in orphans]
        # Progress that says "published" would hold for the ticket that gets this number next.
        remains = []
        for number in numbers:
            progress = self.keys.progress(number)
            remains += [progress, self.keys.parts(progress), self.keys.results(number)]
        await self.broker.execute("DEL", *remains)

    async def reissue_lost(self) -> int:
        """Issue again, unchanged, the outstanding tickets above the stream's last id: Redis has lost them."""
        return len(await self._append_missing())

    async def remove_unexpected(self) -> int:
        """Remove unexpected entries from the stream; returns how many."""
        return await remove_unexpected(self.broker, self.keys, self.keys.prompts(), Ticket, self._floor)

    @property
    def _floor(self) -> str:
        """The id below every ticket that is still needed."""
        return entry_id_of(min(self.outstanding, default=self.next_ticket) - 1)

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint: tickets with the rows of their prompts."""
        outstanding = []
        for ticket in self.outstanding.values():
            outcome = None if ticket.outcome is None else list(ticket.outcome)
            outstanding.append([ticket.ticket, ticket.step, ticket.replaces, ticket.row, outcome])
        return {
            "next_ticket": self.next_ticket,
            "num_replacements": self.num_replacements,
            "outstanding": outstanding,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.next_ticket = int(state["next_ticket"])
        self.num_replacements = int(state["num_replacements"])
        for number, step, replaces, row, saved in state["outstanding"]:
            # By row and not drawn again: a curriculum has moved on since the ticket was issued.
            fields = self.prompts.fields_of_row(number, row)
            fields["outcome"] = None if saved is None else outcome_of(saved)
            self.outstanding[number] = self._ticket(number, step, replaces=replaces, **fields)

    async def _issue(self, tickets: list[Ticket]) -> list[Ticket]:
        if not tickets:
            return []
        self.next_ticket = tickets[-1].ticket + 1
        new = {ticket.ticket: ticket for ticket in tickets}
        # Before it is appended: if Redis loses the append, `reissue_lost` gives the very same ticket again.
        self.outstanding |= new
        self.expect(tickets)
        appended = await self._append_missing(new)
        if new.keys() - appended:
            await self._check_issued(new)
        for ticket in tickets:
            metrics.TICKETS_ISSUED.labels("replacement" if ticket.replaces >= 0 else "regular").inc()
        return tickets

    async def _append_missing(self, new: Container[int] = ()) -> set[int]:
        """Append outstanding tickets that the stream lacks: those that Redis has lost, then `new` ones."""
        # All outstanding ones, in order: behind a new ticket the stream takes no lost one.
        numbers = sorted(self.outstanding)
        appended = await append_missing(
            self.broker, self.keys.prompts(), numbers, self.outstanding.__getitem__
        )
        lost = [number for number in appended if number not in new]
        if lost:
            log.warning("issued tickets again that Redis has lost", count=len(lost), first=lost[0])
        return set(appended)

    async def _check_issued(self, new: Collection[int]) -> None:
        """Some ids were taken: by these tickets, if Redis did the append before the connection broke."""
        key = self.keys.prompts()
        first = min(new)
        entries = await read_range(self.broker, key, Ticket, entry_id_of(first), entry_id_of(max(new)))
        there = {entry.message.ticket for entry in entries if isinstance(entry, Entry)}
        if first not in there and await self.remove_unexpected():
            there |= await self._append_missing(new)
        missing = sorted(set(new) - there)
        if missing:
            raise TidemillError(
                f"ticket {missing[0]} cannot be issued: {key} stands at {await last_id(self.broker, key)}, "
                f"beyond {entry_id_of(missing[0])}. Something other than this trainer has written to it; "
                "remove those entries (XDEL, then XSETID and XGROUP SETID to the last ticket), and restart."
            )

    def _next(self, number: int, step: int, replaces: int = -1, outcome: Outcome | None = None) -> Ticket:
        fields = self.prompts.fields(number, self._min_version(step))
        return self._ticket(number, step, replaces=replaces, outcome=outcome, **fields)

    def _ticket(self, number: int, step: int, **fields: Any) -> Ticket:
        return Ticket(ticket=number, step=step, min_version=self._min_version(step), **fields)

    def _min_version(self, step: int) -> int:
        return max(0, step - self.trainer.max_staleness)

"""The admission gate: the only throttle of a run.

With v committed versions, B groups per step and staleness bound k, at most (v + 1 + k) * B tickets have
been issued, plus one for each group that had to be replaced. A commit frees B slots. That bounds
staleness, Redis memory and wasted work at once.

A ticket's number is also its position in the prompt order and (plus one) its entry id, so that issuing
is idempotent: after a crash, tickets that the stream holds are adopted, the others issued again alike.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import structlog

from common import metrics
from common.broker import Broker
from common.config import RunConfig
from common.errors import TidemillError
from common.keys import Keys
from common.messages import SamplingParams, Ticket
from common.streams import Entry, append_numbered, entry_id_of, id_order, last_id, read_range
from services.trainer.prompts import PromptSource

log = structlog.get_logger(__name__)

READ_BATCH = 512


@dataclass(frozen=True, slots=True)
class Outstanding:
    """A ticket that was issued and has reached no end yet."""

    ticket: int
    step: int
    min_version: int
    replaces: int = -1


class Scheduler:
    """Issues tickets in order, and remembers which are outstanding.

    `expect` is told of tickets before the stream has them: a worker may answer sooner than Redis does.
    """

    def __init__(
        self,
        broker: Broker,
        keys: Keys,
        config: RunConfig,
        prompts: PromptSource,
        expect: Callable[[list[Outstanding]], None],
    ) -> None:
        self.broker, self.keys, self.prompts, self.expect = broker, keys, prompts, expect
        self.trainer = config.trainer
        sampling = config.rollout.sampling
        self.sampling = SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
        )
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

    async def replace(self, ticket: int, step: int) -> list[Outstanding]:
        """Issue a fresh ticket for the same step in place of one whose group cannot be trained.

        `step` is the one in progress. With `as_ready` the old ticket may have been meant for an earlier
        one; a group that starts only now must not be older than the step in progress allows.
        """
        old = self.outstanding.pop(ticket)
        self.num_replacements += 1
        return await self._issue([self._ticket(self.next_ticket, max(old.step, step), replaces=ticket)])

    def settle(self, ticket: int) -> None:
        """The group was trained: its ticket is outstanding no more."""
        self.outstanding.pop(ticket, None)

    async def adopt_issued(self) -> list[Ticket]:
        """Take in tickets that an earlier process issued after the state this one was restored from."""
        adopted: list[Ticket] = []
        first = entry_id_of(self.next_ticket)
        while entries := await read_range(self.broker, self.keys.prompts(), Ticket, first, count=READ_BATCH):
            for entry in entries:
                if isinstance(entry, Entry) and entry.message.ticket == self.next_ticket:
                    self._adopt(entry.message)
                    adopted.append(entry.message)
            first = f"({entries[-1].entry_id}"
        return adopted

    async def reissue_lost(self) -> int:
        """Issue again, unchanged, the outstanding tickets above the stream's last id: Redis has lost them."""
        last = id_order(await last_id(self.broker, self.keys.prompts()))[0] - 1
        lost = [self.outstanding[number] for number in sorted(self.outstanding) if number > last]
        tickets = [self._ticket(item.ticket, item.step, item.replaces) for item in lost]
        if tickets:
            log.warning("issuing tickets again that Redis has lost", count=len(tickets), first=lost[0].ticket)
            await append_numbered(self.broker, self.keys.prompts(), ((t.ticket, t) for t in tickets))
        return len(tickets)

    def state(self) -> dict[str, Any]:
        """For the checkpoint."""
        return {
            "next_ticket": self.next_ticket,
            "num_replacements": self.num_replacements,
            "outstanding": [[item.ticket, item.step, item.replaces] for item in self.outstanding.values()],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint's state."""
        self.next_ticket = int(state["next_ticket"])
        self.num_replacements = int(state["num_replacements"])
        for ticket, step, replaces in state["outstanding"]:
            self.outstanding[ticket] = Outstanding(ticket, step, self._min_version(step), replaces)

    def _adopt(self, ticket: Ticket) -> None:
        if ticket.replaces >= 0:
            self.num_replacements += 1
            self.outstanding.pop(ticket.replaces, None)
        self.outstanding[ticket.ticket] = _outstanding(ticket)
        self.next_ticket = ticket.ticket + 1

    async def _issue(self, tickets: list[Ticket]) -> list[Outstanding]:
        if not tickets:
            return []
        # Lost ones first: the stream takes no number below its last.
        await self.reissue_lost()
        issued = [_outstanding(ticket) for ticket in tickets]
        self.next_ticket = tickets[-1].ticket + 1
        self.outstanding |= {item.ticket: item for item in issued}
        self.expect(issued)
        numbered = [(ticket.ticket, ticket) for ticket in tickets]
        if await append_numbered(self.broker, self.keys.prompts(), numbered) < len(tickets):
            await self._check_issued(tickets)
        for item in issued:
            metrics.TICKETS_ISSUED.labels("replacement" if item.replaces >= 0 else "regular").inc()
        return issued

    async def _check_issued(self, tickets: list[Ticket]) -> None:
        """Some ids were taken: by these tickets, if Redis did the append before the connection broke."""
        key, first, last = self.keys.prompts(), tickets[0].ticket, tickets[-1].ticket
        found = await read_range(self.broker, key, Ticket, entry_id_of(first), entry_id_of(last))
        there = {entry.message.ticket for entry in found if isinstance(entry, Entry)}
        if missing := [ticket.ticket for ticket in tickets if ticket.ticket not in there]:
            raise TidemillError(
                f"ticket {missing[0]} cannot be issued: {key} stands at {await last_id(self.broker, key)}, "
                f"beyond {entry_id_of(missing[0])}. Something other than this trainer has written to it; "
                "remove those entries (XDEL, then XSETID and XGROUP SETID to the last ticket), and restart."
            )

    def _regular(self, number: int) -> Ticket:
        return self._ticket(number, (number - self.num_replacements) // self.trainer.groups_per_step)

    def _ticket(self, number: int, step: int, replaces: int = -1) -> Ticket:
        prompt = self.prompts.prompt_at(number)
        return Ticket(
            ticket=number,
            step=step,
            min_version=self._min_version(step),
            group_size=self.trainer.group_size,
            sampling=self.sampling,
            row=prompt.row,
            replaces=replaces,
            prompt_ids=prompt.ids,
            prompt_text=prompt.text,
            own_text=prompt.own_text,
            data_source=prompt.data_source,
            ground_truth=prompt.ground_truth,
            extra=prompt.extra,
        )

    def _min_version(self, step: int) -> int:
        return max(0, step - self.trainer.max_staleness)


def _outstanding(ticket: Ticket) -> Outstanding:
    return Outstanding(ticket.ticket, ticket.step, ticket.min_version, ticket.replaces)

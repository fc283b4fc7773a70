"""What became of tickets: whether anything still waits for a message that died.

Computed from the streams, so the answer is right whether the trainer runs or not. An empty answer means
that the message still matters.
"""

from dataclasses import dataclass, field

from common.broker import Broker
from common.entries import Entry, entry_id_of
from common.keys import Keys
from common.messages import Commit, Lane, Ticket
from common.run_state import FINISHED, read_state
from common.streams import has_entry, scan

WHOLE_GROUP = -1
COMMITS_BATCH, TICKETS_BATCH = 32, 256


@dataclass(slots=True)
class Fates:
    """The ends that tickets have come to, by number."""

    trained: dict[int, int] = field(default_factory=dict)
    """Ticket -> step that trained its group."""
    dropped: dict[int, tuple[int, str]] = field(default_factory=dict)
    """Ticket -> step whose commit tells that it was replaced, and why."""
    replaced_by: dict[int, int] = field(default_factory=dict)
    """Ticket -> the ticket that was issued in its place."""
    evaluated: set[int] = field(default_factory=set)
    """Versions whose evaluation is on record."""
    is_finished: bool = False

    @classmethod
    async def read(cls, broker: Broker, keys: Keys) -> "Fates":
        """Read a run's commits, tickets and state."""
        state = await read_state(broker, keys)
        fates = cls(is_finished=state.get("status") == FINISHED)
        fates.evaluated = {item.get("version", -1) for item in state.get("evaluations") or []}
        async for entry in scan(broker, keys.commits, Commit, batch=COMMITS_BATCH):
            if isinstance(entry, Entry):
                fates._add(entry.message)
        async for ticket in scan(broker, keys.prompts(), Ticket, batch=TICKETS_BATCH):
            if isinstance(ticket, Entry) and ticket.message.replaces >= 0:
                fates.replaced_by[ticket.message.replaces] = ticket.message.ticket
        return fates

    def of(self, ticket: int, lane: Lane, version: int | None = None) -> str:
        """Why nothing waits for this ticket any more, in words; empty where something does.

        `version` is what an evaluation ticket evaluates.
        """
        if lane is Lane.EVAL:
            if version is not None and version in self.evaluated:
                return f"the evaluation of version {version} is on record, without this sample"
        elif ticket in self.trained:
            return f"ticket {ticket} was trained at step {self.trained[ticket]}, which is committed"
        elif ticket in self.replaced_by:
            return f"ticket {ticket} was replaced by ticket {self.replaced_by[ticket]}"
        elif ticket in self.dropped:
            return f"ticket {ticket} was replaced; the commit of step {self.dropped[ticket][0]} tells of it"
        return "the run is finished" if self.is_finished else ""

    def _add(self, commit: Commit) -> None:
        self.trained.update((ticket, commit.step) for ticket in commit.groups)
        for ticket, index, reason in commit.dropped:
            if index == WHOLE_GROUP:
                self.dropped[ticket] = commit.step, reason


async def is_trimmed(broker: Broker, keys: Keys, ticket: int, lane: Lane) -> bool:
    """Whether the ticket itself has been let go of, as happens when nothing needs it any more."""
    return not await has_entry(broker, keys.prompts(lane), entry_id_of(ticket))

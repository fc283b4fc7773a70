"""Puts dead messages back where they belong, or says why that would be of no use.

What it means depends on where the message died:

* a ticket (`prompts`) or a trajectory is still in its stream, under its own id. Its entry becomes pending
  again in its consumer group, and the next worker takes it. Nothing is appended: a ticket's number is its
  entry id, and the log of trajectories must not hold one twice.
* a score is appended to its log again; the trainer takes the first one of a key.
* commits, weights, and trajectories that are too old for their step are never put back.

In training, the trainer replaces the group of a dead ticket or trajectory by a fresh one. From then on the
old one can no longer matter, and is refused. So this is for a run whose trainer stands still, for
evaluations in progress, and for messages that only a newer release can read.
"""

from dataclasses import dataclass
from pathlib import Path

from tidemill.common.config import RunConfig
from tidemill.common.history import History
from tidemill.common.history.groups import TicketOutcomes
from tidemill.common.redis.broker import Broker
from tidemill.common.run.state import FINISHED, read_state
from tidemill.common.streams import (
    DONE,
    LETTER_GONE,
    group_status,
    has_entry,
    reappend,
    remove_entries,
    requeue,
    scan,
)
from tidemill.common.streams.entries import Entry, entry_id_of
from tidemill.common.wire.keys import REWARD_GROUP, ROLLOUT_GROUP, Keys
from tidemill.common.wire.messages import Lane, Ticket, Trajectory
from tidemill.services.console.dead.entries import DeadEntry

ONLY_TRAINER = "is written by the trainer alone, which writes it again itself where it is needed"
GONE = "the dead letter is gone: somebody has put it back or dropped it meanwhile"


@dataclass(frozen=True, slots=True)
class RequeueResult:
    """What came of one entry."""

    entry: DeadEntry
    is_done: bool
    words: str


@dataclass(frozen=True, slots=True)
class TicketEnds:
    """Why nothing waits for a ticket any more, in words."""

    outcomes: TicketOutcomes
    evaluated: frozenset[int] = frozenset()
    """Versions whose evaluation is on record."""
    is_finished: bool = False

    @classmethod
    async def read(cls, broker: Broker, keys: Keys, run_dir: Path | None = None) -> "TicketEnds":
        """Read a run's commits, tickets and state."""
        state = await read_state(broker, keys)
        evaluated = frozenset(item.get("version", -1) for item in state.get("evaluations") or [])
        outcomes = await TicketOutcomes.read(History(keys.run_id, run_dir, broker))
        return cls(outcomes, evaluated, state.get("status") == FINISHED)

    def of(self, ticket: int, lane: Lane, version: int | None = None) -> str:
        """The reason; empty where something still waits. `version` is what an evaluation ticket evaluates."""
        known = self.outcomes
        if lane is Lane.EVAL:
            if version is not None and version in self.evaluated:
                return f"the evaluation of version {version} is on record, without this sample"
        elif ticket in known.trained:
            return f"ticket {ticket} was trained at step {known.trained[ticket]}, which is committed"
        elif ticket in known.replaced_by:
            return f"ticket {ticket} was replaced by ticket {known.replaced_by[ticket]}"
        elif ticket in known.dropped:
            return f"ticket {ticket} was replaced; the commit of step {known.dropped[ticket]} tells of it"
        return "the run is finished" if self.is_finished else ""


class Requeuer:
    """Puts dead messages of one run back, one at a time."""

    def __init__(self, broker: Broker, keys: Keys, config: RunConfig, ends: TicketEnds) -> None:
        self.broker, self.keys, self.config, self.ends = broker, keys, config, ends

    async def put_back(self, entry: DeadEntry) -> RequeueResult:
        """Put one message back, exactly once, or say why not."""
        if reason := await self._refusal(entry):
            return RequeueResult(entry, False, reason)
        if entry.stream == "scores":
            key = self.keys.scores(entry.lane)
            is_done = await reappend(self.broker, self.keys.dead, entry.entry_id, key, entry.fields)
            return RequeueResult(entry, is_done, "appended to the scores again" if is_done else GONE)
        return await self._hand_out_again(entry)

    async def drop(self, entry: DeadEntry) -> RequeueResult:
        """Remove an entry for good, unless the trainer has yet to act on it."""
        reason = await self.reason_to_keep(entry)
        if not reason and not await remove_entries(self.broker, self.keys.dead, [entry.entry_id]):
            reason = "it is gone already"
        return RequeueResult(entry, not reason, reason)

    async def reason_to_keep(self, entry: DeadEntry) -> str:
        """Why it must not be dropped yet: the trainer learns from it that a group is dead."""
        ticket = entry.content.ticket
        is_news = entry.stream in ("prompts", "trajectories") and entry.content.entry_id and ticket >= 0
        if not is_news or entry.lane is Lane.EVAL or self.ends.of(ticket, entry.lane):
            return ""
        if await self._is_trimmed(ticket, entry.lane):
            return ""
        return f"ticket {ticket} is not replaced yet: the trainer does so when it reads this dead letter"

    async def _refusal(self, entry: DeadEntry) -> str:
        """Why it cannot be put back, or would be of no use; empty where it can."""
        if not entry.is_readable:
            return "the dead letter itself cannot be decoded; drop it"
        if entry.stream not in ("prompts", "trajectories", "scores"):
            return f"the stream {entry.content.origin!r} {ONLY_TRAINER}"
        if entry.message is None:
            return f"it still cannot be decoded ({entry.problem}) and would only die again"
        if entry.stream == "trajectories" and not entry.content.entry_id:
            return "it is too old for its step and may never be trained on; its group was replaced"
        ticket, _ = entry.key
        if end := self.ends.of(ticket, entry.lane, _version_of(entry)):
            return f"{end}; there is nothing left that it could be used for"
        if await self._is_trimmed(ticket, entry.lane):
            return f"ticket {ticket} has been trimmed: nothing needs it any more"
        return ""

    async def _is_trimmed(self, ticket: int, lane: Lane) -> bool:
        """Whether the ticket itself was trimmed, as happens when nothing needs it any more."""
        return not await has_entry(self.broker, self.keys.prompts(lane), entry_id_of(ticket))

    async def _hand_out_again(self, entry: DeadEntry) -> RequeueResult:
        """Make a ticket or a trajectory pending again, for the next worker that reclaims."""
        lane, (ticket, _) = entry.lane, entry.key
        is_ticket = entry.stream == "prompts"
        key = self.keys.prompts(lane) if is_ticket else self.keys.trajectories(lane)
        group = ROLLOUT_GROUP if is_ticket else REWARD_GROUP
        lease_s, published = self.config.streams.lease_s, dict[int, int]()
        if await group_status(self.broker, key, group) is None:
            return RequeueResult(entry, False, f"no {group} worker has ever joined; start one first")
        if is_ticket:  # what was published before it died must not be generated a second time
            published = await self._published(ticket, lane)
        answer = await requeue(
            self.broker,
            self.keys.dead,
            entry.entry_id,
            key,
            group,
            entry.content.entry_id,
            lease_s=lease_s,
            progress_key=self.keys.progress(ticket, lane),
            published=sorted(published),
            started_version=min(published.values(), default=None),
        )
        if answer == DONE:
            return RequeueResult(entry, True, f"the next {group} worker takes it, within {lease_s:g} s")
        trimmed = "its stream does not hold it any more: it was trimmed, so nothing needs it"
        return RequeueResult(entry, False, GONE if answer == LETTER_GONE else trimmed)

    async def _published(self, ticket: int, lane: Lane) -> dict[int, int]:
        """The least version in each published sample of a ticket, by index."""
        published: dict[int, int] = {}
        async for entry in scan(self.broker, self.keys.trajectories(lane), Trajectory):
            if isinstance(entry, Entry) and entry.message.ticket == ticket:
                published.setdefault(entry.message.index, entry.message.min_version)
        return published


def _version_of(entry: DeadEntry) -> int | None:
    """The version that an evaluation's message belongs to: the step its ticket was issued for."""
    return entry.message.step if isinstance(entry.message, Ticket | Trajectory) else None

"""`tidemill dead requeue` and `drop`: puts dead messages back where they belong, or removes them for good.

What putting back means depends on where the message died:

* a ticket (`prompts`) or a trajectory is still in its stream, under its own id. Its entry becomes pending
  again in its consumer group, and the next worker takes it. Nothing is appended: a ticket's number is its
  entry id, and the log of trajectories must not hold one twice.
* a score is appended to its log again; the trainer takes the first one of a key.
* commits, weights, and trajectories that are too old for their step are never put back.

In training, the trainer replaces the group of a dead ticket or trajectory by a fresh one. From then on the
old one can no longer matter, and is refused. So this is for a run whose trainer stands still, for
evaluations in progress, and for messages that only a newer release can read.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tidemill.common.config import RunConfig
from tidemill.common.errors import ConfigError
from tidemill.common.history import History
from tidemill.common.history.groups import TicketOutcomes
from tidemill.common.process.programs import run_main
from tidemill.common.redis.broker import Broker
from tidemill.common.run.state import FINISHED, read_config, read_state
from tidemill.common.streams import (
    DONE,
    LETTER_GONE,
    Progress,
    group_status,
    has_entry,
    reappend,
    remove_entries,
    requeue,
    scan,
)
from tidemill.common.streams.entries import Entry, entry_id_of
from tidemill.common.wire.keys import REWARD_GROUP, ROLLOUT_GROUP, Keys
from tidemill.common.wire.messages import DeadLetter, Lane, Ticket, Trajectory
from tidemill.services.console.dead.entries import DeadEntry, chosen, read_dead
from tidemill.services.console.options import DeadChoice, DropOptions
from tidemill.services.console.run.folder import connected, find_run, log_nothing
from tidemill.services.console.text.formats import plural
from tidemill.services.console.text.tree import note, part, print_tree, terminal

SCAN_BATCH = 16
"""Entries read at once: each may hold a message of the greatest size."""
GONE = "the dead letter is gone: somebody has put it back or dropped it meanwhile"


class RequeueResult(NamedTuple):
    is_done: bool
    words: str


@dataclass(frozen=True, slots=True)
class Requeuer:
    """Puts dead messages of one run back, one at a time."""

    broker: Broker
    keys: Keys
    config: RunConfig
    outcomes: TicketOutcomes
    evaluated: frozenset[int]
    """Versions whose evaluation is on record."""
    is_finished: bool

    @classmethod
    async def open(
        cls, broker: Broker, keys: Keys, config: RunConfig, run_dir: Path | None = None
    ) -> "Requeuer":
        """Read a run's commits, tickets and state first."""
        state = await read_state(broker, keys)
        evaluated = frozenset(item.get("version", -1) for item in state.get("evaluations") or [])
        outcomes = await TicketOutcomes.read(History(keys.run_id, run_dir, broker))
        return cls(broker, keys, config, outcomes, evaluated, state.get("status") == FINISHED)

    async def put_back(self, entry: DeadEntry) -> RequeueResult:
        """Put one message back, exactly once, or say why not."""
        if reason := await self._refusal(entry):
            return RequeueResult(False, reason)
        if entry.stream == "scores":
            key = self.keys.scores(entry.lane)
            is_done = await reappend(self.broker, self.keys.dead, entry.entry_id, key, entry.fields)
            return RequeueResult(is_done, "appended to the scores again" if is_done else GONE)
        return await self._hand_out_again(entry)

    async def drop(self, entry: DeadEntry) -> RequeueResult:
        """Remove an entry for good, unless the trainer has yet to act on it."""
        reason = await self.reason_to_keep(entry)
        if not reason and not await remove_entries(self.broker, self.keys.dead, [entry.entry_id]):
            reason = "it is gone already"
        return RequeueResult(not reason, reason)

    async def reason_to_keep(self, entry: DeadEntry) -> str:
        """Why it must not be dropped yet: the trainer learns from it that a group is dead."""
        ticket = entry.content.ticket
        is_of_group = entry.stream in ("prompts", "trajectories") and entry.content.entry_id and ticket >= 0
        if not is_of_group or entry.lane is Lane.EVAL or self._end_of(ticket, entry.lane):
            return ""
        if await self._is_trimmed(ticket, entry.lane):
            return ""
        return f"ticket {ticket} is not replaced yet: the trainer does so when it reads this dead letter"

    async def _refusal(self, entry: DeadEntry) -> str:
        """Why it cannot be put back, or would be of no use; empty where it can."""
        if not entry.is_readable:
            return "the dead letter itself cannot be decoded; drop it"
        if entry.stream not in ("prompts", "trajectories", "scores"):
            return (
                f"the stream {entry.content.origin!r} is written by the trainer alone, which writes it again "
                "itself where it is needed"
            )
        if entry.message is None:
            return f"it still cannot be decoded ({entry.problem}) and would only die again"
        if entry.stream == "trajectories" and not entry.content.entry_id:
            return "it is too old for its step and may never be trained on; its group was replaced"
        ticket, _ = entry.key
        # The step that a ticket of an evaluation was issued for is the version that it evaluates.
        version = entry.message.step if isinstance(entry.message, Ticket | Trajectory) else None
        if end := self._end_of(ticket, entry.lane, version):
            return f"{end}; there is nothing left that it could be used for"
        if await self._is_trimmed(ticket, entry.lane):
            return f"ticket {ticket} has been trimmed: nothing needs it any more"
        return ""

    def _end_of(self, ticket: int, lane: Lane, version: int | None = None) -> str:
        """Why nothing waits for a ticket any more, in words; empty where something still does."""
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

    async def _is_trimmed(self, ticket: int, lane: Lane) -> bool:
        """Whether the ticket itself was trimmed, as happens when nothing needs it any more."""
        return not await has_entry(self.broker, self.keys.prompts(lane), entry_id_of(ticket))

    async def _hand_out_again(self, entry: DeadEntry) -> RequeueResult:
        """Make a ticket or a trajectory pending again, for the next worker that reclaims."""
        lane, (ticket, _), lease_s = entry.lane, entry.key, self.config.streams.lease_s
        key, group = self.keys.trajectories(lane), REWARD_GROUP
        progress = Progress(self.keys.progress(ticket, lane))
        if entry.stream == "prompts":
            key, group = self.keys.prompts(lane), ROLLOUT_GROUP
            progress = await self._progress(ticket, lane)
        if await group_status(self.broker, key, group) is None:
            return RequeueResult(False, f"no {group} worker has ever joined; start one first")
        answer = await requeue(
            self.broker,
            self.keys.dead,
            entry.entry_id,
            key,
            group,
            entry.content.entry_id,
            lease_s=lease_s,
            progress=progress,
        )
        if answer == DONE:
            return RequeueResult(True, f"the next {group} worker takes it, within {lease_s:g} s")
        trimmed = "its stream does not hold it any more: it was trimmed, so nothing needs it"
        return RequeueResult(False, GONE if answer == LETTER_GONE else trimmed)

    async def _progress(self, ticket: int, lane: Lane) -> Progress:
        """What was published before the ticket died must not be generated a second time."""
        published: dict[int, int] = {}
        async for entry in scan(self.broker, self.keys.trajectories(lane), Trajectory):
            if isinstance(entry, Entry) and entry.message.ticket == ticket:
                published.setdefault(entry.message.index, entry.message.min_version)
        least = min(published.values(), default=None)
        return Progress(self.keys.progress(ticket, lane), sorted(published), least)


def change_entries(choice: DeadChoice) -> int:
    """Put the chosen messages back, or drop them where `choice` is of that command, and print what came of
    each; returns 0, or 1 where one that was named could not be.

    Raises:
        ConfigError: neither ids nor --all were given, or both, or an id is not there; or messages would be
            dropped, nobody can be asked, and --yes was not given.
    """
    verb, done = ("drop", "dropped") if isinstance(choice, DropOptions) else ("requeue", "put back")
    if bool(choice.ids) == choice.has_all:
        raise ConfigError(
            f"tidemill dead {verb} takes the ids of dead letters, or --all; `tidemill dead show` has them."
        )
    if choice.ids and choice.is_narrow:
        raise ConfigError("filters choose among --all dead letters; leave them out, or the ids.")

    async def change() -> list[tuple[DeadEntry, RequeueResult]]:
        log_nothing()
        folder = find_run(choice.run_id, choice.runs_dir)
        async with connected(folder) as broker:
            keys = Keys(folder.run_id)
            config = await read_config(broker, keys)
            found = scan(broker, keys.dead, DeadLetter, batch=SCAN_BATCH)
            entries = chosen(choice, await read_dead(found, choice, config))
            if isinstance(choice, DropOptions) and entries and not choice.is_sure:
                _ask(entries)
            # Read after the question: the trainer may have replaced a group while nobody answered.
            requeuer = await Requeuer.open(broker, keys, config, folder.path)
            act = requeuer.drop if isinstance(choice, DropOptions) else requeuer.put_back
            return [(entry, await act(entry)) for entry in entries]

    results = run_main(change())
    num_done = sum(result.is_done for _, result in results)
    notes = [
        note(
            f"{entry.entry_id}  {entry.content.origin} {entry.name}  {'' if result.is_done else 'not '}{done}"
            + (f"  {result.words}" if result.words else ""),
            "green" if result.is_done else "yellow",
        )
        for entry, result in results
    ]
    print_tree(terminal(), part("", notes, note(f"{num_done} of {len(results)} {done}")))
    return 1 if choice.ids and num_done < len(results) else 0


def _ask(entries: Sequence[DeadEntry]) -> None:
    """Let the user confirm that entries are removed for good."""
    count = plural(len(entries), "dead letter")
    if not sys.stdin.isatty():
        raise ConfigError(f"dropping {count} cannot be undone; say --yes where nobody can be asked.")
    answer = input(f"Drop {count} for good, with their bytes? [y/N] ")
    if answer.strip().lower() not in ("y", "yes"):
        raise ConfigError("nothing was dropped.")

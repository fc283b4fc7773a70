"""All groups of a run in memory, in step with its streams, so that pages answer in milliseconds.

Guarantees: streams are read through `History`, each entry once; the loop gets its turn after every few
entries; no more than `MAX_GROUPS` rows of a lane are kept, the newest, and how many were given up is counted.
"""

import asyncio
import math
from array import array
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from tidemill.common.history import History, Selection, StreamName
from tidemill.common.history.groups import dropped_groups, left_out
from tidemill.common.history.records import KnownPlaces
from tidemill.common.history.sessions import num_completion_tokens
from tidemill.common.streams.entries import Entry, id_after, id_order
from tidemill.common.wire.messages import Commit, Lane, Message, Score, ScoreStatus, Ticket, Trajectory
from tidemill.services.console.status.snapshot import StepPoint

MAX_TEXT_CHARACTERS = 1200
"""Text of a group that can be searched: the beginnings of prompt, answer and completions."""
MAX_PART_CHARACTERS = 240
"""Of one of these."""
MAX_KEPT_REWARDS = 32
"""Rewards of single samples that a row keeps, to draw them."""
MAX_WORKERS = 4
MAX_GROUP_SIZE = 4096
"""Of any ticket; a score may name any index."""

STATES = ("issued", "generating", "generated", "scored", "trained", "dropped")

EntryId = tuple[int, int]


@dataclass(slots=True)
class Spread:
    """Count, mean, standard deviation and extremes of numbers that come one by one."""

    count: int = 0
    mean: float = 0.0
    _squares: float = 0.0
    least: float = math.inf
    most: float = -math.inf

    def add(self, value: float) -> None:
        """Take one number in (Welford)."""
        self.count += 1
        delta = value - self.mean
        self.mean += delta / self.count
        self._squares += delta * (value - self.mean)
        self.least, self.most = min(self.least, value), max(self.most, value)

    @property
    def std(self) -> float:
        """Unbiased standard deviation; 0 of fewer than two."""
        return math.sqrt(max(0.0, self._squares) / (self.count - 1)) if self.count > 1 else 0.0


@dataclass(slots=True)
class Window:
    """The part of a stream that holds a group's entries."""

    first: EntryId | None = None
    last: EntryId | None = None

    @property
    def ids(self) -> tuple[str, str] | None:
        """First and last entry id; None where there is none."""
        return ("{}-{}".format(*self.first), "{}-{}".format(*self.last)) if self.first and self.last else None

    def include(self, entry_id: str) -> None:
        order = id_order(entry_id)
        self.first = order if self.first is None else min(self.first, order)
        self.last = order if self.last is None else max(self.last, order)


@dataclass(slots=True)
class GroupRow:
    """What is known of a ticket's group."""

    ticket: int
    step: int = -1
    """The step it was issued for; -1 until the ticket or a trajectory was read."""
    group_size: int = 0
    issued_at: float = 0.0
    finished_at: float = 0.0
    """When its last completion so far was finished."""
    replaces: int = -1
    rewards: Spread = field(default_factory=Spread)
    lengths: Spread = field(default_factory=Spread)
    kept_rewards: "array[float]" = field(default_factory=lambda: array("f"))
    num_failed: int = 0
    """Scores that failed or timed out."""
    num_cut: int = 0
    """Completions that reached the greatest length."""
    workers: tuple[str, ...] = ()
    min_version: int = -1
    max_version: int = -1
    trained_step: int = -1
    dropped_step: int = -1
    dropped: str = ""
    """Why the whole group was left out."""
    num_dropped: int = 0
    """Single samples that were left out."""
    prompt: str = ""
    text: str = ""
    """What can be searched, folded to one case."""
    trajectories: Window = field(default_factory=Window)
    scores: Window = field(default_factory=Window)
    _generated: int = 0
    _scored: int = 0
    """Bit sets of the indices seen."""

    @property
    def state(self) -> str:
        """How far it has come, one of `STATES`."""
        if self.trained_step >= 0:
            return "trained"
        if self.dropped:
            return "dropped"
        num_scored = self.rewards.count + self.num_failed
        if num_scored and num_scored >= self.group_size:
            return "scored"
        if self.lengths.count and self.lengths.count >= self.group_size:
            return "generated"
        return "generating" if self.lengths.count or num_scored else "issued"

    @property
    def at_step(self) -> int:
        """The step that trained on it, else the one it was issued for."""
        return self.trained_step if self.trained_step >= 0 else self.step

    def add_ticket(self, ticket: Ticket) -> None:
        """The permission to generate it."""
        self.step, self.group_size = ticket.step, ticket.group_size
        self.issued_at, self.replaces = ticket.issued_at, ticket.replaces
        self._describe(ticket.prompt_text, ticket.ground_truth)

    def add_trajectory(self, entry_id: str, trajectory: Trajectory) -> None:
        bit = 1 << trajectory.index
        if self._generated & bit:
            return
        self._generated |= bit
        self.step, self.group_size = trajectory.step, trajectory.group_size
        self.trajectories.include(entry_id)
        self.lengths.add(sum(num_completion_tokens(trajectory)))
        self.num_cut += trajectory.finish == "length"
        self.finished_at = max(self.finished_at, trajectory.finished_at)
        if trajectory.worker not in self.workers and len(self.workers) < MAX_WORKERS:
            self.workers += (trajectory.worker[:100],)
        least = trajectory.min_version
        self.min_version = least if self.min_version < 0 else min(self.min_version, least)
        self.max_version = max(self.max_version, trajectory.max_version)
        self._describe(trajectory.prompt_text, trajectory.ground_truth)
        self._remember(trajectory.text)

    def add_score(self, entry_id: str, score: Score) -> None:
        if score.index >= MAX_GROUP_SIZE:
            return
        bit = 1 << score.index
        if self._scored & bit:
            return
        self._scored |= bit
        self.scores.include(entry_id)
        if score.status is not ScoreStatus.OK or score.value is None:
            self.num_failed += 1
            return
        self.rewards.add(score.value)
        if len(self.kept_rewards) < MAX_KEPT_REWARDS:
            self.kept_rewards.append(score.value)

    def known_places(self, has_letters: bool) -> KnownPlaces:
        """Where its entries are, and the step whose commit names it."""
        step = self.trained_step if self.trained_step >= 0 else self.dropped_step
        return KnownPlaces(self.trajectories.ids, self.scores.ids, step, has_letters)

    def drop(self, step: int, reason: str) -> None:
        """The whole group was left out by a step."""
        self.dropped_step, self.dropped = step, reason[:200]
        self.step = step if self.step < 0 else self.step

    def _describe(self, prompt: str, answer: object) -> None:
        if not self.prompt and prompt:
            self.prompt = prompt[:MAX_PART_CHARACTERS]
            self._remember(prompt)
            if isinstance(answer, str | int | float):
                self._remember(str(answer))

    def _remember(self, text: str) -> None:
        room = MAX_TEXT_CHARACTERS - len(self.text)
        if text and room > 1:
            self.text += "\n" + text[: min(room - 1, MAX_PART_CHARACTERS)].casefold()


MAX_GROUPS = 250_000
"""Of each lane."""
TURN_ENTRIES = 64
"""Entries between two turns of everybody else on the loop."""


@dataclass(slots=True)
class GroupIndex:
    """Groups by lane and ticket, and steps by number."""

    groups: dict[Lane, dict[int, GroupRow]] = field(default_factory=lambda: {lane: {} for lane in Lane})
    steps: dict[int, StepPoint] = field(default_factory=dict)
    num_forgotten: int = 0
    num_garbled: int = 0
    is_complete: bool = False
    """Whether everything that was there at the start has been read."""
    generation: int = 0
    """Grows with every change."""
    max_groups: int = MAX_GROUPS
    _positions: dict[StreamName, str] = field(default_factory=dict)
    _order: dict[Lane, deque[int]] = field(default_factory=lambda: {lane: deque() for lane in Lane})
    _floor: dict[Lane, int] = field(default_factory=lambda: dict.fromkeys(Lane, -1))
    """Tickets up to here were given up."""

    def get(self, ticket: int, lane: Lane) -> GroupRow | None:
        """The row of a ticket."""
        return self.groups[lane].get(ticket)

    def rows(self, lane: Lane) -> Iterator[GroupRow]:
        """All rows of a lane, by when they were first seen."""
        return iter(self.groups[lane].values())

    async def follow(self, history: History) -> int:
        """Read what is new in all streams; returns how many entries that were."""
        num_new = await self._follow(history, StreamName.COMMITS)
        for lane in Lane:
            for name in (StreamName.PROMPTS, StreamName.TRAJECTORIES, StreamName.SCORES):
                num_new += await self._follow(history, name.of(lane))
        self.is_complete = True
        return num_new

    async def _follow(self, history: History, name: StreamName) -> int:
        num_new = 0
        selection = Selection(first_id=self._positions.get(name, "-"))
        async for record in history.scan(name, selection):
            self._positions[name] = id_after(record.entry_id)
            self.generation += 1
            if isinstance(record, Entry):
                self._add(name.lane, record.entry_id, record.message)
            else:
                self.num_garbled += 1
            num_new += 1
            if num_new % TURN_ENTRIES == 0:
                await asyncio.sleep(0)
        return num_new

    def _add(self, lane: Lane, entry_id: str, message: Message) -> None:
        match message:
            case Ticket():
                self._row(message.ticket, lane).add_ticket(message)
            case Trajectory():
                self._row(message.ticket, lane).add_trajectory(entry_id, message)
            case Score():
                self._row(message.ticket, lane).add_score(entry_id, message)
            case Commit():
                self._add_commit(message)

    def _add_commit(self, commit: Commit) -> None:
        self.steps[commit.step] = StepPoint.of(commit)
        for ticket in commit.groups:
            self._row(ticket, Lane.TRAIN).trained_step = commit.step
        for ticket, reason in dropped_groups(commit):
            self._row(ticket, Lane.TRAIN).drop(commit.step, reason)
        for ticket, _, _ in left_out(commit):
            self._row(ticket, Lane.TRAIN).num_dropped += 1

    def _row(self, ticket: int, lane: Lane) -> GroupRow:
        """The row of a ticket; one that is kept nowhere where the ticket was given up."""
        rows, order = self.groups[lane], self._order[lane]
        row = rows.get(ticket)
        if row is not None:
            return row
        row = GroupRow(ticket)
        if ticket > self._floor[lane]:
            rows[ticket] = row
            order.append(ticket)
            if len(order) > self.max_groups:
                oldest = order.popleft()
                del rows[oldest]
                self._floor[lane] = max(self._floor[lane], oldest)
                self.num_forgotten += 1
        return row

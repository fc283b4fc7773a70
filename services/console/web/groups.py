"""An index of all groups of a run in memory, kept up to date with its streams, and queries on it.

Guarantees: streams are read through `History`, each entry once; the event loop runs after every few entries;
the newest `MAX_GROUPS` rows of a lane are kept, and those removed are counted. The address of a page has the
whole query, so that it can be kept and shared; what cannot be understood is ignored, and the page says so.
"""

import asyncio
import math
from array import array
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlencode

from tidemill.common.history import History, Selection, StreamName
from tidemill.common.history.groups import dropped_groups
from tidemill.common.streams.entries import Entry, id_after
from tidemill.common.streams.selection import Range
from tidemill.common.wire.messages import (
    Commit,
    Lane,
    Message,
    Score,
    ScoreStatus,
    Ticket,
    Trajectory,
    is_demonstration,
)
from tidemill.services.console.look.joins import KnownPlaces
from tidemill.services.console.look.selection import parse_range
from tidemill.services.console.look.sessions import num_completion_tokens
from tidemill.services.console.look.snapshot import StepPoint

MAX_TEXT_CHARACTERS = 1200
"""Text of a group that can be searched: the beginnings of prompt, answer and completions."""
MAX_PART_CHARACTERS = 240
"""Characters of one of these."""
MAX_KEPT_REWARDS = 32
"""Rewards of single samples that a row keeps, to draw them."""
MAX_WORKERS = 4
MAX_GROUP_SIZE = 4096
"""Scores of larger indices are ignored: a score may name any index."""
MAX_GROUPS = 250_000
"""Rows that are kept for each lane."""
ENTRIES_AT_ONCE = 64
"""Entries that are added before other tasks run."""
STATES = ("issued", "generating", "generated", "scored", "trained", "dropped")


@dataclass(slots=True)
class Spread:
    """Count, mean, standard deviation and extremes of numbers that come one by one."""

    count: int = 0
    mean: float = 0.0
    _squares: float = 0.0
    least: float = math.inf
    most: float = -math.inf

    def add(self, value: float) -> None:
        """Add one number (Welford's algorithm)."""
        self.count += 1
        delta = value - self.mean
        self.mean += delta / self.count
        self._squares += delta * (value - self.mean)
        self.least = min(self.least, value)
        self.most = max(self.most, value)

    @property
    def std(self) -> float:
        """Unbiased standard deviation; 0 of fewer than two."""
        return math.sqrt(max(0.0, self._squares) / (self.count - 1)) if self.count > 1 else 0.0


@dataclass(slots=True)
class GroupRow:
    ticket: int
    step: int = -1
    """The step it was issued for; -1 until the ticket or a trajectory was read."""
    group_size: int = 0
    issued_at: float = 0.0
    finished_at: float = 0.0
    """When its last completion so far was finished."""
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
    """The oldest and the newest version that generated a token; -1 where none did, or none yet."""
    trained_step: int = -1
    dropped_step: int = -1
    dropped: str = ""
    """Why the whole group was left out."""
    prompt: str = ""
    text: str = ""
    """What can be searched, folded to one case."""
    trajectories: tuple[str, str] | None = None
    scores: tuple[str, str] | None = None
    """First and last entry id of the part of the stream that holds its entries."""
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

    @property
    def places(self) -> KnownPlaces:
        step = self.trained_step if self.trained_step >= 0 else self.dropped_step
        return KnownPlaces(self.trajectories, self.scores, step)

    def add_ticket(self, ticket: Ticket) -> None:
        self.step = ticket.step
        self.group_size = ticket.group_size
        self.issued_at = ticket.issued_at
        self._describe(ticket)

    def add_trajectory(self, entry_id: str, trajectory: Trajectory) -> None:
        """The first of an index counts."""
        bit = 1 << trajectory.index
        if self._generated & bit:
            return
        self._generated |= bit
        self.step = trajectory.step
        self.group_size = trajectory.group_size
        self.trajectories = (self.trajectories or (entry_id,))[0], entry_id
        self.lengths.add(sum(num_completion_tokens(trajectory)))
        self.num_cut += trajectory.finish == "length"
        self.finished_at = max(self.finished_at, trajectory.finished_at)
        if trajectory.worker not in self.workers and len(self.workers) < MAX_WORKERS:
            self.workers += (trajectory.worker[:100],)
        if not is_demonstration(trajectory.ticket):  # whose version is a placeholder
            least = trajectory.min_version
            self.min_version = least if self.min_version < 0 else min(self.min_version, least)
            self.max_version = max(self.max_version, trajectory.max_version)
        self._describe(trajectory)
        self._remember(trajectory.thought or "")
        self._remember(trajectory.text)

    def add_score(self, entry_id: str, score: Score) -> None:
        """The first of an index counts."""
        if score.index >= MAX_GROUP_SIZE or self._scored & 1 << score.index:
            return
        self._scored |= 1 << score.index
        self.scores = (self.scores or (entry_id,))[0], entry_id
        if score.status is not ScoreStatus.OK or score.value is None:
            self.num_failed += 1
            return
        self.rewards.add(score.value)
        if len(self.kept_rewards) < MAX_KEPT_REWARDS:
            self.kept_rewards.append(score.value)

    def _describe(self, source: Ticket | Trajectory) -> None:
        if not self.prompt and source.prompt_text:
            self.prompt = source.prompt_text[:MAX_PART_CHARACTERS]
            self._remember(source.prompt_text)
            if isinstance(source.ground_truth, str | int | float):
                self._remember(str(source.ground_truth))

    def _remember(self, text: str) -> None:
        room = MAX_TEXT_CHARACTERS - len(self.text)
        if text and room > 1:
            self.text += "\n" + text[: min(room - 1, MAX_PART_CHARACTERS)].casefold()


@dataclass(slots=True)
class GroupIndex:
    groups: dict[Lane, OrderedDict[int, GroupRow]] = field(
        default_factory=lambda: {lane: OrderedDict() for lane in Lane}
    )
    """Rows by ticket, in the order in which they were first seen."""
    steps: dict[int, StepPoint] = field(default_factory=dict)
    num_forgotten: int = 0
    num_garbled: int = 0
    is_complete: bool = False
    """Whether everything that was there at the start has been read."""
    max_groups: int = MAX_GROUPS
    _positions: dict[StreamName, str] = field(default_factory=dict)
    _floor: defaultdict[tuple[Lane, bool], int] = field(default_factory=lambda: defaultdict(lambda: -1))
    """The highest ticket that was removed, by lane and whether it is a demonstration's."""

    def get(self, ticket: int, lane: Lane = Lane.TRAIN) -> GroupRow | None:
        return self.groups[lane].get(ticket)

    def has_forgotten(self, ticket: int, lane: Lane) -> bool:
        """Whether its row may have been removed to make room."""
        return ticket <= self._floor[lane, is_demonstration(ticket)]

    async def follow(self, history: History) -> None:
        numbered = (StreamName.PROMPTS, StreamName.TRAJECTORIES, StreamName.SCORES)
        num_new = 0
        for name in (StreamName.COMMITS, *(name.of(lane) for lane in Lane for name in numbered)):
            selection = Selection(first_id=self._positions.get(name, "-"))
            async for record in history.scan(name, selection):
                # Before it is added: an entry that fails would end every later reading at the same place.
                self._positions[name] = id_after(record.entry_id)
                if isinstance(record, Entry):
                    self.add(name.lane, record.entry_id, record.message)
                else:
                    self.num_garbled += 1
                num_new += 1
                if num_new % ENTRIES_AT_ONCE == 0:
                    await asyncio.sleep(0)
        self.is_complete = True

    def add(self, lane: Lane, entry_id: str, message: Message) -> None:
        match message:
            case Ticket():
                self._row(message.ticket, lane).add_ticket(message)
            case Trajectory():
                self._row(message.ticket, lane).add_trajectory(entry_id, message)
            case Score():
                self._row(message.ticket, lane).add_score(entry_id, message)
            case Commit():
                self.steps[message.step] = StepPoint.of(message)
                for ticket in message.groups:
                    self._row(ticket, Lane.TRAIN).trained_step = message.step
                for ticket, reason in dropped_groups(message):
                    row = self._row(ticket, Lane.TRAIN)
                    row.dropped_step = message.step
                    row.dropped = reason[:200]
                    row.step = message.step if row.step < 0 else row.step

    def _row(self, ticket: int, lane: Lane) -> GroupRow:
        """The row of a ticket; a row outside the index where the ticket was removed from it."""
        rows = self.groups[lane]
        row = rows.get(ticket)
        if row is not None:
            return row
        row = GroupRow(ticket)
        if ticket > self._floor[lane, is_demonstration(ticket)]:
            rows[ticket] = row
            if len(rows) > self.max_groups:
                oldest, _ = rows.popitem(last=False)
                kind = lane, is_demonstration(oldest)
                self._floor[kind] = max(self._floor[kind], oldest)
                self.num_forgotten += 1
        return row


PAGE_ROWS = 100
MAX_NEEDLE_CHARACTERS = 200
EXTRA_STATES = {"failed": "with failed scores", "flat": "all rewards equal"}


def _mean(spread: Spread) -> tuple[float, float] | None:
    return (spread.mean, spread.mean) if spread.count else None


RANGES: dict[str, Callable[[GroupRow], tuple[float, float] | None]] = {
    "step": lambda row: (row.at_step, row.at_step),
    "reward": lambda row: _mean(row.rewards),
    "length": lambda row: _mean(row.lengths),
    "version": lambda row: (row.min_version, row.max_version),
}
"""Filters on numbers, with the least and the greatest that a row has of them: they must overlap."""
SORTS: dict[str, Callable[[GroupRow], float]] = {
    "ticket": lambda row: row.ticket,
    "step": lambda row: row.at_step,
    "reward": lambda row: row.rewards.mean,
    "std": lambda row: row.rewards.std,
    "length": lambda row: row.lengths.mean,
    "version": lambda row: row.min_version,
    "time": lambda row: row.finished_at or row.issued_at,
}


CHOICES = {"lane": ("eval",), "state": (*STATES, *EXTRA_STATES), "sort": tuple(SORTS), "order": ("up",)}
"""Allowed values of these parts of an address, besides the default."""


@dataclass(frozen=True, slots=True)
class GroupQuery:
    typed: Mapping[str, str]
    """What is understood of an address, by the names of its parts."""

    @classmethod
    def parse(cls, values: Mapping[str, str]) -> "GroupQuery":
        names = (*CHOICES, *RANGES, "worker", "text", "page")
        typed = {name: values.get(name, "").strip()[:MAX_NEEDLE_CHARACTERS] for name in names}
        return cls(
            {name: text for name, text in typed.items() if text and text in CHOICES.get(name, (text,))}
        )

    @property
    def lane(self) -> Lane:
        return Lane(self.typed.get("lane", Lane.TRAIN))

    @property
    def sort(self) -> str:
        return self.typed.get("sort", "ticket")

    @property
    def is_ascending(self) -> bool:
        return "order" in self.typed

    @property
    def page(self) -> int:
        return max(1, number_of(self.typed.get("page"), 1))

    @property
    def misunderstood(self) -> list[str]:
        return [name for name in RANGES if name in self.typed and range_of(self.typed[name]) is None]

    def address(self, **changes: object) -> str:
        """The query part of the address of this query with some things changed; what is None is left out."""
        changed: dict[str, object] = {**self.typed, **changes}
        return "?" + urlencode({name: value for name, value in changed.items() if value is not None})

    def select(self, index: GroupIndex) -> list[GroupRow]:
        ranges = {}
        for name in RANGES:
            wanted = range_of(self.typed.get(name, ""))
            if wanted:
                ranges[name] = wanted
        rows = [row for row in index.groups[self.lane].values() if self._fits(row, ranges)]
        key = SORTS[self.sort]
        rows.sort(key=lambda row: (key(row), row.ticket), reverse=not self.is_ascending)
        return rows

    def _fits(self, row: GroupRow, ranges: Mapping[str, Range]) -> bool:
        for name, (low, high) in ranges.items():
            has = RANGES[name](row)
            if has is None or (low is not None and has[1] < low) or (high is not None and has[0] > high):
                return False
        state = self.typed.get("state", row.state)
        worker = self.typed.get("worker", "")
        if state == "failed":
            is_in_state = row.num_failed > 0
        elif state == "flat":
            is_in_state = row.rewards.count > 1 and row.rewards.least == row.rewards.most
        else:
            is_in_state = state == row.state
        is_of_worker = not worker or any(worker in name for name in row.workers)
        return is_in_state and is_of_worker and self.typed.get("text", "").casefold() in row.text


def range_of(typed: str) -> Range | None:
    """`12`, `10..20`, `10..` or `..20`; None where it is neither."""
    try:
        return parse_range(typed)
    except ValueError:
        return None


def number_of(typed: str | None, default: int = 0) -> int:
    """A number of an address; the default where it is none."""
    return int(typed) if typed and typed.isascii() and typed.isdigit() and len(typed) < 16 else default

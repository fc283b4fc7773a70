"""Joins the streams to records of a ticket with its group and samples, or of a step.

Nothing is guessed: what no stream says is absent. Of several entries for one sample the first counts, as for
the trainer. Clocks of machines are taken as they are: where they differ, waiting times are off by as much.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from tidemill.common.history.groups import advantages_of, dropped_groups, left_out, micro_batches_of
from tidemill.common.history.history import History
from tidemill.common.streams.entries import Entry, entry_id_of
from tidemill.common.streams.selection import Range, Selection, StreamName
from tidemill.common.wire.images import Image
from tidemill.common.wire.keys import EVAL
from tidemill.common.wire.messages import (
    Commit,
    DeadLetter,
    Lane,
    Score,
    Ticket,
    Trajectory,
    TrajectoryKey,
    Try,
    WeightManifest,
    is_demonstration,
)
from tidemill.services.console.look.sessions import SessionFacts, num_completion_tokens, session_facts

MAX_LETTERS = 50
"""Dead letters that are read for one group."""
CLOCK_SPARE_S = 60.0
"""Difference of the clocks of trainer and Redis that is allowed for; beyond it, whole streams are read."""
STAGES = ("queued", "generated", "waited for reward", "scored", "waited for training")


@dataclass(frozen=True, slots=True)
class KnownPlaces:
    """Where a group's entries are, for callers that know it: nothing else is searched.

    Example: `trajectories` ("1727000000000-0", "1727000004000-3"), `scores` the same way, `step` 3.
    """

    trajectories: tuple[str, str] | None = None
    """First and last entry id; None for none."""
    scores: tuple[str, str] | None = None
    step: int = -1
    """The step whose commit names the group; -1 for none."""


EVERYWHERE = KnownPlaces(("-", "+"), ("-", "+"))


async def near_tickets(
    history: History, first: int, last: int, lane: Lane = Lane.TRAIN, commit: Commit | None = None
) -> Selection:
    """Selects tickets `first` to `last` in streams whose entry ids are times: from the issue of the first
    ticket to `commit`, which trained or dropped them."""
    since = "-"
    until = "+"
    issued = await history.ticket(first, lane)
    if issued:
        since = _id_at(issued.issued_at - CLOCK_SPARE_S)
    if commit and commit.finished_at:
        until = _id_at(commit.finished_at + CLOCK_SPARE_S)
    return Selection(since, until, tickets=(first, last))


def ranges_of(tickets: Iterable[int]) -> list[tuple[int, int]]:
    """The least and the greatest of these tickets, and apart from them those of the demonstrations, whose
    numbers are above all others: a range of both would have all later tickets of the run."""
    issued: list[int] = []
    demonstrations: list[int] = []
    for ticket in tickets:
        of_kind = demonstrations if is_demonstration(ticket) else issued
        of_kind.append(ticket)
    return [(min(numbers), max(numbers)) for numbers in (issued, demonstrations) if numbers]


def _id_at(time_s: float) -> str:
    """The id of an entry that Redis appends at this time, in seconds since 1970."""
    return f"{max(0, int(1000 * time_s))}-0"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a sample was trained: counted from 0, as in the commit."""

    mini_batch: int
    micro_batch: int
    position: int


def _is_reversed(values: Iterable[tuple[float | None, float | None]]) -> bool:
    """Whether advantages fall where rewards rise, which only shaped rewards and `gdpo` can do."""
    pairs = [pair for pair in values if None not in pair]
    return len(pairs) > 1 and bool(np.cov(np.array(pairs, dtype=np.float64).T)[0, 1] < 0)


@dataclass(slots=True)
class SampleRecord:
    """One sample of a group, with its messages.

    Example: `index` 3, its trajectory and score, `advantage` 0.7, `places` [Place(0, 1, 0)]: trained as the
    first of the second micro-batch.
    """

    index: int
    trajectory: Trajectory | None = None
    score: Score | None = None
    later_trajectories: list[Trajectory] = field(default_factory=list)
    later_scores: list[Score] = field(default_factory=list)
    advantage: float | None = None
    """From the commit: the mean over its trained tokens."""
    places: list[Place] = field(default_factory=list)
    left_out: str = ""
    """Why it was not trained, where its group was."""

    @property
    def reward(self) -> float | None:
        """The score's value; None where there is no score, or a failed one."""
        return self.score.value if self.score else None

    @property
    def spans(self) -> list[tuple[int, int, int]]:
        """(version, first token, last token) of each stretch of tokens."""
        if self.trajectory is None:
            return []
        firsts = [first for _, first in self.trajectory.spans] + [self.trajectory.num_tokens]
        pairs = zip(self.trajectory.spans, firsts[1:], strict=True)
        return [(version, first, end - 1) for (version, first), end in pairs]


@dataclass(slots=True)
class GroupRecord:
    """A ticket and its group.

    Example: `number` 12, its `ticket`, four `samples`, and the `commit` of step 3, which trained them.
    """

    number: int
    lane: Lane
    ticket: Ticket | None = None
    samples: list[SampleRecord] = field(default_factory=list)
    commit: Commit | None = None
    """Commit of the step that trained on the group or dropped it."""
    manifest: WeightManifest | None = None
    """Manifest of the version that this step made."""
    letters: list[tuple[str, DeadLetter]] = field(default_factory=list)
    """Dead letters with their ids."""
    replaced_by: int | None = None

    @property
    def is_trained(self) -> bool:
        """Whether a step has trained on the group."""
        return self.commit is not None and self.number in self.commit.groups

    @property
    def dropped_as(self) -> str:
        """Why the group was dropped; empty where it was not."""
        if self.commit is None:
            return ""
        reasons = dict(dropped_groups(self.commit))
        return reasons.get(self.number, "")

    @property
    def prompt_source(self) -> Ticket | Trajectory | None:
        """A message that has the prompt."""
        return self.ticket or next((s.trajectory for s in self.samples if s.trajectory), None)

    @property
    def prompt_images(self) -> tuple[Image, ...]:
        """The row's pictures, without others that a session shows."""
        source = self.prompt_source
        if isinstance(source, Trajectory):
            return source.prompt_images
        return source.images if source else ()

    @property
    def group_size(self) -> int:
        """Number of samples that were to be generated."""
        return self.prompt_source.group_size if self.prompt_source else len(self.samples)

    @property
    def is_whole(self) -> bool:
        """Whether every sample and every score was found."""
        num_whole = sum(s.trajectory is not None and s.score is not None for s in self.samples)
        return num_whole >= self.group_size

    @property
    def is_reversed(self) -> bool:
        """Whether its advantages fall where its rewards rise."""
        return _is_reversed((s.reward, s.advantage) for s in self.samples)


async def read_group(
    history: History, number: int, lane: Lane = Lane.TRAIN, known_places: KnownPlaces | None = None
) -> GroupRecord:
    """Gather what the streams have about a ticket."""
    group = GroupRecord(number, lane, await history.ticket(number, lane))
    group.letters = await _letters(history, number, lane)
    if lane is Lane.TRAIN and known_places is None:
        group.commit = await history.commit_of_ticket(number)
    elif lane is Lane.TRAIN and known_places and known_places.step >= 0:
        group.commit = await history.commit(known_places.step)
    if known_places is None:
        # After the commit was found: its time is where the reading may stop.
        near = await near_tickets(history, number, number, lane, group.commit)
        ids = (near.first_id, near.last_id)
        group.samples = await _read_samples_of(history, group, KnownPlaces(ids, ids))
        # Clocks may differ by more than the margin, and samples may still be missing: all of it is read.
        if not group.is_whole:
            group.samples = await _read_samples_of(history, group, EVERYWHERE)
    else:
        group.samples = await _read_samples_of(history, group, known_places)
    if group.is_trained and group.commit:
        group.manifest = await history.manifest(group.commit.version)
    elif known_places is None and group.ticket and (group.dropped_as or group.letters):
        group.replaced_by = await _replacement(history, group.ticket)
    return group


async def _read_samples_of(history: History, group: GroupRecord, places: KnownPlaces) -> list[SampleRecord]:
    number = group.number
    lane = group.lane
    trajectories = await read_trajectories(history, number, lane, places.trajectories)
    scores: list[Score] = []
    if places.scores:
        wanted = Selection(*places.scores, tickets=(number, number))
        scores = [m async for m in history.messages(StreamName.SCORES.of(lane), Score, wanted)]
    return samples_of(trajectories, scores, group.commit, number)


async def read_groups(
    history: History, steps: Range | None = None, lane: Lane = Lane.TRAIN
) -> list[GroupRecord]:
    """The groups whose tickets were issued for these steps, by number; every stream is read once, and all of
    it held in memory. Dead letters and replacements are left to `read_group`."""
    wanted = Selection(steps=steps)
    trajectories: dict[int, list[Trajectory]] = defaultdict(list)
    scores: dict[int, list[Score]] = defaultdict(list)
    commits: dict[int, Commit] = {}
    issued = {m.ticket: m async for m in history.messages(StreamName.PROMPTS.of(lane), Ticket, wanted)}
    async for trajectory in history.messages(StreamName.TRAJECTORIES.of(lane), Trajectory, wanted):
        trajectories[trajectory.ticket].append(trajectory)
    if lane is Lane.TRAIN:
        async for commit in history.messages(StreamName.COMMITS, Commit):
            dropped = [ticket for ticket, _ in dropped_groups(commit)]
            commits |= dict.fromkeys([*commit.groups, *dropped], commit)
    numbers = sorted({*issued, *trajectories})
    scored = [number for number in numbers if not is_demonstration(number)]
    if scored:
        # Selected by tickets: a score has no step.
        near = Selection(tickets=(scored[0], scored[-1]))
        async for score in history.messages(StreamName.SCORES.of(lane), Score, near):
            scores[score.ticket].append(score)
    groups = []
    for number in numbers:
        commit_of_group = commits.get(number)
        samples = samples_of(trajectories[number], scores[number], commit_of_group, number)
        groups.append(GroupRecord(number, lane, issued.get(number), samples, commit_of_group))
    return groups


async def read_trajectories(
    history: History, ticket: int, lane: Lane = Lane.TRAIN, window: tuple[str, str] | None = ("-", "+")
) -> list[Trajectory]:
    """All trajectories of a ticket between two entry ids, later ones of the same index included."""
    if window is None:
        return []
    wanted = Selection(*window, tickets=(ticket, ticket))
    return [m async for m in history.messages(StreamName.TRAJECTORIES.of(lane), Trajectory, wanted)]


async def _letters(history: History, number: int, lane: Lane) -> list[tuple[str, DeadLetter]]:
    letters: list[tuple[str, DeadLetter]] = []
    async for record in history.scan(StreamName.DEAD, Selection(tickets=(number, number))):
        if not isinstance(record, Entry) or not isinstance(letter := record.message, DeadLetter):
            continue
        is_of_evaluation = letter.origin.endswith(EVAL)
        if is_of_evaluation == (lane is Lane.EVAL) and len(letters) < MAX_LETTERS:
            letters.append((record.entry_id, letter))
    return letters


def samples_of(
    trajectories: Iterable[Trajectory], scores: Iterable[Score], commit: Commit | None, number: int
) -> list[SampleRecord]:
    """The samples of a group, by index, from its messages and the commit that names it."""
    samples: dict[int, SampleRecord] = {}
    for trajectory in trajectories:
        sample = samples.setdefault(trajectory.index, SampleRecord(trajectory.index))
        if sample.trajectory is None:
            sample.trajectory = trajectory
        else:
            sample.later_trajectories.append(trajectory)
    for score in scores:
        sample = samples.setdefault(score.index, SampleRecord(score.index))
        # After all trajectories: which score counts depends on the tokens that it is of.
        tokens = sample.trajectory.tokens_digest if sample.trajectory else ""
        if sample.score is None and score.is_of(tokens):
            sample.score = score
        else:
            sample.later_scores.append(score)
    if commit is not None:
        reasons = {index: reason for ticket, index, reason in left_out(commit) if ticket == number}
        for index, advantage in advantages_of(commit, number).items():
            if index in samples:
                samples[index].advantage = advantage
        for mini, micro, keys in micro_batches_of(commit):
            for position, (ticket, index) in enumerate(keys):
                if ticket == number and index in samples:
                    samples[index].places.append(Place(mini, micro, position))
        for sample in samples.values():
            sample.left_out = reasons.get(sample.index, "")
    return [samples[index] for index in sorted(samples)]


async def _replacement(history: History, ticket: Ticket) -> int | None:
    """The later ticket that was issued in its place."""
    following = ticket.ticket + 1
    later = Selection(entry_id_of(following), tickets=(following, None), steps=(ticket.step, None))
    async for message in history.messages(StreamName.PROMPTS, Ticket, later):
        if message.replaces == ticket.ticket:
            return message.ticket
    return None


@dataclass(slots=True)
class SampleFacts:
    """One sample of a step, without its tokens and texts: steps may have many thousands of them.

    Times are seconds since 1970, 0 where they are not known.
    """

    key: TrajectoryKey
    num_prompt_tokens: int
    num_tokens: int
    """Tokens of its completion; both numbers are sums over all segments of a session."""
    versions: tuple[int, int]
    """The oldest and the newest version that made a token."""
    worker: str
    started_at: float
    finished_at: float
    issued_at: float = 0.0
    scorer: str = ""
    scored_at: float = 0.0
    latency_s: float = 0.0
    attempts: int = 0
    tries: tuple[Try, ...] = ()
    reward: float | None = None
    error: str = ""
    session: SessionFacts | None = None
    """None for a single turn."""
    tokens_digest: str = ""

    def take(self, score: Score) -> None:
        """Fill in what the score says."""
        self.scorer = score.worker
        self.scored_at = score.scored_at
        self.latency_s = score.latency_s
        self.attempts = score.attempts
        self.tries = score.tries
        self.reward = score.value
        self.error = score.error

    @property
    def asked_at(self) -> float:
        """When scoring began, 0 where there is no score."""
        return self.scored_at - self.latency_s if self.scored_at else 0.0

    def stages_s(self, trained_at: float) -> dict[str, float]:
        """Seconds in each stage, as far as both its ends are known."""
        times = (self.issued_at, self.started_at, self.finished_at, self.asked_at, self.scored_at, trained_at)
        ends = zip(STAGES, times[:-1], times[1:], strict=True)
        return {name: max(0.0, last - first) for name, first, last in ends if first and last}


@dataclass(frozen=True, slots=True)
class MicroBatchFacts:
    mini_batch: int
    micro_batch: int
    keys: tuple[TrajectoryKey, ...]
    num_prompt_tokens: int
    num_tokens: int


@dataclass(slots=True)
class StepRecord:
    """A committed step, with what the streams still have of its samples.

    Example: the `commit` of step 3, `samples` {(12, 0): ..., (12, 1): ...}, and the `manifest` of version 4.
    """

    commit: Commit
    samples: dict[TrajectoryKey, SampleFacts] = field(default_factory=dict)
    """Samples of the groups that were trained, also those left out of training."""
    manifest: WeightManifest | None = None

    @property
    def rewards(self) -> list[float]:
        """Rewards of the trained samples that have one in the streams."""
        rewards = [
            self.samples[key].reward for key in dict.fromkeys(self.commit.trained_keys) if key in self.samples
        ]
        return [value for value in rewards if value is not None]

    @property
    def num_lost(self) -> int:
        """Trained samples whose trajectories the streams do not have any more."""
        return sum(key not in self.samples for key in set(self.commit.trained_keys))

    def group(self, ticket: int) -> list[SampleFacts]:
        """The samples of a group, by index."""
        return sorted((s for s in self.samples.values() if s.key[0] == ticket), key=lambda s: s.key)

    def micro_batches(self) -> Iterator[MicroBatchFacts]:
        """The micro-batches in the order in which they were trained."""
        for mini, micro, keys in micro_batches_of(self.commit):
            samples = [self.samples[key] for key in keys if key in self.samples]
            prompts = sum(s.num_prompt_tokens for s in samples)
            completions = sum(s.num_tokens for s in samples)
            yield MicroBatchFacts(mini, micro, tuple(keys), prompts, completions)

    def complete_at(self, ticket: int) -> float:
        """When the last score of a group was there; 0 where that is not known."""
        return max((sample.scored_at for sample in self.group(ticket)), default=0.0)

    @property
    def reversed_groups(self) -> list[int]:
        """Tickets whose advantages fall where their rewards rise."""
        advantages = {ticket: advantages_of(self.commit, ticket) for ticket in self.commit.groups}
        tickets = []
        for ticket, by_index in advantages.items():
            if _is_reversed((s.reward, by_index.get(s.key[1])) for s in self.group(ticket)):
                tickets.append(ticket)
        return tickets


async def read_step(history: History, step: int) -> StepRecord | None:
    """Gather what the streams have about a step; None where they have no commit of it."""
    commit = await history.commit(step)
    if commit is None:
        return None
    record = StepRecord(commit, manifest=await history.manifest(commit.version))
    wanted = set(commit.groups)
    if wanted:
        near = await near_tickets(history, min(wanted), max(wanted), commit=commit)
        # Near the tickets first, and the whole streams only where samples are missing there.
        for bounds in (near, Selection()):
            for tickets in ranges_of(wanted):
                samples = await read_samples(history, replace(bounds, tickets=tickets))
                record.samples |= {key: sample for key, sample in samples.items() if key[0] in wanted}
            if not record.num_lost:
                break
    return record


async def read_samples(
    history: History, near: Selection, lane: Lane = Lane.TRAIN
) -> dict[TrajectoryKey, SampleFacts]:
    """The selected trajectories with their tickets and scores, the first entry of each, by key."""
    samples: dict[TrajectoryKey, SampleFacts] = {}
    async for trajectory in history.messages(StreamName.TRAJECTORIES.of(lane), Trajectory, near):
        samples.setdefault(trajectory.key, _generated(trajectory))
    # Demonstrations have neither tickets nor scores.
    numbers = [ticket for ticket, _ in samples if not is_demonstration(ticket)]
    if not numbers:
        return samples
    # By number alone: bounds of `near` are times, and ids of tickets are none.
    of_tickets = Selection(tickets=(min(numbers), max(numbers)))
    tickets = history.messages(StreamName.PROMPTS.of(lane), Ticket, of_tickets)
    issued = {ticket.ticket: ticket.issued_at async for ticket in tickets}
    for (number, _), facts in samples.items():
        facts.issued_at = issued.get(number, 0.0)
    scored_keys: set[TrajectoryKey] = set()
    async for score in history.messages(StreamName.SCORES.of(lane), Score, of_tickets):
        sample = samples.get(score.key)
        if sample and score.key not in scored_keys and score.is_of(sample.tokens_digest):
            scored_keys.add(score.key)
            sample.take(score)
    return samples


def _generated(trajectory: Trajectory) -> SampleFacts:
    return SampleFacts(
        trajectory.key,
        sum(len(segment.prompt_ids) for segment in trajectory.segments),
        sum(num_completion_tokens(trajectory)),
        (trajectory.min_version, trajectory.max_version),
        trajectory.worker,
        trajectory.started_at,
        trajectory.finished_at,
        session=session_facts(trajectory),
        tokens_digest=trajectory.tokens_digest,
    )

"""Everything that became of one ticket, put together from all streams of a run.

Nothing is guessed: what no stream tells is absent. Of several entries for one sample the first counts, as for
the trainer; the later ones are kept apart.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from common.errors import ConfigError
from common.history import History, Selection, StreamName
from common.streams.entries import Entry, entry_id_of
from common.wire.messages import Commit, DeadLetter, Lane, Message, Score, Ticket, Trajectory, WeightManifest
from services.console.records.values import jsonable, plain_fields

WHOLE_GROUP = -1
"""The index under which a commit names a group that was dropped as a whole."""

M = TypeVar("M", bound=Message)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a sample was trained: counted from 0, as in the commit."""

    mini_batch: int
    micro_batch: int
    position: int


@dataclass(slots=True)
class SampleTrace:
    """One sample of a group."""

    index: int
    trajectory: Trajectory | None = None
    score: Score | None = None
    later_trajectories: list[Trajectory] = field(default_factory=list)
    later_scores: list[Score] = field(default_factory=list)
    advantage: float | None = None
    """What the commit has: the mean over its trained tokens."""
    places: list[Place] = field(default_factory=list)
    left_out: str = ""
    """Why it was not trained, where its group was."""

    @property
    def spans(self) -> list[tuple[int, int, int]]:
        """(version, first token, last token) of each stretch of tokens."""
        if self.trajectory is None:
            return []
        firsts = [first for _, first in self.trajectory.spans] + [self.trajectory.num_tokens]
        return [
            (version, first, end - 1)
            for (version, first), end in zip(self.trajectory.spans, firsts[1:], strict=True)
        ]


@dataclass(slots=True)
class TicketTrace:
    """One ticket."""

    number: int
    lane: Lane
    ticket: Ticket | None = None
    samples: list[SampleTrace] = field(default_factory=list)
    commit: Commit | None = None
    """Of the step that trained on it or dropped it."""
    manifest: WeightManifest | None = None
    """Of the version that came out."""
    letters: list[DeadLetter] = field(default_factory=list)
    replaced_by: int | None = None

    @property
    def is_trained(self) -> bool:
        """Whether a step has trained on the group."""
        return self.commit is not None and self.number in self.commit.groups

    @property
    def dropped_as(self) -> str:
        """Why the group was dropped; empty where it was not."""
        reasons = [
            reason
            for ticket, index, reason in (self.commit.dropped if self.commit else ())
            if (ticket, index) == (self.number, WHOLE_GROUP)
        ]
        return reasons[0] if reasons else ""

    @property
    def group_size(self) -> int:
        """How many samples it was for."""
        if self.ticket is not None:
            return self.ticket.group_size
        made = [sample.trajectory.group_size for sample in self.samples if sample.trajectory]
        return made[0] if made else len(self.samples)

    def as_tree(self, index: int | None = None) -> dict[str, Any]:
        """For programs: all of it, or with one of the samples only."""
        samples = [sample for sample in self.samples if index in (None, sample.index)]
        commit = self.commit
        return {
            "ticket": self.number,
            "lane": self.lane.value,
            "issued": _tree(self.ticket),
            "samples": [_sample_tree(sample) for sample in samples],
            "step": commit.step if commit else None,
            "is_trained": self.is_trained,
            "dropped_as": self.dropped_as,
            "replaced_by": self.replaced_by,
            "version": commit.version if commit and self.is_trained else None,
            "digest": commit.digest if commit and self.is_trained else None,
            "weights": _tree(self.manifest),
            "dead_letters": [_tree(letter) for letter in self.letters],
        }


async def trace_ticket(history: History, number: int, lane: Lane = Lane.TRAIN) -> TicketTrace:
    """Gather what the streams tell of a ticket.

    Raises:
        ConfigError: none of them knows it.
    """
    suffix = ":eval" if lane is Lane.EVAL else ""
    wanted = Selection(tickets=(number, number))

    async def of_ticket(name: str, kind: type[M]) -> list[M]:
        found = history.scan(StreamName(name), wanted)
        return [r.message async for r in found if isinstance(r, Entry) and isinstance(r.message, kind)]

    trace = TicketTrace(number, lane, await history.ticket(number, lane))
    made = await of_ticket("trajectories" + suffix, Trajectory)
    scored = await of_ticket("scores" + suffix, Score)
    letters = await of_ticket("dead", DeadLetter)
    trace.letters = [letter for letter in letters if letter.origin.endswith(":eval") == (lane is Lane.EVAL)]
    if lane is Lane.TRAIN:
        trace.commit = await history.commit_of_ticket(number)
    if trace.ticket is None and not (made or scored or letters or trace.commit):
        await _explain_absence(history, number, lane)
    trace.samples = _samples(made, scored, trace.commit, number)
    if trace.is_trained and trace.commit:
        trace.manifest = await _manifest(history, trace.commit.version)
    elif trace.ticket and (trace.dropped_as or trace.letters):
        trace.replaced_by = await _replacement(history, trace.ticket)
    return trace


def places_in(commit: Commit, key: tuple[int, int]) -> list[Place]:
    """Where a commit has a sample: more than one place where several updates used it."""
    return [
        Place(mini, micro, position)
        for mini, micros in enumerate(commit.mini_batches)
        for micro, keys in enumerate(micros)
        for position, found in enumerate(keys)
        if tuple(found) == key
    ]


def advantages_in(commit: Commit, ticket: int) -> dict[int, float]:
    """Advantage of each trained sample of a ticket. The commit lists them by index, less those left out."""
    trained = sorted({index for number, index in commit.trained_keys if number == ticket})
    values = commit.advantages.get(str(ticket), [])
    return dict(zip(trained, values, strict=True)) if len(values) == len(trained) else {}


def _samples(
    made: Iterable[Trajectory], scored: Iterable[Score], commit: Commit | None, number: int
) -> list[SampleTrace]:
    samples: dict[int, SampleTrace] = {}
    for trajectory in made:
        sample = samples.setdefault(trajectory.index, SampleTrace(trajectory.index))
        if sample.trajectory is None:
            sample.trajectory = trajectory
        else:
            sample.later_trajectories.append(trajectory)
    for score in scored:
        sample = samples.setdefault(score.index, SampleTrace(score.index))
        if sample.score is None:
            sample.score = score
        else:
            sample.later_scores.append(score)
    if commit is not None:
        advantages = advantages_in(commit, number)
        left_out = {index: reason for ticket, index, reason in commit.dropped if ticket == number}
        for sample in samples.values():
            sample.advantage = advantages.get(sample.index)
            sample.places = places_in(commit, (number, sample.index))
            sample.left_out = left_out.get(sample.index, "")
    return [samples[index] for index in sorted(samples)]


async def _manifest(history: History, version: int) -> WeightManifest | None:
    entry_id = entry_id_of(version)
    wanted = Selection(first_id=entry_id, last_id=entry_id)
    async for record in history.scan(StreamName.WEIGHTS, wanted):
        if isinstance(record, Entry) and isinstance(record.message, WeightManifest):
            return record.message
    return None


async def _replacement(history: History, ticket: Ticket) -> int | None:
    """The later ticket that was issued in its place."""
    later = Selection(
        first_id=entry_id_of(ticket.ticket + 1), tickets=(ticket.ticket + 1, None), steps=(ticket.step, None)
    )
    async for record in history.scan(StreamName.PROMPTS, later):
        message = record.message if isinstance(record, Entry) else None
        if isinstance(message, Ticket) and message.replaces == ticket.ticket:
            return message.ticket
    return None


async def _explain_absence(history: History, number: int, lane: Lane) -> None:
    name = StreamName.PROMPTS if lane is Lane.TRAIN else StreamName.PROMPTS_EVAL
    ends = []
    for newest in (False, True):
        async for record in history.scan(name, newest_first=newest):
            if isinstance(record, Entry) and isinstance(record.message, Ticket):
                ends.append(record.message.ticket)
                break
    known = f"{name} has tickets {ends[0]} to {ends[1]}" if len(ends) == 2 else f"{name} is empty"
    raise ConfigError(
        f"run {history.run_id} knows no ticket {number} of the lane {lane}: {known}. Where older ones were "
        "trimmed without an archive, they are gone."
    )


def _sample_tree(sample: SampleTrace) -> dict[str, Any]:
    return {
        "index": sample.index,
        "trajectory": _tree(sample.trajectory),
        "versions": [
            {"version": version, "first_token": first, "last_token": last}
            for version, first, last in sample.spans
        ],
        "score": _tree(sample.score),
        "advantage": sample.advantage,
        "trained_in": [
            {"mini_batch": place.mini_batch, "micro_batch": place.micro_batch, "position": place.position}
            for place in sample.places
        ],
        "left_out": sample.left_out,
        "later_trajectories": [_tree(item) for item in sample.later_trajectories],
        "later_scores": [_tree(item) for item in sample.later_scores],
    }


def _tree(message: Message | None) -> Any:
    return None if message is None else jsonable(plain_fields(message))

"""All that a run knows of one group: ticket, completions and scores, and what the trainer made of them."""

from dataclasses import dataclass, field

import numpy as np

from common.history import History, Selection, StreamName
from common.streams.entries import Entry, Garbled, entry_id_of, id_order
from common.wire.messages import Commit, DeadLetter, Lane, Message, Score, Ticket, Trajectory, WeightManifest
from services.console.records.ticket_trace import advantages_in
from services.console.web.group_index import WHOLE_GROUP, EntryId, GroupRow, Window

MAX_LETTERS = 50


@dataclass(frozen=True, slots=True)
class SampleView:
    """One completion of the group."""

    index: int
    trajectory: Trajectory | None = None
    score: Score | None = None
    advantage: float | None = None
    left_out: str = ""
    """Why the step did not train on it."""
    places: tuple[tuple[int, int], ...] = ()
    """Mini-batch and micro-batch of every update that trained on it."""


@dataclass(frozen=True, slots=True)
class GroupView:
    """A group, as far as streams and archive still hold it."""

    row: GroupRow
    lane: Lane
    ticket: Ticket | None
    samples: list[SampleView]
    commit: Commit | None = None
    """Of the step that trained on it or left it out."""
    manifest: WeightManifest | None = None
    """The version that came out of the step."""
    letters: list[tuple[str, DeadLetter]] = field(default_factory=list)

    @property
    def prompt_source(self) -> Ticket | Trajectory | None:
        """A message that has the prompt."""
        return self.ticket or next((s.trajectory for s in self.samples if s.trajectory), None)

    @property
    def is_reversed(self) -> bool:
        """Whether advantages fall where rewards rise, which no algorithm of ours does."""
        pairs = [
            (sample.score.value, sample.advantage)
            for sample in self.samples
            if sample.score and sample.score.value is not None and sample.advantage is not None
        ]
        return len(pairs) > 1 and bool(np.cov(np.array(pairs).T)[0, 1] < 0)

    @property
    def components(self) -> list[str]:
        """Names of the components that any score has."""
        names = {name: None for sample in self.samples if sample.score for name in sample.score.components}
        return list(names)[:24]


async def read_group(history: History, row: GroupRow, lane: Lane, has_letters: bool) -> GroupView:
    """Read a group's entries; `row` says where they are."""
    is_eval = lane is Lane.EVAL
    prompts = StreamName.PROMPTS_EVAL if is_eval else StreamName.PROMPTS
    ticket = await _numbered(history, prompts, row.ticket)
    trajectories = {t.index: t for t in await _trajectories(history, row, lane)}
    scores: dict[int, Score] = {}
    stream = StreamName.SCORES_EVAL if is_eval else StreamName.SCORES
    for entry in await _between(history, stream, row.scores):
        if isinstance(entry.message, Score) and entry.message.ticket == row.ticket:
            scores.setdefault(entry.message.index, entry.message)
    commit = None
    if not is_eval and row.settled_step >= 0:
        commit = await read_commit(history, row.settled_step)
    manifest = await _numbered(history, StreamName.WEIGHTS, commit.version) if commit else None
    return GroupView(
        row,
        lane,
        ticket if isinstance(ticket, Ticket) else None,
        _samples(row, trajectories, scores, commit),
        commit,
        manifest if isinstance(manifest, WeightManifest) else None,
        await _letters(history, row.ticket, lane) if has_letters else [],
    )


async def read_trajectory(history: History, row: GroupRow, lane: Lane, index: int) -> Trajectory | None:
    """One completion of a group."""
    found = (t for t in await _trajectories(history, row, lane) if t.index == index)
    return next(found, None)


async def read_commit(history: History, step: int) -> Commit | None:
    """The commit of a step."""
    message = await _numbered(history, StreamName.COMMITS, step)
    return message if isinstance(message, Commit) else None


async def _trajectories(history: History, row: GroupRow, lane: Lane) -> list[Trajectory]:
    """The first of each index."""
    stream = StreamName.TRAJECTORIES_EVAL if lane is Lane.EVAL else StreamName.TRAJECTORIES
    found: dict[int, Trajectory] = {}
    for entry in await _between(history, stream, row.trajectories):
        if isinstance(entry.message, Trajectory) and entry.message.ticket == row.ticket:
            found.setdefault(entry.message.index, entry.message)
    return list(found.values())


async def _between(history: History, stream: StreamName, window: Window) -> list[Entry[Message]]:
    """Entries of a part of a stream, without reading on behind it."""
    if window.first is None or window.last is None:
        return []
    return await _read(history, stream, window.first, window.last)


async def _numbered(history: History, stream: StreamName, number: int) -> Message | None:
    """The entry that has a number for an id."""
    place = id_order(entry_id_of(number))
    found = await _read(history, stream, place, place)
    return found[0].message if found else None


async def _read(history: History, stream: StreamName, first: EntryId, last: EntryId) -> list[Entry[Message]]:
    found: list[Entry[Message]] = []
    selection = Selection(first_id="{}-{}".format(*first), last_id="{}-{}".format(*last))
    async for record in history.scan(stream, selection):
        if isinstance(record, Entry):
            found.append(record)
    return found


def _samples(
    row: GroupRow, trajectories: dict[int, Trajectory], scores: dict[int, Score], commit: Commit | None
) -> list[SampleView]:
    indices = sorted(trajectories.keys() | scores.keys())
    advantages: dict[int, float] = {}
    left_out: dict[int, str] = {}
    places: dict[int, list[tuple[int, int]]] = {}
    if commit is not None:
        left_out = {i: why for t, i, why in commit.dropped if t == row.ticket and i != WHOLE_GROUP}
        advantages = advantages_in(commit, row.ticket)
        for mini, batches in enumerate(commit.mini_batches):
            for micro, keys in enumerate(batches):
                for ticket, index in keys:
                    if ticket == row.ticket:
                        places.setdefault(index, []).append((mini, micro))
    return [
        SampleView(
            index,
            trajectories.get(index),
            scores.get(index),
            advantages.get(index),
            left_out.get(index, ""),
            tuple(places.get(index, ())),
        )
        for index in indices
    ]


async def _letters(history: History, ticket: int, lane: Lane) -> list[tuple[str, DeadLetter]]:
    found: list[tuple[str, DeadLetter]] = []
    async for record in history.scan(StreamName.DEAD, Selection(tickets=(ticket, ticket))):
        if isinstance(record, Garbled) or not isinstance(record.message, DeadLetter):
            continue
        is_eval = record.message.origin.endswith(":eval")
        if is_eval == (lane is Lane.EVAL) and len(found) < MAX_LETTERS:
            found.append((record.entry_id, record.message))
    return found

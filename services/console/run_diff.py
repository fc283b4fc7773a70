"""The first step at which two runs differ, and in what, from what comes first to what follows from it.

Guarantees: both runs are read once, side by side, and no further than to that step; memory holds what was
outstanding together. Of everything that differs at a step, the first in the order of `Aspect` is the cause
that the streams know of: a reward of other tokens is no surprise, a reward of the same tokens is.

Numbers that differ by less than the tolerance, and groups that only came in another order, are rounding: they
are noted, and the search goes on. Weights that have drifted apart by rounding sample another token one day.
"""

import math
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

import numpy as np

from common.config import RunConfig
from common.config.changes import changed_fields
from common.history import (
    GroupCursor,
    History,
    MissingRecordsError,
    RecordedGroup,
    Selection,
    StreamName,
    TicketCursor,
)
from common.messages import Commit, Score, Ticket, Trajectory
from common.streams import Entry

CLOCKS = ("_s", "idle_share", "wait_share")
"""Endings of metrics that tell of time: they are never the same twice."""

GAPS = ("logprob_gap/", "rollout_kl")
"""Beginnings of metrics that are differences themselves: rounding is most of them where all is well."""


class Aspect(StrEnum):
    """What two runs can differ in, causes before effects."""

    PROMPTS = "prompts"
    VERSIONS = "versions"
    TOKENS = "tokens"
    LOGPROBS = "logprobs"
    REWARDS = "rewards"
    GROUPS = "groups"
    COMPOSITION = "composition"
    ADVANTAGES = "advantages"
    METRICS = "metrics"
    WEIGHTS = "weights"


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place of a step at which one aspect differs, and how many others of it there are."""

    aspect: Aspect
    step: int
    what: str
    a: Any
    b: Any
    ticket: int = -1
    index: int = -1
    is_rounding: bool = False
    num_places: int = 1


@dataclass(slots=True)
class RunDiff:
    """What the comparison of two runs came to."""

    config: list[dict[str, Any]]
    num_steps: int = 0
    """Steps that were compared."""
    longer: str = ""
    """Which run has more steps, `a` or `b`, where the comparison came to the end of the other."""
    differences: list[Difference] = field(default_factory=list)
    """At the first step that differs by more than rounding, in causal order."""
    earlier: list[Difference] = field(default_factory=list)
    """Of steps before that: the first of each aspect that differs by rounding."""
    unread_steps: list[int] = field(default_factory=list)
    """Steps of which not both runs have their records any more: only commits were compared."""

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs, not even by rounding."""
        return not self.differences and not self.earlier

    @property
    def cause(self) -> Difference | None:
        """The first real difference of the first step that has one."""
        return next((item for item in self.differences if not item.is_rounding), None)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        cause = self.cause
        return {"equal": self.is_equal, "cause": asdict(cause) if cause else None, **asdict(self)}


@dataclass(frozen=True, slots=True)
class DiffedRun:
    """One of the two runs."""

    history: History
    config: RunConfig


class RunReader:
    """A run's steps, one after another. `async with RunReader(run) as reader:`"""

    def __init__(self, run: DiffedRun) -> None:
        self.history, trainer = run.history, run.config.trainer
        most = (2 + trainer.max_staleness) * trainer.groups_per_step
        self.groups = GroupCursor(run.history, trainer.group_size, most)
        self.tickets = TicketCursor(run.history)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> "RunReader":
        await self._stack.enter_async_context(self.groups)
        self._stack.push_async_callback(self.tickets.aclose)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def commits(self) -> AsyncIterator[Commit]:
        """All of them, in order."""
        async for record in self.history.scan(StreamName.COMMITS, Selection()):
            if isinstance(record, Entry) and isinstance(record.message, Commit):
                yield record.message

    async def records(self, commit: Commit) -> dict[int, RecordedGroup] | None:
        """What the step was trained on; None where the streams do not have it any more."""
        self.groups.close(ticket for ticket, index, _ in commit.dropped if index < 0)
        try:
            return await self.groups.groups(commit.groups)
        except MissingRecordsError:
            return None
        finally:
            self.groups.close(commit.groups)

    async def prompts(self, commit: Commit) -> dict[int, Ticket]:
        """The tickets that the step was trained on, as far as they are there."""
        found = await self.tickets.tickets(commit.groups)
        self.tickets.close([*commit.groups, *(ticket for ticket, _, _ in commit.dropped)])
        return found


async def diff_runs(a: DiffedRun, b: DiffedRun, tolerance: float) -> RunDiff:
    """Compare two runs step by step, to the first one that differs by more than `tolerance`."""
    changes = [
        {"field": change.field, "a": change.before, "b": change.after}
        for change in changed_fields(a.config, b.config)
    ]
    result = RunDiff(changes)
    async with RunReader(a) as reader_a, RunReader(b) as reader_b:
        commits_a, commits_b = reader_a.commits(), reader_b.commits()
        while True:
            commit_a, commit_b = await anext(commits_a, None), await anext(commits_b, None)
            if commit_a is None or commit_b is None:
                result.longer = "a" if commit_a else "b" if commit_b else ""
                return result
            found = [item async for item in _step(reader_a, reader_b, commit_a, commit_b, tolerance, result)]
            result.num_steps += 1
            if any(not item.is_rounding for item in found):
                result.differences = found
                return result
            known = {item.aspect for item in result.earlier}
            result.earlier += [item for item in found if item.aspect not in known]


async def _step(
    reader_a: RunReader,
    reader_b: RunReader,
    a: Commit,
    b: Commit,
    tolerance: float,
    result: RunDiff,
) -> AsyncIterator[Difference]:
    """The first difference of every aspect in which the step differs."""
    prompts_a, prompts_b = await reader_a.prompts(a), await reader_b.prompts(b)
    records_a, records_b = await reader_a.records(a), await reader_b.records(b)
    found: dict[Aspect, Difference] = {}
    places: dict[Aspect, int] = {}

    def note(items: Iterable[Difference]) -> None:
        for item in items:
            places[item.aspect] = places.get(item.aspect, 0) + 1
            first = found.get(item.aspect)
            if first is None or (first.is_rounding and not item.is_rounding):
                found[item.aspect] = item

    note(_prompts(a.step, prompts_a, prompts_b))
    if records_a is None or records_b is None:
        result.unread_steps.append(a.step)
    else:
        for ticket in sorted(records_a.keys() & records_b.keys()):
            note(compare_groups(a.step, records_a[ticket], records_b[ticket], tolerance))
    note(compare_commits(a, b, tolerance))
    if Aspect.WEIGHTS in found:
        # Whatever moved the weights is told of above; where nothing is, it was the update itself.
        others = [item for aspect, item in found.items() if aspect is not Aspect.WEIGHTS]
        is_rounding = bool(others or result.earlier or result.unread_steps) and all(
            item.is_rounding for item in others
        )
        found[Aspect.WEIGHTS] = replace(found[Aspect.WEIGHTS], is_rounding=is_rounding)
    for aspect in Aspect:
        if aspect in found:
            yield replace(found[aspect], num_places=places[aspect])


def _prompts(step: int, a: dict[int, Ticket], b: dict[int, Ticket]) -> Iterator[Difference]:
    for ticket in sorted(a.keys() & b.keys()):
        for name in ("row", "prompt_ids", "prompt_text", "data_source", "ground_truth", "extra", "sampling"):
            one, other = _plain(getattr(a[ticket], name)), _plain(getattr(b[ticket], name))
            if one != other:
                yield Difference(Aspect.PROMPTS, step, name, one, other, ticket)
                break


def compare_groups(step: int, a: RecordedGroup, b: RecordedGroup, tolerance: float) -> Iterator[Difference]:
    """Every difference between the samples that both groups have."""
    for index in sorted(a.trajectories.keys() & b.trajectories.keys()):
        yield from _trajectories(step, a.trajectories[index], b.trajectories[index], tolerance)
    for index in sorted(a.scores.keys() & b.scores.keys()):
        yield from _scores(step, a.scores[index], b.scores[index], tolerance)


def _trajectories(step: int, a: Trajectory, b: Trajectory, tolerance: float) -> Iterator[Difference]:
    ticket, index = a.key
    if not np.array_equal(a.prompt_ids, b.prompt_ids):
        ids = a.prompt_ids.tolist(), b.prompt_ids.tolist()
        yield Difference(Aspect.PROMPTS, step, "prompt_ids", *ids, ticket, index)
    if a.spans != b.spans:
        spans = [list(span) for span in a.spans], [list(span) for span in b.spans]
        yield Difference(Aspect.VERSIONS, step, "version from token", *spans, ticket, index)
    length = min(a.num_tokens, b.num_tokens)
    unlike = np.flatnonzero(a.completion_ids[:length] != b.completion_ids[:length])
    if len(unlike) or a.num_tokens != b.num_tokens or a.finish != b.finish:
        place = int(unlike[0]) if len(unlike) else length
        texts = _described(a, place), _described(b, place)
        yield Difference(Aspect.TOKENS, step, f"from token {place} on", *texts, ticket, index)
        length = place
    apart = np.abs(a.logprobs[:length].astype(np.float64) - b.logprobs[:length].astype(np.float64))
    if apart.any():
        place = int(np.flatnonzero((apart > tolerance) if (apart > tolerance).any() else apart)[0])
        numbers = float(a.logprobs[place]), float(b.logprobs[place])
        is_rounding = bool(apart.max() <= tolerance)
        yield Difference(
            Aspect.LOGPROBS, step, f"of token {place}", *numbers, ticket, index, is_rounding=is_rounding
        )


def _described(sample: Trajectory, place: int) -> dict[str, Any]:
    """The tokens that follow, and the text as a whole."""
    return {
        "ids": sample.completion_ids[place : place + 8].tolist(),
        "num_tokens": sample.num_tokens,
        "finish": sample.finish,
        "text": sample.text[:200],
    }


def _scores(step: int, a: Score, b: Score, tolerance: float) -> Iterator[Difference]:
    ticket, index = a.key
    if a.status != b.status:
        statuses = str(a.status), str(b.status)
        yield Difference(Aspect.REWARDS, step, "status", *statuses, ticket, index)
    elif a.value != b.value:
        is_rounding = _is_close(a.value, b.value, tolerance)
        yield Difference(
            Aspect.REWARDS, step, "value", a.value, b.value, ticket, index, is_rounding=is_rounding
        )
    elif a.components != b.components:
        yield Difference(Aspect.REWARDS, step, "components", a.components, b.components, ticket, index)


def compare_commits(a: Commit, b: Commit, tolerance: float) -> Iterator[Difference]:
    """What was trained, in which order, with which advantages, and what came out."""
    step = a.step
    trained = sorted(a.groups), sorted(b.groups)
    if trained[0] != trained[1]:
        only = sorted(set(a.groups) - set(b.groups)), sorted(set(b.groups) - set(a.groups))
        ticket = min(only[0] + only[1], default=-1)
        yield Difference(Aspect.GROUPS, step, "trained here only", *only, ticket)
    for drop_a, drop_b in _unlike_drops(a, b):
        ticket, index = (drop_a or drop_b or [-1, -1])[:2]
        yield Difference(Aspect.GROUPS, step, "dropped", drop_a, drop_b, ticket, index)
    yield from _compositions(a, b, has_same_groups=trained[0] == trained[1])
    for name in sorted(a.advantages.keys() & b.advantages.keys(), key=int):
        yield from _advantages(step, int(name), a.advantages[name], b.advantages[name], tolerance)
    for name in sorted(a.metrics.keys() & b.metrics.keys()):
        one, other = a.metrics[name], b.metrics[name]
        if not name.endswith(CLOCKS) and one != other and not (math.isnan(one) and math.isnan(other)):
            yield Difference(
                Aspect.METRICS, step, name, one, other, is_rounding=_is_near(name, one, other, tolerance)
            )
    if a.digest != b.digest:
        yield Difference(Aspect.WEIGHTS, step, "digest", a.digest, b.digest, is_rounding=True)


def _unlike_drops(a: Commit, b: Commit) -> Iterator[tuple[list[Any] | None, list[Any] | None]]:
    ours, theirs = ({(t, i): [t, i, why] for t, i, why in commit.dropped} for commit in (a, b))
    for key in sorted(ours.keys() | theirs.keys()):
        if ours.get(key) != theirs.get(key):
            yield ours.get(key), theirs.get(key)


def _compositions(a: Commit, b: Commit, has_same_groups: bool) -> Iterator[Difference]:
    if a.mini_batches == b.mini_batches:
        return
    batches = [
        [[list(key) for key in micro] for mini in commit.mini_batches for micro in mini] for commit in (a, b)
    ]
    place = next((n for n, pair in enumerate(zip(*batches, strict=False)) if pair[0] != pair[1]), 0)
    one, other = (part[place] if place < len(part) else [] for part in batches)
    # The same samples in another order: the sums of gradients differ in their last bits alone.
    has_same_updates = [_members(mini) for mini in a.mini_batches] == [_members(m) for m in b.mini_batches]
    yield Difference(
        Aspect.COMPOSITION,
        a.step,
        f"micro-batch {place}",
        one,
        other,
        is_rounding=has_same_groups and has_same_updates,
    )


def _members(mini: Iterable[Iterable[tuple[int, int]]]) -> list[tuple[int, int]]:
    return sorted((ticket, index) for micro in mini for ticket, index in micro)


def _advantages(
    step: int, ticket: int, a: list[float], b: list[float], tolerance: float
) -> Iterator[Difference]:
    if len(a) != len(b):
        yield Difference(Aspect.ADVANTAGES, step, "number of samples", len(a), len(b), ticket)
        return
    for place, (one, other) in enumerate(zip(a, b, strict=True)):
        if one != other:
            is_rounding = _is_close(one, other, tolerance)
            yield Difference(
                Aspect.ADVANTAGES, step, f"sample {place}", one, other, ticket, is_rounding=is_rounding
            )


def _is_near(metric: str, one: float, other: float, tolerance: float) -> bool:
    is_gap = metric.startswith(GAPS)
    return abs(one - other) <= tolerance if is_gap else _is_close(one, other, tolerance)


def _is_close(one: float | None, other: float | None, tolerance: float) -> bool:
    if one is None or other is None:
        return False
    return math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance * 1e-3)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    return value.model_dump() if hasattr(value, "model_dump") else value

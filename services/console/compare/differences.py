"""In what two records of the same step differ: tickets, samples, scores, commits.

Every function yields each difference with both values. `Aspect` has causes before effects: another reward of
other tokens is no surprise, another reward of the same tokens is. Numbers that differ by less than the
tolerance, and groups that only came in another order, are marked as rounding.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np

from tidemill.common.history import RecordedGroup
from tidemill.common.wire.messages import Commit, Score, Ticket, Trajectory
from tidemill.common.wire.segments import Segment, Turn
from tidemill.services.console.text.formats import sample_name

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
    what: str
    a: Any
    b: Any
    ticket: int = -1
    index: int = -1
    step: int = -1
    is_rounding: bool = False
    num_places: int = 1

    @property
    def sample(self) -> str:
        """`TICKET.INDEX`, `TICKET`, or a dash."""
        return sample_name(self.ticket, self.index)


COMPARED_OF_PROMPTS = (
    "source",
    "row",
    "prompt_ids",
    "prompt_text",
    "data_source",
    "ground_truth",
    "extra",
    "group_size",
    "sampling",
)
"""What tickets of the same number ask for, in this order."""


def compare_prompts(a: dict[int, Ticket], b: dict[int, Ticket]) -> Iterator[Difference]:
    """Tickets of the same number that ask for something else."""
    for ticket in sorted(a.keys() & b.keys()):
        for name in COMPARED_OF_PROMPTS:
            one, other = _plain(getattr(a[ticket], name)), _plain(getattr(b[ticket], name))
            if one != other:
                yield Difference(Aspect.PROMPTS, name, one, other, ticket)
                break


def compare_groups(a: RecordedGroup, b: RecordedGroup, tolerance: float) -> Iterator[Difference]:
    """Every difference between the samples that both groups have."""
    for index in sorted(a.trajectories.keys() & b.trajectories.keys()):
        yield from _trajectories(a.trajectories[index], b.trajectories[index], tolerance)
    for index in sorted(a.scores.keys() & b.scores.keys()):
        yield from _scores(a.scores[index], b.scores[index], tolerance)


def _trajectories(a: Trajectory, b: Trajectory, tolerance: float) -> Iterator[Difference]:
    ticket, index = a.key
    if not np.array_equal(a.prompt_ids, b.prompt_ids):
        ids = a.prompt_ids.tolist(), b.prompt_ids.tolist()
        yield Difference(Aspect.PROMPTS, "prompt_ids", *ids, ticket, index)
    for number, (one, other) in enumerate(zip(a.segments, b.segments, strict=False)):
        if number and not np.array_equal(one.prompt_ids, other.prompt_ids):
            ids = one.prompt_ids.tolist(), other.prompt_ids.tolist()
            yield Difference(Aspect.TOKENS, f"fork {number}, its prompt", *ids, ticket, index)
        found = _segments((one, other), tolerance, (_described(a), _described(b)))
        for item in found:
            what = f"fork {number}, {item.what}" if number else item.what
            yield replace(item, ticket=ticket, index=index, what=what)
    if len(a.forks) != len(b.forks):
        yield Difference(Aspect.TOKENS, "number of forks", len(a.forks), len(b.forks), ticket, index)
    if _end(a) != _end(b):
        yield Difference(Aspect.TOKENS, "end", _end(a), _end(b), ticket, index)
    if _given(a) != _given(b):
        yield Difference(Aspect.REWARDS, "the environment's", _given(a), _given(b), ticket, index)


def _segments(
    pair: tuple[Segment, Segment], tolerance: float, facts: tuple[dict[str, Any], dict[str, Any]]
) -> Iterator[Difference]:
    """In what the completions of two rows of the same sample differ."""
    a, b = pair
    if a.spans != b.spans:
        spans = [list(span) for span in a.spans], [list(span) for span in b.spans]
        yield Difference(Aspect.VERSIONS, "version from token", *spans)
    length = min(len(a.completion_ids), len(b.completion_ids))
    unlike = np.flatnonzero(a.completion_ids[:length] != b.completion_ids[:length])
    if len(unlike) or len(a.completion_ids) != len(b.completion_ids):
        place = int(unlike[0]) if len(unlike) else length
        known_a, known_b = (
            {"ids": row.completion_ids[place : place + 8].tolist(), **fact}
            for row, fact in zip(pair, facts, strict=True)
        )
        yield Difference(Aspect.TOKENS, f"{_place(a, place)}from token {place} on", known_a, known_b)
        length = place
    apart = np.abs(a.logprobs[:length].astype(np.float64) - b.logprobs[:length].astype(np.float64))
    if apart.any():
        place = int(np.flatnonzero((apart > tolerance) if (apart > tolerance).any() else apart)[0])
        numbers = float(a.logprobs[place]), float(b.logprobs[place])
        what = f"{_place(a, place)}of token {place}"
        yield Difference(Aspect.LOGPROBS, what, *numbers, is_rounding=bool(apart.max() <= tolerance))


def _place(row: Segment, token: int) -> str:
    """The turn that a token belongs to, or whose answer; empty for a single turn."""
    number = max((n for n, turn in enumerate(row.turns) if turn.first <= token), default=-1)
    if number < 0:
        return "before turn 0, " if row.turns else ""
    is_models = token < row.turns[number].end
    return f"turn {number}, " if is_models else f"the environment's answer to turn {number}, "


def _end(made: Trajectory) -> str:
    return made.session.end if made.session else made.finish


def _given(made: Trajectory) -> dict[str, Any]:
    return {"session": made.session and made.session.reward, "turns": [t.reward for t in _turns(made)]}


def _turns(made: Trajectory) -> list[Turn]:
    return [turn for segment in made.segments for turn in segment.turns]


def _described(sample: Trajectory) -> dict[str, Any]:
    """The completion as a whole."""
    tokens = sum(len(segment.completion_ids) for segment in sample.segments)
    turns = {"num_turns": len(_turns(sample))} if sample.session else {}
    return {"num_tokens": tokens, **turns, "finish": sample.finish, "text": sample.text[:200]}


def _scores(a: Score, b: Score, tolerance: float) -> Iterator[Difference]:
    ticket, index = a.key
    if a.status != b.status:
        statuses = str(a.status), str(b.status)
        yield Difference(Aspect.REWARDS, "status", *statuses, ticket, index)
    elif a.value != b.value:
        is_rounding = _is_close(a.value, b.value, tolerance)
        yield Difference(Aspect.REWARDS, "value", a.value, b.value, ticket, index, is_rounding=is_rounding)
    elif a.components != b.components:
        yield Difference(Aspect.REWARDS, "components", a.components, b.components, ticket, index)


def compare_commits(a: Commit, b: Commit, tolerance: float) -> Iterator[Difference]:
    """What was trained, in which order, with which advantages, and what came out."""
    trained = sorted(a.groups), sorted(b.groups)
    if trained[0] != trained[1]:
        only = sorted(set(a.groups) - set(b.groups)), sorted(set(b.groups) - set(a.groups))
        ticket = min(only[0] + only[1], default=-1)
        yield Difference(Aspect.GROUPS, "trained here only", *only, ticket)
    for drop_a, drop_b in _unlike_drops(a, b):
        ticket, index = (drop_a or drop_b or [-1, -1])[:2]
        yield Difference(Aspect.GROUPS, "dropped", drop_a, drop_b, ticket, index)
    yield from _compositions(a, b, has_same_groups=trained[0] == trained[1])
    for name in sorted(a.advantages.keys() & b.advantages.keys(), key=int):
        yield from _advantages(int(name), a.advantages[name], b.advantages[name], tolerance)
    for name in sorted(a.metrics.keys() & b.metrics.keys()):
        one, other = a.metrics[name], b.metrics[name]
        if not name.endswith(CLOCKS) and one != other and not (math.isnan(one) and math.isnan(other)):
            yield Difference(
                Aspect.METRICS, name, one, other, is_rounding=_is_near(name, one, other, tolerance)
            )
    if a.digest != b.digest:
        yield Difference(Aspect.WEIGHTS, "digest", a.digest, b.digest, is_rounding=True)


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
        f"micro-batch {place}",
        one,
        other,
        is_rounding=has_same_groups and has_same_updates,
    )


def _members(mini: Iterable[Iterable[tuple[int, int]]]) -> list[tuple[int, int]]:
    return sorted((ticket, index) for micro in mini for ticket, index in micro)


def _advantages(ticket: int, a: list[float], b: list[float], tolerance: float) -> Iterator[Difference]:
    if len(a) != len(b):
        yield Difference(Aspect.ADVANTAGES, "number of samples", len(a), len(b), ticket)
        return
    for place, (one, other) in enumerate(zip(a, b, strict=True)):
        if one != other:
            is_rounding = _is_close(one, other, tolerance)
            yield Difference(
                Aspect.ADVANTAGES, f"sample {place}", one, other, ticket, is_rounding=is_rounding
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

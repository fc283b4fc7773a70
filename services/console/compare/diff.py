"""`tidemill diff RUN_A RUN_B`: the first step at which two runs differ, in what, and why.

Guarantees: both runs are read once, side by side, and no further than to that step; memory holds what was
outstanding together. What differs by rounding alone is noted, and the search goes on: weights that have
drifted apart by rounding sample another token one day.

`Aspect` has causes before effects: another reward of other tokens is no surprise, another reward of the same
tokens is. Numbers that differ by less than the tolerance, and groups that only came in another order, are
marked as rounding.
"""

import math
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np

from tidemill.common.config import RunConfig
from tidemill.common.config.changes import changed_fields
from tidemill.common.errors import ConfigError
from tidemill.common.history import (
    GroupCursor,
    History,
    MissingRecordsError,
    RecordedGroup,
    Selection,
    StreamName,
)
from tidemill.common.history.groups import dropped_groups
from tidemill.common.process.programs import run_main
from tidemill.common.wire.messages import Commit, Score, Ticket, Trajectory
from tidemill.common.wire.segments import Segment, Turn
from tidemill.services.console.options import DiffOptions
from tidemill.services.console.run.folder import find_run
from tidemill.services.console.run.history import RunAccess, open_history
from tidemill.services.console.text.formats import sample_name
from tidemill.services.console.text.tree import Node, note, part, show, table

CLOCKS = ("_s", "idle_share", "wait_share")
"""Endings of metrics that tell of time: they are never the same twice."""
GAPS = ("logprob_gap/", "rollout_kl")
"""Beginnings of metrics that are differences themselves: rounding is most of them where all is well."""
COMPARED_OF_PROMPTS = (
    "source", "row", "prompt_ids", "prompt_text", "data_source", "ground_truth", "extra", "group_size",
    "sampling",
)  # fmt: skip
"""What tickets of the same number ask for, in this order."""
MAX_WIDTH = 60
"""Characters of a value in the table; --json has all of it."""
MAX_CONFIG_LINES = 12


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


MEANINGS = {
    Aspect.PROMPTS: "the same ticket asks for something else: the data, its order or the sampling differs",
    Aspect.VERSIONS: "the same prompt was answered by other versions: timing, or max_staleness",
    Aspect.TOKENS: "the same version answered the same prompt with other tokens: sampling, or weights that "
    "have drifted apart by rounding",
    Aspect.LOGPROBS: "the same tokens have other logprobs: weights or numerics differ",
    Aspect.REWARDS: "the same completion was scored differently: the reward has changed, or is not "
    "reproducible",
    Aspect.GROUPS: "other groups were trained, or others left out",
    Aspect.COMPOSITION: "the same groups were trained in other optimizer updates",
    Aspect.ADVANTAGES: "the same rewards gave other advantages: the algorithm differs",
    Aspect.METRICS: "the same batch gave other numbers: the loss, the optimizer or the hardware differs",
    Aspect.WEIGHTS: "the same batch gave other weights",
}


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
        return sample_name(self.ticket, self.index)


def compare_prompts(a: dict[int, Ticket], b: dict[int, Ticket]) -> Iterator[Difference]:
    """Tickets of the same number that ask for something else."""
    for ticket in sorted(a.keys() & b.keys()):
        for name in COMPARED_OF_PROMPTS:
            one, other = _plain(getattr(a[ticket], name)), _plain(getattr(b[ticket], name))
            if one != other:
                yield Difference(Aspect.PROMPTS, name, one, other, ticket)
                break


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    return value.model_dump() if hasattr(value, "model_dump") else value


def compare_groups(a: RecordedGroup, b: RecordedGroup, tolerance: float) -> Iterator[Difference]:
    """Every difference between the samples that both groups have."""
    for index in sorted(a.trajectories.keys() & b.trajectories.keys()):
        for item in _trajectories(a.trajectories[index], b.trajectories[index], tolerance):
            yield replace(item, ticket=a.ticket, index=index)
    for index in sorted(a.scores.keys() & b.scores.keys()):
        for item in _scores(a.scores[index], b.scores[index], tolerance):
            yield replace(item, ticket=a.ticket, index=index)


def _trajectories(a: Trajectory, b: Trajectory, tolerance: float) -> Iterator[Difference]:
    for number, pair in enumerate(zip(a.segments, b.segments, strict=False)):
        one, other = (row.prompt_ids.tolist() for row in pair)
        if one != other and not number:
            yield Difference(Aspect.PROMPTS, "prompt_ids", one, other)
        elif one != other:
            yield Difference(Aspect.TOKENS, f"fork {number}, its prompt", one, other)
        for item in _segments(*pair, tolerance, (_described(a), _described(b))):
            yield replace(item, what=f"fork {number}, {item.what}" if number else item.what)
    if len(a.forks) != len(b.forks):
        yield Difference(Aspect.TOKENS, "number of forks", len(a.forks), len(b.forks))
    end_a, end_b = (made.session.end if made.session else made.finish for made in (a, b))
    if end_a != end_b:
        yield Difference(Aspect.TOKENS, "end", end_a, end_b)
    given_a, given_b = (
        {"session": made.session and made.session.reward, "turns": [turn.reward for turn in _turns(made)]}
        for made in (a, b)
    )
    if given_a != given_b:
        yield Difference(Aspect.REWARDS, "the environment's", given_a, given_b)


def _described(sample: Trajectory) -> dict[str, Any]:
    """The completion as a whole."""
    tokens = sum(len(segment.completion_ids) for segment in sample.segments)
    turns = {"num_turns": len(_turns(sample))} if sample.session else {}
    return {"num_tokens": tokens, **turns, "finish": sample.finish, "text": sample.text[:200]}


def _turns(made: Trajectory) -> list[Turn]:
    return [turn for segment in made.segments for turn in segment.turns]


def _segments(
    a: Segment, b: Segment, tolerance: float, facts: tuple[dict[str, Any], dict[str, Any]]
) -> Iterator[Difference]:
    """In what the completions of two rows of the same sample differ; `facts` are of the whole samples."""
    if a.spans != b.spans:
        yield Difference(
            Aspect.VERSIONS, "version from token", list(map(list, a.spans)), list(map(list, b.spans))
        )
    length = min(len(a.completion_ids), len(b.completion_ids))
    unlike = np.flatnonzero(a.completion_ids[:length] != b.completion_ids[:length])
    if len(unlike) or len(a.completion_ids) != len(b.completion_ids):
        length = int(unlike[0]) if len(unlike) else length
        known_a, known_b = (
            {"ids": row.completion_ids[length : length + 8].tolist(), **fact}
            for row, fact in zip((a, b), facts, strict=True)
        )
        yield Difference(Aspect.TOKENS, f"{_place(a, length)}from token {length} on", known_a, known_b)
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


def _scores(a: Score, b: Score, tolerance: float) -> Iterator[Difference]:
    if a.status != b.status:
        yield Difference(Aspect.REWARDS, "status", str(a.status), str(b.status))
    elif a.value != b.value:
        is_rounding = _is_close(a.value, b.value, tolerance)
        yield Difference(Aspect.REWARDS, "value", a.value, b.value, is_rounding=is_rounding)
    elif a.components != b.components:
        yield Difference(Aspect.REWARDS, "components", a.components, b.components)


def compare_commits(a: Commit, b: Commit, tolerance: float) -> Iterator[Difference]:
    only = sorted(set(a.groups) - set(b.groups)), sorted(set(b.groups) - set(a.groups))
    if any(only):
        yield Difference(Aspect.GROUPS, "trained here only", *only, min(only[0] + only[1]))
    drops = [{(t, i): [t, i, why] for t, i, why in commit.dropped} for commit in (a, b)]
    for key in sorted(drops[0].keys() | drops[1].keys()):
        one, other = drops[0].get(key), drops[1].get(key)
        if one != other:
            yield Difference(Aspect.GROUPS, "dropped", one, other, *key)
    if a.mini_batches != b.mini_batches:
        yield _composition(a, b, has_same_groups=not any(only))
    for name in sorted(a.advantages.keys() & b.advantages.keys(), key=int):
        yield from _advantages(int(name), a.advantages[name], b.advantages[name], tolerance)
    for name in sorted(a.metrics.keys() & b.metrics.keys()):
        was, became = a.metrics[name], b.metrics[name]
        if not name.endswith(CLOCKS) and was != became and not (math.isnan(was) and math.isnan(became)):
            is_near = abs(was - became) <= tolerance
            is_rounding = is_near if name.startswith(GAPS) else _is_close(was, became, tolerance)
            yield Difference(Aspect.METRICS, name, was, became, is_rounding=is_rounding)
    if a.digest != b.digest:
        yield Difference(Aspect.WEIGHTS, "digest", a.digest, b.digest, is_rounding=True)


def _composition(a: Commit, b: Commit, has_same_groups: bool) -> Difference:
    """The first micro-batch that differs."""
    batches = [
        [[list(key) for key in micro] for mini in commit.mini_batches for micro in mini] for commit in (a, b)
    ]
    place = next((n for n, pair in enumerate(zip(*batches, strict=False)) if pair[0] != pair[1]), 0)
    one, other = (part[place] if place < len(part) else [] for part in batches)
    # The same samples in another order: the sums of gradients differ in their last bits alone.
    updates = [
        [sorted(tuple(key) for micro in mini for key in micro) for mini in commit.mini_batches]
        for commit in (a, b)
    ]
    is_rounding = has_same_groups and updates[0] == updates[1]
    return Difference(Aspect.COMPOSITION, f"micro-batch {place}", one, other, is_rounding=is_rounding)


def _advantages(ticket: int, a: list[float], b: list[float], tolerance: float) -> Iterator[Difference]:
    if len(a) != len(b):
        yield Difference(Aspect.ADVANTAGES, "number of samples", len(a), len(b), ticket)
        return
    for place, (one, other) in enumerate(zip(a, b, strict=True)):
        if one != other:
            is_rounding, what = _is_close(one, other, tolerance), f"sample {place}"
            yield Difference(Aspect.ADVANTAGES, what, one, other, ticket, is_rounding=is_rounding)


def _is_close(one: float | None, other: float | None, tolerance: float) -> bool:
    if one is None or other is None:
        return False
    return math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance * 1e-3)


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
        cause = self.cause
        return {"equal": self.is_equal, "cause": asdict(cause) if cause else None, **asdict(self)}


class DiffedRun(NamedTuple):
    """One of the two runs."""

    history: History
    config: RunConfig


@dataclass(frozen=True, slots=True)
class StepReader:
    """A run's steps, one after another."""

    commits: AsyncIterator[Commit]
    groups: GroupCursor
    history: History

    @classmethod
    @asynccontextmanager
    async def open(cls, run: DiffedRun) -> AsyncIterator["StepReader"]:
        history, trainer = run.history, run.config.trainer
        most = (2 + trainer.max_staleness) * trainer.groups_per_step
        commits = history.messages(StreamName.COMMITS, Commit)
        cursor = GroupCursor(history, run.config.largest_group_size, most)
        async with cursor as groups:
            yield cls(commits, groups, history)

    async def records(self, commit: Commit) -> dict[int, RecordedGroup] | None:
        """What the step was trained on; None where the streams do not have it any more."""
        self.groups.close(ticket for ticket, _ in dropped_groups(commit))
        try:
            return await self.groups.groups(commit.groups)
        except MissingRecordsError:
            return None
        finally:
            self.groups.close(commit.groups)

    async def prompts(self, commit: Commit) -> dict[int, Ticket]:
        """The tickets that the step was trained on, as far as they are there."""
        near = Selection(tickets=(min(commit.groups, default=0), max(commit.groups, default=-1)))
        found = self.history.messages(StreamName.PROMPTS, Ticket, near)
        return {ticket.ticket: ticket async for ticket in found if ticket.ticket in commit.groups}


async def diff_runs(a: DiffedRun, b: DiffedRun, tolerance: float) -> RunDiff:
    """Compare two runs step by step, to the first one that differs by more than `tolerance`."""
    changes = [
        {"field": change.field, "a": change.before, "b": change.after}
        for change in changed_fields(a.config, b.config)
    ]
    result = RunDiff(changes)
    async with StepReader.open(a) as reader_a, StepReader.open(b) as reader_b:
        while True:
            commit_a, commit_b = await anext(reader_a.commits, None), await anext(reader_b.commits, None)
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
    reader_a: StepReader, reader_b: StepReader, a: Commit, b: Commit, tolerance: float, result: RunDiff
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

    note(compare_prompts(prompts_a, prompts_b))
    if records_a is None or records_b is None:
        result.unread_steps.append(a.step)
    else:
        for ticket in sorted(records_a.keys() & records_b.keys()):
            note(compare_groups(records_a[ticket], records_b[ticket], tolerance))
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
            yield replace(found[aspect], step=a.step, num_places=places[aspect])


def show_diff(options: DiffOptions) -> int:
    names, result = run_main(_diff(options))
    record = {"run_a": names[0], "run_b": names[1], **result.as_dict()}
    show(record, diff_tree(names, result), options.as_json)
    return 1 if result.differences else 0


async def _diff(options: DiffOptions) -> tuple[tuple[str, str], RunDiff]:
    a = find_run(options.run_a, options.runs_dir)
    b = find_run(options.run_b, options.runs_dir_b or options.runs_dir)
    if a.path.resolve() == b.path.resolve():
        raise ConfigError(f"{options.run_a} and {options.run_b} are the same run; give two.")
    async with open_history(a) as access_a, open_history(b) as access_b:
        result = await diff_runs(_opened(access_a), _opened(access_b), options.tolerance)
    return (a.run_id, b.run_id), result


def _opened(access: RunAccess) -> DiffedRun:
    if access.config is None:
        raise ConfigError(f"run {access.run_id} has no config.yaml in {access.folder.path}; it needs one.")
    return DiffedRun(access.history, access.config)


def diff_tree(names: tuple[str, str], result: RunDiff) -> Node:
    changes = [
        note(f"config  {change['field']}: {_short(change['a'])} | {_short(change['b'])}")
        for change in result.config[:MAX_CONFIG_LINES]
    ]
    if len(result.config) > MAX_CONFIG_LINES:
        more = len(result.config) - MAX_CONFIG_LINES
        changes.append(note(f"config  ... and {more} more fields; --json", "dim"))
    return part("", changes, _verdict(names, result), _remarks(names, result))


def _verdict(names: tuple[str, str], result: RunDiff) -> Iterator[Node]:
    if (cause := result.cause) is None:
        how = "bit for bit" if result.is_equal else "up to rounding"
        more = f"; run {result.longer} has more" if result.longer else ""
        yield note(f"the same {how} in all {result.num_steps} steps that both have{more}", "bold green")
        return
    where = f" {cause.sample}" if cause.ticket >= 0 else ""
    yield note(f"first difference: step {cause.step}, {cause.aspect}{where}", "bold red")
    yield note(f"  {MEANINGS[cause.aspect]}")
    yield table(_difference_row(names, item) for item in result.differences)


def _difference_row(names: tuple[str, str], item: Difference) -> dict[str, Any]:
    more = f" (+{item.num_places - 1})" if item.num_places > 1 else ""
    a, b = _short(item.a), _short(item.b)
    if item.aspect is Aspect.WEIGHTS:
        a, b = str(item.a)[:12], str(item.b)[:12]
    elif isinstance(item.a, float) and isinstance(item.b, float) and f"{item.a:.7g}" != f"{item.b:.7g}":
        a, b = f"{item.a:.7g}", f"{item.b:.7g}"
    return {
        "differs": f"{item.aspect}{more}{', rounding' if item.is_rounding else ''}",
        "first at": item.sample if item.ticket >= 0 else "",
        "what": item.what,
        f"a: {names[0]}": a,
        f"b: {names[1]}": b,
    }


def _short(value: Any) -> str:
    if isinstance(value, dict) and "ids" in value:
        value = f"{value['ids']} {value['text']!r}"
    text = repr(value) if isinstance(value, float) else str(value)
    return text if len(text) <= MAX_WIDTH else text[: MAX_WIDTH - 3] + "..."


def _remarks(names: tuple[str, str], result: RunDiff) -> Iterator[Node]:
    if result.earlier:
        words = ", ".join(f"{item.aspect} since step {item.step}" for item in result.earlier)
        yield note(f"by rounding or in order alone: {words}", "dim")
    if result.unread_steps:
        first, last = result.unread_steps[0], result.unread_steps[-1]
        words = "not both runs have their records any more; their commits were compared"
        yield note(f"steps {first} to {last}: {words}", "yellow")
    if (cause := result.cause) is not None:
        yield note("look closer:", "dim")
        commands = [f"step {cause.step}", f"replay {cause.step}"]
        commands += [f"trace {cause.sample}"] if cause.ticket >= 0 else []
        yield from (note(f"  tidemill {command} {names[1]}") for command in commands)

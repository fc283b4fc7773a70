"""`tidemill diff RUN_A RUN_B`: the first step at which two runs differ, in what, and why.

Guarantees: both runs are read once, side by side, and no further than to that step; memory holds what was
outstanding together. What differs by rounding alone is noted, and the search goes on: weights that have
drifted apart by rounding sample another token one day.

`Aspect` has causes before effects: another reward of other tokens is no surprise, another reward of the same
tokens is. Numbers that differ by less than the tolerance, and groups that only came in another order, are
marked as rounding.
"""

import itertools
import math
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
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
from tidemill.common.history.groups import dropped_groups, micro_batches_of
from tidemill.common.process.programs import run_main
from tidemill.common.wire.messages import Commit, Score, Ticket, Trajectory, is_demonstration
from tidemill.common.wire.segments import Segment, Turn
from tidemill.services.console.commands import DiffOptions
from tidemill.services.console.run.folder import RunFolder, find_run
from tidemill.services.console.run.history import RunAccess, open_history
from tidemill.services.console.text.formats import sample_name
from tidemill.services.console.text.tree import Node, jsonable, note, part, show, table

CLOCKS = ("_s", "idle_share", "wait_share")
"""Suffixes of metrics that measure time; these are not compared."""
USE = "perf/"
"""Prefix of metrics of the machine; these are not compared."""
GAPS = ("logprob_gap/", "rollout_kl")
"""Prefixes of metrics that are differences, mostly of rounding: the tolerance for these is absolute."""
COMPARED_OF_PROMPTS = (
    "source", "row", "prompt_ids", "images", "prompt_text", "data_source", "ground_truth", "extra",
    "group_size", "sampling",
)  # fmt: skip
"""Fields in which tickets of the same number are compared, in this order."""
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
    """The first place of a step at which one aspect differs, and the number of all such places."""

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
            in_a = jsonable(getattr(a[ticket], name))
            in_b = jsonable(getattr(b[ticket], name))
            if in_a != in_b:
                yield Difference(Aspect.PROMPTS, name, in_a, in_b, ticket)
                break


def compare_groups(a: RecordedGroup, b: RecordedGroup, tolerance: float) -> Iterator[Difference]:
    for index in sorted(a.trajectories.keys() & b.trajectories.keys()):
        for item in _trajectories(a.trajectories[index], b.trajectories[index], tolerance):
            yield replace(item, ticket=a.ticket, index=index)
    for index in sorted(a.scores.keys() & b.scores.keys()):
        for item in _scores(a.scores[index], b.scores[index], tolerance):
            yield replace(item, ticket=a.ticket, index=index)


def _trajectories(a: Trajectory, b: Trajectory, tolerance: float) -> Iterator[Difference]:
    turns_a = [turn for row in a.segments for turn in row.turns]
    turns_b = [turn for row in b.segments for turn in row.turns]
    described = (_described(a, len(turns_a)), _described(b, len(turns_b)))
    for number, (row_a, row_b) in enumerate(zip(a.segments, b.segments, strict=False)):
        where = f"fork {number}, " if number else ""
        prompt_a = row_a.prompt_ids.tolist()
        prompt_b = row_b.prompt_ids.tolist()
        if prompt_a != prompt_b and number:
            yield Difference(Aspect.TOKENS, where + "its prompt", prompt_a, prompt_b)
        elif prompt_a != prompt_b:
            yield Difference(Aspect.PROMPTS, where + "prompt_ids", prompt_a, prompt_b)
        for item in _segments(row_a, row_b, tolerance, described):
            yield replace(item, what=where + item.what)
    if len(a.forks) != len(b.forks):
        yield Difference(Aspect.TOKENS, "number of forks", len(a.forks), len(b.forks))
    end_a = _end_of(a)
    end_b = _end_of(b)
    if end_a != end_b:
        yield Difference(Aspect.TOKENS, "end", end_a, end_b)
    rewards_a = _environment_rewards(a, turns_a)
    rewards_b = _environment_rewards(b, turns_b)
    if rewards_a != rewards_b:
        yield Difference(Aspect.REWARDS, "the environment's", rewards_a, rewards_b)


def _end_of(sample: Trajectory) -> str:
    return sample.session.end if sample.session else sample.finish


def _environment_rewards(sample: Trajectory, turns: Sequence[Turn]) -> dict[str, Any]:
    of_session = sample.session and sample.session.reward
    return {"session": of_session, "turns": [turn.reward for turn in turns]}


def _described(sample: Trajectory, num_turns: int) -> dict[str, Any]:
    """The completion as a whole."""
    tokens = sum(len(segment.completion_ids) for segment in sample.segments)
    turns = {"num_turns": num_turns} if sample.session else {}
    return {"num_tokens": tokens, **turns, "finish": sample.finish, "text": sample.text[:200]}


def _segments(
    a: Segment, b: Segment, tolerance: float, described: tuple[dict[str, Any], dict[str, Any]]
) -> Iterator[Difference]:
    """Differences between two rows of the same sample; `described` sums up the whole samples."""
    if a.spans != b.spans:
        spans_a = list(map(list, a.spans))
        spans_b = list(map(list, b.spans))
        yield Difference(Aspect.VERSIONS, "version from token", spans_a, spans_b)
    length = min(len(a.completion_ids), len(b.completion_ids))
    unlike = np.flatnonzero(a.completion_ids[:length] != b.completion_ids[:length])
    if len(unlike) or len(a.completion_ids) != len(b.completion_ids):
        length = int(unlike[0]) if len(unlike) else length
        ids_a = a.completion_ids[length : length + 8].tolist()
        ids_b = b.completion_ids[length : length + 8].tolist()
        facts_a = {"ids": ids_a, **described[0]}
        facts_b = {"ids": ids_b, **described[1]}
        yield Difference(Aspect.TOKENS, f"{_place(a, length)}from token {length} on", facts_a, facts_b)
    apart = np.abs(a.logprobs[:length].astype(np.float64) - b.logprobs[:length].astype(np.float64))
    if apart.any():
        is_rounding = bool(apart.max() <= tolerance)
        token = int(np.flatnonzero(apart if is_rounding else apart > tolerance)[0])
        logprob_a = float(a.logprobs[token])
        logprob_b = float(b.logprobs[token])
        where = f"{_place(a, token)}of token {token}"
        yield Difference(Aspect.LOGPROBS, where, logprob_a, logprob_b, is_rounding=is_rounding)


def _place(row: Segment, token: int) -> str:
    """Names the turn that a token belongs to, or whose answer it is in; empty for a row without turns."""
    number = max((n for n, turn in enumerate(row.turns) if turn.first <= token), default=-1)
    if number < 0:
        return "before turn 0, " if row.turns else ""
    is_models = token < row.turns[number].end
    return f"turn {number}, " if is_models else f"the environment's answer to turn {number}, "


def _scores(a: Score, b: Score, tolerance: float) -> Iterator[Difference]:
    for name in ("status", "value", "components"):
        in_a = getattr(a, name)
        in_b = getattr(b, name)
        if in_a != in_b:
            is_rounding = name == "value" and _is_close(in_a, in_b, tolerance)
            if name == "status":
                in_a = str(in_a)
                in_b = str(in_b)
            yield Difference(Aspect.REWARDS, name, in_a, in_b, is_rounding=is_rounding)
            break


def compare_commits(a: Commit, b: Commit, tolerance: float) -> Iterator[Difference]:
    only_a = sorted(set(a.groups) - set(b.groups))
    only_b = sorted(set(b.groups) - set(a.groups))
    if only_a or only_b:
        yield Difference(Aspect.GROUPS, "trained here only", only_a, only_b, min(only_a + only_b))
    drops_a = _drops_by_key(a)
    drops_b = _drops_by_key(b)
    for key in sorted(drops_a.keys() | drops_b.keys()):
        drop_a = drops_a.get(key)
        drop_b = drops_b.get(key)
        if drop_a != drop_b:
            yield Difference(Aspect.GROUPS, "dropped", drop_a, drop_b, *key)
    if a.mini_batches != b.mini_batches:
        yield _composition(a, b, has_same_groups=not only_a and not only_b)
    for name in sorted(a.advantages.keys() & b.advantages.keys(), key=int):
        were = a.advantages[name]
        became = b.advantages[name]
        if len(were) != len(became):
            yield Difference(Aspect.ADVANTAGES, "number of samples", len(were), len(became), int(name))
            continue
        for number, (was, is_now) in enumerate(zip(were, became, strict=True)):
            if was != is_now:
                is_near = _is_close(was, is_now, tolerance)
                sample = f"sample {number}"
                yield Difference(Aspect.ADVANTAGES, sample, was, is_now, int(name), is_rounding=is_near)
    for name in sorted(a.metrics.keys() & b.metrics.keys()):
        was = a.metrics[name]
        is_now = b.metrics[name]
        if name.endswith(CLOCKS) or name.startswith(USE):
            continue
        if was != is_now and not (math.isnan(was) and math.isnan(is_now)):
            is_gap = name.startswith(GAPS)
            is_near = abs(was - is_now) <= tolerance
            is_rounding = is_near if is_gap else _is_close(was, is_now, tolerance)
            yield Difference(Aspect.METRICS, name, was, is_now, is_rounding=is_rounding)
    if a.digest != b.digest:
        yield Difference(Aspect.WEIGHTS, "digest", a.digest, b.digest, is_rounding=True)


def _drops_by_key(commit: Commit) -> dict[tuple[int, int], list[Any]]:
    return {(ticket, index): [ticket, index, why] for ticket, index, why in commit.dropped}


def _composition(a: Commit, b: Commit, has_same_groups: bool) -> Difference:
    """The first micro-batch that differs."""
    batches_a = [keys for *_, keys in micro_batches_of(a)]
    batches_b = [keys for *_, keys in micro_batches_of(b)]
    pairs = enumerate(zip(batches_a, batches_b, strict=False))
    number = next((number for number, (keys_a, keys_b) in pairs if keys_a != keys_b), 0)
    keys_a = [list(key) for keys in batches_a[number : number + 1] for key in keys]
    keys_b = [list(key) for keys in batches_b[number : number + 1] for key in keys]
    # The same samples in another order: the sums of gradients differ in their last bits alone.
    is_rounding = has_same_groups and _samples_of_updates(a) == _samples_of_updates(b)
    return Difference(Aspect.COMPOSITION, f"micro-batch {number}", keys_a, keys_b, is_rounding=is_rounding)


def _samples_of_updates(commit: Commit) -> list[list[Any]]:
    return [sorted(itertools.chain(*mini_batch)) for mini_batch in commit.mini_batches]


def _is_close(a: float | None, b: float | None, tolerance: float) -> bool:
    if a is None or b is None:
        return False
    return math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance * 1e-3)


@dataclass(slots=True)
class RunDiff:
    config: list[dict[str, Any]]
    num_steps: int = 0
    longer: str = ""
    """Which run has more steps, `a` or `b`, where the comparison came to the end of the other."""
    differences: list[Difference] = field(default_factory=list)
    """At the first step that differs by more than rounding, in causal order."""
    earlier: list[Difference] = field(default_factory=list)
    """The first rounding difference of each aspect in the steps before that."""
    unread_steps: list[int] = field(default_factory=list)
    """Steps whose records one of the runs no longer has: only commits were compared."""

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
    history: History
    config: RunConfig

    async def steps(self) -> AsyncGenerator["DiffedStep", None]:
        history = self.history
        trainer = self.config.trainer
        most = (2 + trainer.max_staleness) * trainer.groups_per_step
        async with GroupCursor(history, self.config.largest_group_size, most) as cursor:
            async for commit in history.messages(StreamName.COMMITS, Commit):
                # Without demonstrations, which have no tickets, and numbers above those of all later ones.
                issued = [ticket for ticket in commit.groups if not is_demonstration(ticket)]
                near = Selection(tickets=(min(issued, default=0), max(issued, default=-1)))
                tickets = history.messages(StreamName.PROMPTS, Ticket, near)
                prompts = {
                    ticket.ticket: ticket async for ticket in tickets if ticket.ticket in commit.groups
                }
                cursor.close(ticket for ticket, _ in dropped_groups(commit))
                try:
                    records = await cursor.groups(commit.groups)
                except MissingRecordsError:
                    records = None
                cursor.close(commit.groups)
                yield DiffedStep(commit, prompts, records)


class DiffedStep(NamedTuple):
    """What a step was trained on, as far as it is there; `records` are None where the streams lack some."""

    commit: Commit
    prompts: dict[int, Ticket]
    records: dict[int, RecordedGroup] | None


async def diff_runs(a: DiffedRun, b: DiffedRun, tolerance: float) -> RunDiff:
    """Compare two runs step by step, to the first one that differs by more than `tolerance`."""
    changes = [
        {"field": change.field, "a": change.before, "b": change.after}
        for change in changed_fields(a.config, b.config)
    ]
    result = RunDiff(changes)
    async with aclosing(a.steps()) as steps_a, aclosing(b.steps()) as steps_b:
        while True:
            step_a = await anext(steps_a, None)
            step_b = await anext(steps_b, None)
            if step_a is None or step_b is None:
                if step_a is not None:
                    result.longer = "a"
                elif step_b is not None:
                    result.longer = "b"
                return result
            differences = _compare_steps(step_a, step_b, tolerance, result)
            result.num_steps += 1
            if any(not item.is_rounding for item in differences):
                result.differences = differences
                return result
            aspects = {item.aspect for item in result.earlier}
            result.earlier += [item for item in differences if item.aspect not in aspects]


def _compare_steps(a: DiffedStep, b: DiffedStep, tolerance: float, result: RunDiff) -> list[Difference]:
    """The first difference of every aspect in which the step differs."""
    items = list(compare_prompts(a.prompts, b.prompts))
    if a.records is None or b.records is None:
        result.unread_steps.append(a.commit.step)
    else:
        for ticket in sorted(a.records.keys() & b.records.keys()):
            items += compare_groups(a.records[ticket], b.records[ticket], tolerance)
    items += compare_commits(a.commit, b.commit, tolerance)
    by_aspect: dict[Aspect, Difference] = {}
    for item in items:
        first = by_aspect.get(item.aspect)
        if first is None or (first.is_rounding and not item.is_rounding):
            by_aspect[item.aspect] = item
    if Aspect.WEIGHTS in by_aspect:
        # Other differences explain that of the weights; without any, the update itself differed.
        others = [item for aspect, item in by_aspect.items() if aspect is not Aspect.WEIGHTS]
        is_explained = bool(others or result.earlier or result.unread_steps)
        is_rounding = is_explained and all(item.is_rounding for item in others)
        by_aspect[Aspect.WEIGHTS] = replace(by_aspect[Aspect.WEIGHTS], is_rounding=is_rounding)
    counts = Counter(item.aspect for item in items)
    return [
        replace(by_aspect[aspect], step=a.commit.step, num_places=counts[aspect])
        for aspect in Aspect
        if aspect in by_aspect
    ]


def show_diff(options: DiffOptions) -> int:
    runs, result = run_main(_diff(options))
    record = {"run_a": runs[0].run_id, "run_b": runs[1].run_id, **result.as_dict()}
    show(record, diff_tree(runs, result), options.as_json, json_indent=2)
    return 1 if result.differences else 0


async def _diff(options: DiffOptions) -> tuple[tuple[RunFolder, RunFolder], RunDiff]:
    a = find_run(options.run_a, options.runs_dir)
    b = find_run(options.run_b, options.runs_dir_b or options.runs_dir)
    if a.path.resolve() == b.path.resolve():
        raise ConfigError(f"{options.run_a} and {options.run_b} are the same run; give two.")
    async with open_history(a) as access_a, open_history(b) as access_b:
        result = await diff_runs(_opened(access_a), _opened(access_b), options.tolerance)
    return (a, b), result


def _opened(access: RunAccess) -> DiffedRun:
    if access.config is None:
        raise ConfigError(f"run {access.run_id} has no config.yaml in {access.folder.path}; it needs one.")
    return DiffedRun(access.history, access.config)


def diff_tree(runs: tuple[RunFolder, RunFolder], result: RunDiff) -> Node:
    changes = [
        note(f"config  {change['field']}: {_short(change['a'])} | {_short(change['b'])}")
        for change in result.config[:MAX_CONFIG_LINES]
    ]
    if len(result.config) > MAX_CONFIG_LINES:
        more = len(result.config) - MAX_CONFIG_LINES
        changes.append(note(f"config  ... and {more} more fields; --json", "dim"))
    names = (runs[0].run_id, runs[1].run_id)
    return part("", changes, _verdict(names, result), _remarks(runs[1], result))


def _verdict(names: tuple[str, str], result: RunDiff) -> Iterator[Node]:
    cause = result.cause
    if cause is None:
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
    a = _short(item.a)
    b = _short(item.b)
    if item.aspect is Aspect.WEIGHTS:
        a = str(item.a)[:12]
        b = str(item.b)[:12]
    elif isinstance(item.a, float) and isinstance(item.b, float) and f"{item.a:.7g}" != f"{item.b:.7g}":
        a = f"{item.a:.7g}"
        b = f"{item.b:.7g}"
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


def _remarks(run_b: RunFolder, result: RunDiff) -> Iterator[Node]:
    if result.earlier:
        words = ", ".join(f"{item.aspect} since step {item.step}" for item in result.earlier)
        yield note(f"by rounding or in order alone: {words}", "dim")
    if result.unread_steps:
        first = result.unread_steps[0]
        last = result.unread_steps[-1]
        words = "not both runs have their records any more; their commits were compared"
        yield note(f"steps {first} to {last}: {words}", "yellow")
    cause = result.cause
    if cause is not None:
        yield note("look closer:", "dim")
        yield note(f"  {run_b.command('step', str(cause.step))}")
        yield note(f"  {run_b.command('replay', str(cause.step))}")
        if cause.ticket >= 0:
            yield note(f"  {run_b.command('trace', cause.sample)}")

"""The first step at which two runs differ, and in what, from what comes first to what follows from it.

Guarantees: both runs are read once, side by side, and no further than to that step; memory holds what was
outstanding together. What differs by rounding alone is noted, and the search goes on: weights that have
drifted apart by rounding sample another token one day.
"""

from collections.abc import AsyncIterator, Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tidemill.common.config import RunConfig
from tidemill.common.config.recorded import changed_fields
from tidemill.common.history import (
    GroupCursor,
    History,
    MissingRecordsError,
    RecordedGroup,
    Selection,
    StreamName,
)
from tidemill.common.history.groups import dropped_groups
from tidemill.common.wire.messages import Commit, Ticket
from tidemill.services.console.compare.differences import (
    Aspect,
    Difference,
    compare_commits,
    compare_groups,
    compare_prompts,
)


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


@dataclass(frozen=True, slots=True)
class DiffedRun:
    """One of the two runs."""

    history: History
    config: RunConfig


class StepReader:
    """A run's steps, one after another. `async with RunReader(run) as reader:`"""

    def __init__(self, run: DiffedRun) -> None:
        self.history, trainer = run.history, run.config.trainer
        most = (2 + trainer.max_staleness) * trainer.groups_per_step
        self.groups = GroupCursor(run.history, run.config.largest_group_size, most)

    async def __aenter__(self) -> "StepReader":
        await self.groups.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.groups.__aexit__()

    async def commits(self) -> AsyncIterator[Commit]:
        """All of them, in order."""
        async for commit in self.history.messages(StreamName.COMMITS, Commit):
            yield commit

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
        wanted = Selection(tickets=(min(commit.groups, default=0), max(commit.groups, default=-1)))
        tickets = self.history.messages(StreamName.PROMPTS, Ticket, wanted)
        return {ticket.ticket: ticket async for ticket in tickets if ticket.ticket in commit.groups}


async def diff_runs(a: DiffedRun, b: DiffedRun, tolerance: float) -> RunDiff:
    """Compare two runs step by step, to the first one that differs by more than `tolerance`."""
    changes = [
        {"field": change.field, "a": change.before, "b": change.after}
        for change in changed_fields(a.config, b.config)
    ]
    result = RunDiff(changes)
    async with StepReader(a) as reader_a, StepReader(b) as reader_b:
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

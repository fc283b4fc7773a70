"""The records of a stretch of a run: its commits, and all samples that were under way meanwhile."""

from dataclasses import dataclass, field

from common.entries import Entry
from common.errors import ConfigError
from common.history import History, Selection, StreamName
from common.messages import Commit, Lane, TrajectoryKey, WeightManifest
from services.console.step_trace import SampleFacts, read_samples

IN_FLIGHT_STEPS = 2
"""Tickets are issued so many steps ahead of the one that is trained, where the run's config is not known."""


@dataclass(slots=True)
class Stretch:
    """Steps `first` to `last`, and what went on from the first of their tickets to the last commit."""

    commits: list[Commit]
    samples: dict[TrajectoryKey, SampleFacts] = field(default_factory=dict)
    evaluated: dict[TrajectoryKey, SampleFacts] = field(default_factory=dict)
    manifests: list[WeightManifest] = field(default_factory=list)

    @property
    def begin_s(self) -> float:
        """When the first ticket was issued, or the first step begun."""
        issued = [s.issued_at or s.started_at for s in self.samples.values()]
        return min(at for at in (self.commits[0].started_at, *issued) if at)

    @property
    def end_s(self) -> float:
        """The last commit."""
        return self.commits[-1].finished_at


async def read_stretch(history: History, first: int, last: int, max_staleness: int | None) -> Stretch:
    """Read steps `first` to `last`.

    Raises:
        ConfigError: the run has none of them.
    """
    stretch = Stretch([])
    async for record in history.scan(StreamName.COMMITS, Selection(steps=(first, last))):
        if isinstance(record, Entry) and isinstance(record.message, Commit):
            stretch.commits.append(record.message)
    if not stretch.commits:
        raise ConfigError(
            f"run {history.run_id} has no commit of steps {first} to {last}. `tidemill streams tail commits` "
            "shows the newest; steps are counted from 0."
        )
    stretch.commits.sort(key=lambda commit: commit.step)
    tickets = [
        ticket
        for commit in stretch.commits
        for ticket in (*commit.groups, *(dropped for dropped, _, _ in commit.dropped))
    ]
    num_groups = max(len(commit.groups) for commit in stretch.commits)
    ahead = IN_FLIGHT_STEPS if max_staleness is None else max_staleness + 1
    under_way = Selection(tickets=(min(tickets), max(tickets) + ahead * num_groups))
    stretch.samples = await read_samples(history, under_way)
    window = (stretch.begin_s, stretch.end_s)
    stretch.evaluated = await read_samples(history, Selection(times=window), Lane.EVAL)
    async for record in history.scan(StreamName.WEIGHTS, Selection(times=window)):
        if isinstance(record, Entry) and isinstance(record.message, WeightManifest):
            stretch.manifests.append(record.message)
    return stretch

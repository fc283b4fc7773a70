"""`tidemill.History` and `tidemill.metrics`: what a run has recorded, for notebooks and scripts."""

import statistics
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from tidemill.common.config import RunConfig
from tidemill.common.errors import ConfigError
from tidemill.common.history import History as Streams
from tidemill.common.history.records import GroupRecord, SampleRecord, read_groups
from tidemill.common.run.state import METRICS_FILE, read_records
from tidemill.common.streams.selection import Range, Selection, StreamName
from tidemill.common.wire.messages import Commit, Lane
from tidemill.services.console.api.blocking import wait_for
from tidemill.services.console.api.tables import Records, Row
from tidemill.services.console.run.folder import find_run
from tidemill.services.console.run.history import open_history

T = TypeVar("T")
LaneName = Literal["train", "eval"]
Steps = int | tuple[int, int] | None


class History:
    """What a run has written to its streams, wherever they are now: in Redis, in its folder, in the archive.

    `run` is an id or a folder; without it the newest run. Reading changes nothing of the run. A method reads
    when it is called, and holds what it returns: bound a long run by `steps`, one number or (first, last).

        history = tidemill.History("arith-1")
        history.samples(steps=(0, 9)).to_pandas()
        history.groups(steps=3)[0].samples[0].trajectory.text
    """

    def __init__(self, run: str | Path | None = None, runs_dir: str | Path | None = None) -> None:
        self._folder = find_run(run, runs_dir)
        self.run_id = self._folder.run_id

    def __repr__(self) -> str:
        return f"History({self.run_id!r})"

    @property
    def config(self) -> RunConfig:
        """The config of the run. Raises ConfigError: it is not known any more."""

        async def read() -> RunConfig | None:
            async with open_history(self._folder) as access:
                return access.config

        if (found := wait_for(read)) is None:
            raise ConfigError(f"the config of run {self.run_id} is neither in Redis nor in its folder.")
        return found

    def steps(self, steps: Steps = None) -> Records[Commit]:
        """The committed steps, oldest first: what was trained, and the metrics. A row has the metrics."""

        async def read(history: Streams) -> list[Commit]:
            wanted = Selection(steps=_range_of(steps))
            return [m async for m in history.messages(StreamName.COMMITS, Commit, wanted)]

        return Records(self._read(read), _step_row)

    def groups(self, steps: Steps = None, lane: LaneName = "train") -> Records[GroupRecord]:
        """The groups whose tickets were issued for these steps, with their samples; a row sums a group up."""
        return Records(self._groups(steps, lane), _group_row)

    def samples(
        self, steps: Steps = None, lane: LaneName = "train"
    ) -> Records[tuple[GroupRecord, SampleRecord]]:
        """The samples of these groups, each with its group; a row has texts, reward, advantage and times."""
        groups = self._groups(steps, lane)
        return Records([(group, sample) for group in groups for sample in group.samples], _sample_row)

    def _groups(self, steps: Steps, lane: LaneName) -> list[GroupRecord]:
        return self._read(lambda history: read_groups(history, _range_of(steps), Lane(lane)))

    def _read(self, read: Callable[[Streams], Awaitable[T]]) -> T:
        async def opened() -> T:
            async with open_history(self._folder) as access:
                return await read(access.history)

        return wait_for(opened)


def metrics(
    run: str | Path | None = None,
    runs_dir: str | Path | None = None,
    kind: Literal["step", "evaluation"] = "step",
) -> Records[Mapping[str, Any]]:
    """The records of a run's metrics.jsonl: of its steps, or of its evaluations. docs/metrics.md lists them.

    Raises:
        ConfigError: there is no such run in the folder of runs.
    """
    folder = find_run(run, runs_dir)
    if not folder.path.is_dir():
        raise ConfigError(f"there is no run {folder.run_id} in {folder.runs}; give its folder with runs_dir.")
    found = read_records(folder.path / METRICS_FILE)
    return Records([record for record in found if record["kind"] == kind], dict)


def _range_of(steps: Steps) -> Range | None:
    return (steps, steps) if isinstance(steps, int) else steps


def _step_row(commit: Commit) -> Row:
    times = {"started_at": commit.started_at, "finished_at": commit.finished_at}
    return {"step": commit.step, "version": commit.version, **times, **commit.metrics}


def _group_row(group: GroupRecord) -> Row:
    source = group.prompt_source
    rewards = [sample.reward for sample in group.samples if sample.reward is not None]
    return {
        "ticket": group.number,
        "issued_for": getattr(source, "step", None),
        "trained_at": group.commit.step if group.commit and group.is_trained else None,
        "dropped_as": group.dropped_as,
        "data_source": source.data_source if source else "",
        "prompt": source.prompt_text if source else "",
        "ground_truth": source.ground_truth if source else None,
        "group_size": group.group_size,
        "num_rewards": len(rewards),
        "reward": statistics.fmean(rewards) if rewards else None,
        "reward_std": statistics.stdev(rewards) if len(rewards) > 1 else None,
    }


def _sample_row(pair: tuple[GroupRecord, SampleRecord]) -> Row:
    group, sample = pair
    made, score = sample.trajectory, sample.score
    row = {name: value for name, value in _group_row(group).items() if name in KEPT_OF_GROUP}
    row |= {"index": sample.index, "reward": sample.reward, "advantage": sample.advantage}
    row |= {"left_out": sample.left_out}
    if made is not None:
        row |= {"completion": made.text, "num_tokens": made.num_tokens, "finish": made.finish}
        row |= {"version": made.min_version, "rollout_worker": made.worker}
        row |= {"started_at": made.started_at, "finished_at": made.finished_at}
    if score is not None:
        row |= {"status": score.status.value, "error": score.error, "attempts": score.attempts}
        row |= {"latency_s": score.latency_s, "reward_worker": score.worker}
        row |= {f"rewards/{name}": value for name, value in score.components.items()}
    return row


KEPT_OF_GROUP = ("ticket", "issued_for", "trained_at", "data_source", "prompt", "ground_truth")

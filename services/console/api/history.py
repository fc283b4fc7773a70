"""`tidemill.History`, `metrics` and `Records`: what a run has recorded, for notebooks and scripts."""

import asyncio
import json
import statistics
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, overload

from tidemill.common.config import RunConfig
from tidemill.common.errors import ConfigError
from tidemill.common.process.programs import run_main
from tidemill.common.run.state import METRICS_FILE, read_records
from tidemill.common.streams.selection import Range, Selection, StreamName
from tidemill.common.wire.messages import Commit, Lane
from tidemill.services.console.look.joins import GroupRecord, SampleRecord, read_groups
from tidemill.services.console.run.folder import find_run
from tidemill.services.console.run.history import RunAccess, open_history

if TYPE_CHECKING:
    import pandas
    import pyarrow

T = TypeVar("T")
Row = Mapping[str, Any]
LaneName = Literal["train", "eval"]
Steps = int | tuple[int, int] | None


class Records(Sequence[T], Generic[T]):
    """A list of records, each of which is also a row of a table."""

    def __init__(self, records: Iterable[T], as_row: Callable[[T], Row]) -> None:
        self._records = list(records)
        self._as_row = as_row

    def __len__(self) -> int:
        return len(self._records)

    @overload
    def __getitem__(self, key: int) -> T: ...
    @overload
    def __getitem__(self, key: slice) -> "Records[T]": ...
    def __getitem__(self, key: int | slice) -> "T | Records[T]":
        return Records(self._records[key], self._as_row) if isinstance(key, slice) else self._records[key]

    def __repr__(self) -> str:
        kind = type(self._records[0]).__name__ if self._records else "nothing"
        return f"<{len(self)} records of {kind}; to_pandas(), to_arrow(), rows()>"

    def rows(self) -> list[dict[str, Any]]:
        """Every record as plain values by name."""
        return [dict(self._as_row(record)) for record in self._records]

    def to_arrow(self) -> "pyarrow.Table":
        """An Arrow table; columns with values of several kinds become JSON texts."""
        import pyarrow

        rows = self.rows()
        names = list(dict.fromkeys(name for row in rows for name in row))
        columns = {}
        for name in names:
            columns[name] = _column([row.get(name) for row in rows])
        return pyarrow.table(columns)

    def to_pandas(self) -> "pandas.DataFrame":
        """A data frame.

        Raises:
            ConfigError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError:
            raise ConfigError(
                "to_pandas() needs pandas, which is not installed here: pip install 'tidemill[pandas]'. "
                "to_arrow() and rows() do without"
            ) from None
        return pandas.DataFrame(self.rows())


class History:
    """What a run has written to its streams, wherever they are now: in Redis, in its folder, in the archive.

    Reading changes nothing. A method reads when it is called, and holds what it returns: bound a long run by
    `steps`, one number or (first, last).

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
        """The config of the run. Raises ConfigError: neither Redis nor the run's folder has it."""

        async def read(access: RunAccess) -> RunConfig | None:
            return access.config

        config = self._read(read)
        if config is None:
            raise ConfigError(f"the config of run {self.run_id} is neither in Redis nor in its folder.")
        return config

    def steps(self, steps: Steps = None) -> Records[Commit]:
        """The committed steps, oldest first: what was trained, and the metrics. A row has the metrics."""

        async def read(access: RunAccess) -> list[Commit]:
            wanted = Selection(steps=_range_of(steps))
            return [m async for m in access.history.messages(StreamName.COMMITS, Commit, wanted)]

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
        return self._read(lambda access: read_groups(access.history, _range_of(steps), Lane(lane)))

    def _read(self, read: Callable[[RunAccess], Awaitable[T]]) -> T:
        async def opened() -> T:
            async with open_history(self._folder) as access:
                return await read(access)

        return wait_for(opened)


def metrics(
    run: str | Path | None = None,
    runs_dir: str | Path | None = None,
    kind: Literal["step", "evaluation"] = "step",
) -> Records[Mapping[str, Any]]:
    """The records of metrics.jsonl, of steps or evaluations; docs/metrics.md lists them.

    Raises:
        ConfigError: there is no such run in the folder of runs.
    """
    folder = find_run(run, runs_dir)
    if not folder.path.is_dir():
        raise ConfigError(f"there is no run {folder.run_id} in {folder.runs}; give its folder with runs_dir.")
    records = read_records(folder.path / METRICS_FILE)
    return Records([record for record in records if record["kind"] == kind], dict)


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
    kept = ("ticket", "issued_for", "trained_at", "data_source", "prompt", "ground_truth")
    trajectory = sample.trajectory
    score = sample.score
    of_group = _group_row(group)
    row = {name: of_group[name] for name in kept}
    row |= {"index": sample.index, "reward": sample.reward, "advantage": sample.advantage}
    row |= {"left_out": sample.left_out}
    if trajectory is not None:
        row |= {
            "completion": trajectory.text,
            "num_tokens": trajectory.num_tokens,
            "finish": trajectory.finish,
        }
        row |= {} if trajectory.thought is None else {"thought": trajectory.thought}
        row |= {"version": trajectory.min_version, "rollout_worker": trajectory.worker}
        row |= {"started_at": trajectory.started_at, "finished_at": trajectory.finished_at}
    if score is not None:
        row |= {"status": score.status.value, "error": score.error, "attempts": score.attempts}
        row |= {"latency_s": score.latency_s, "reward_worker": score.worker}
        row |= {f"rewards/{name}": value for name, value in score.components.items()}
    return row


def _column(values: list[Any]) -> Any:
    import pyarrow

    try:
        return pyarrow.array(values)
    except pyarrow.ArrowException:
        return pyarrow.array([None if value is None else json.dumps(value, default=str) for value in values])


def wait_for(make: Callable[[], Coroutine[Any, Any, T]], stop: Callable[[], None] = lambda: None) -> T:
    """Run the coroutine that `make` returns on an event loop of its own, and return its result.

    Inside a running loop (a notebook) it runs in a thread. Ctrl-C then calls `stop`, and the wait goes on.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return run_main(make())
    with ThreadPoolExecutor(1, "tidemill") as threads:
        future = threads.submit(lambda: run_main(make()))
        while True:
            try:
                return future.result()
            except KeyboardInterrupt:
                stop()

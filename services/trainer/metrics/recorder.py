"""Keeps what a run measured: `metrics.jsonl` for programs, TensorBoard and trackers for people.

Invariant: each step, and each evaluation of a version on a set, is recorded once. A trainer that resumes at
version v trains the steps from v on again, so opening the recorder cuts those lines off first, in one atomic
replacement, together with a last line that a crash left half-written.
"""

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import structlog

from tidemill.common.files import append_whole, storage_errors, write_atomically
from tidemill.common.run.state import EVALUATION, METRICS_FILE, STEP, Record, read_records
from tidemill.common.wire.messages import Commit
from tidemill.services.trainer.metrics.trackers import Sender

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


log = structlog.get_logger(__name__)

TENSORBOARD = "tensorboard"
"""Name of the logger, and of its folder below the run's."""
FLUSH_S = 10
"""Longest time a TensorBoard event waits in memory, in seconds."""


class Recorder:
    """Appends records of one run. Opens the files on construction; `close` when the run ends.

    Lifecycle: `Recorder(run_dir, tensorboard=True, resume_at=v)`, then `step` and `evaluation` in any order,
    `sync` before each checkpoint, `close`.
    """

    def __init__(self, run_dir: Path, tensorboard: bool, resume_at: int = 0) -> None:
        self.path = run_dir / METRICS_FILE
        kept = _cut_off(self.path, resume_at)
        self._next_step = max((r["step"] + 1 for r in kept if r["kind"] == STEP), default=0)
        self._evaluated = {(r["version"], r["set"]) for r in kept if r["kind"] == EVALUATION}
        with storage_errors("metrics", self.path):
            self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 (closed by `close`)
        self._senders: list[Sender] = []
        self._board = _open_board(run_dir / TENSORBOARD, resume_at) if tensorboard else None
        for record in kept:
            # TensorBoard forgets everything from `resume_at` on, also the evaluations that are still good.
            if record["kind"] == EVALUATION and record["version"] == resume_at:
                self._show(record, f"eval/{record['set']}/", resume_at)

    def attach(self, sender: Sender) -> None:
        """Pass all further records on to a tracker too; it is closed with the recorder."""
        self._senders.append(sender)

    def step(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Record one step's metrics; a repeat of a step on record is ignored. Raises StorageError: the disk
        is full or read-only. The line is not there, not even in part."""
        if step < self._next_step:
            log.debug("step is on record already", step=step)
            return
        record = record_of({"kind": STEP, "step": step}, metrics)
        self._append(record)
        self._next_step = step + 1
        self._show(record, "", step)
        self._send(record)

    def evaluation(self, version: int, name: str, metrics: Mapping[str, float | None]) -> None:
        """Record one evaluation of `version` on the set `name`; a repeat of one on record is ignored."""
        if self.has_evaluation(version, name):
            log.debug("evaluation is on record already", version=version, set=name)
            return
        record = record_of({"kind": EVALUATION, "version": version, "set": name}, metrics)
        self._append(record)
        self._evaluated.add((version, name))
        self._show(record, f"eval/{name}/", version)
        self._send(record)

    def has_evaluation(self, version: int, name: str) -> bool:
        """Whether this version's evaluation on this set is on record, so that it need not be run again."""
        return (version, name) in self._evaluated

    def sync(self) -> None:
        """Make all records durable: before a checkpoint, whose steps will not be trained again."""
        with storage_errors("metrics", self.path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Flush and close both files."""
        if self._file.closed:
            return
        try:
            self.sync()
        finally:
            self._file.close()
            if self._board is not None:
                self._board.close()
            for sender in self._senders:
                sender.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _append(self, record: Record) -> None:
        line = json.dumps(record, allow_nan=False).encode() + b"\n"
        with storage_errors("metrics", self.path):
            append_whole(self._file, line)

    def _send(self, record: Record) -> None:
        for sender in self._senders:
            sender.send(record)

    def _show(self, record: Record, prefix: str, at: int) -> None:
        """Pass the numbers on to TensorBoard, which is a convenience: when it fails, the run goes on."""
        if self._board is None:
            return
        try:
            for name, value in record.items():
                if name not in ("kind", "step", "version", "time") and isinstance(value, int | float):
                    self._board.add_scalar(prefix + name, value, at, walltime=record["time"])
        except OSError as error:
            log.warning("TensorBoard events are off: they cannot be written", error=str(error))
            self._board = None


def record_of(head: Record, metrics: Mapping[str, float | None], at: float | None = None) -> Record:
    """One line: what it is about, when, and the metrics as JSON numbers."""
    record: Record = {**head, "time": round(time.time() if at is None else at, 3)}
    if clash := sorted(record.keys() & metrics.keys()):
        raise ValueError(f"metrics cannot be named {', '.join(clash)}: a record has these fields already")
    return record | {name: _number(value) for name, value in metrics.items()}


def _number(value: Any) -> float | int | None:
    """A JSON number: counts stay whole, numpy and torch scalars are fine, what is not finite is null."""
    if value is None or isinstance(value, int):
        return value
    number = float(value)
    return number if math.isfinite(number) else None


def _cut_off(path: Path, resume_at: int) -> list[Record]:
    """Leave what version `resume_at` knows, steps below it and evaluations up to it, and return that."""
    records = read_records(path)
    kept = [r for r in records if (r["step"] < resume_at if r["kind"] == STEP else r["version"] <= resume_at)]
    content = b"".join(json.dumps(record).encode() + b"\n" for record in kept)
    if path.exists() and path.read_bytes() != content:
        write_atomically(path, content)
        if len(kept) < len(records):
            log.info(
                "metrics cut back to the checkpoint", version=resume_at, num_cut=len(records) - len(kept)
            )
    return kept


def _open_board(folder: Path, resume_at: int) -> "SummaryWriter | None":
    from torch.utils.tensorboard import SummaryWriter

    try:
        return SummaryWriter(log_dir=str(folder), purge_step=resume_at, flush_secs=FLUSH_S)
    except OSError as error:
        log.warning("TensorBoard events are off: the folder cannot be written", error=str(error))
        return None


NOT_MEASURED = ("components", "version", "dataset", "pass_at", "at")
"""Fields of an evaluation in the run's state that are no metrics."""


def rebuild(
    run_dir: Path,
    saved: int,
    version: int,
    commit_of: Callable[[int], Commit | None],
    evaluations: Iterable[Mapping[str, Any]],
) -> int:
    """Add the steps below `version` and the evaluations that the file lacks; returns how many lines.

    From step `saved` on, the version of the newest checkpoint, a crash may have left it without: no matter.
    `commit_of` gives the commit of a step, or None where nobody has it.
    """
    records = read_records(run_dir / METRICS_FILE)
    there = {record["step"] for record in records if record["kind"] == STEP}
    commits = [commit_of(step) for step in range(version) if step not in there]
    missing = [
        record_of({"kind": STEP, "step": commit.step}, commit.metrics, commit.finished_at)
        for commit in commits
        if commit is not None
    ]
    seen = {(record["version"], record["set"]) for record in records if record["kind"] == EVALUATION}
    missing += [
        _evaluation_of(item) for item in evaluations if (item["version"], item["dataset"]) not in seen
    ]
    if num_unknown := sum(commit is None for commit in commits):
        log.warning("metrics of some steps are lost: their commits are not there", count=num_unknown)
    if missing:
        say = log.warning if any(record.get("step", -1) < saved for record in missing) else log.debug
        say("metrics.jsonl was not whole; restored it from commits", lines=len(missing))
        # An evaluation of version v comes before step v, as it is run.
        records = [*records, *missing]
        records.sort(key=lambda r: (r["step"], 1) if r["kind"] == STEP else (r["version"], 0))
        content = b"".join(json.dumps(record).encode() + b"\n" for record in records)
        write_atomically(run_dir / METRICS_FILE, content)
    return len(missing)


def _evaluation_of(item: Mapping[str, Any]) -> Record:
    numbers = {name: value for name, value in item.items() if name not in NOT_MEASURED}
    numbers |= {f"pass_at_{k}": value for k, value in item["pass_at"].items()}
    numbers |= {f"rewards/{name}/mean": value for name, value in item.get("components", {}).items()}
    head = {"kind": EVALUATION, "version": item["version"], "set": item["dataset"]}
    return record_of(head, numbers, item["at"])

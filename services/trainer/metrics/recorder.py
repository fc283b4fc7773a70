"""Keeps what a run measured: `metrics.jsonl`, which trackers follow.

Invariant: each step, and each evaluation of a version on a set, is recorded once.

A trainer that resumes at version v trains the steps from v on again. So opening the recorder first removes
the lines of these steps, and a last line that a crash left half-written, and puts back what the file has
lost: all in one atomic replacement.
"""

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from tidemill.common.files import append_whole, storage_errors, write_atomically
from tidemill.common.run.state import EVALUATION, METRICS_FILE, REASON, STEP, Record, read_records
from tidemill.common.wire.messages import Commit

if TYPE_CHECKING:
    from tidemill.services.trainer.metrics.trackers import Sender

log = structlog.get_logger(__name__)


class Recorder:
    """Appends records of one run. Opens the files on construction; `close` when the run ends.

    Lifecycle: `Recorder(run_dir, resume_at=v)`, then `step` and `evaluation` in any order,
    `sync` before each checkpoint, `close`.
    """

    def __init__(
        self,
        run_dir: Path,
        resume_at: int = 0,
        commit_of: Callable[[int], Commit | None] = lambda _: None,
        evaluations: Iterable[Record] = (),
    ) -> None:
        """`resume_at` is the version that the trainer is at; `commit_of` gives the commit of a step, or None
        where it is lost; `evaluations` are those in the run's state."""
        self.path = run_dir / METRICS_FILE
        kept = _restored(self.path, resume_at, commit_of, evaluations)
        self._next_step = max((r["step"] + 1 for r in kept if r["kind"] == STEP), default=0)
        self.evaluations = [record for record in kept if record["kind"] == EVALUATION]
        """Evaluations on record, oldest first."""
        with storage_errors("metrics", self.path):
            self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 (closed by `close`)
        self._senders: list[Sender] = []

    def attach(self, sender: "Sender") -> None:
        """Have a tracker follow the records; it is closed with the recorder."""
        self._senders.append(sender)

    def step(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Record one step's metrics; a repeat of a step on record is ignored. Raises StorageError: the disk
        is full or read-only. The line is not there, not even in part."""
        if step >= self._next_step:
            self._append(record_of({"kind": STEP, "step": step}, metrics))
            self._next_step = step + 1

    def evaluation(
        self, version: int, name: str, metrics: Mapping[str, float | None], reason: str = ""
    ) -> None:
        """Record one evaluation of `version` on the set `name`, and why samples of it failed, where some did;
        a repeat of one on record is ignored."""
        if not self.has_evaluation(version, name):
            record = record_of({"kind": EVALUATION, "version": version, "set": name}, metrics)
            if reason:
                record[REASON] = reason
            self._append(record)
            self.evaluations.append(record)

    def has_evaluation(self, version: int, name: str) -> bool:
        """Whether this version's evaluation on this set is on record, so that it need not be run again."""
        return any(record["version"] == version and record["set"] == name for record in self.evaluations)

    def sync(self) -> None:
        """Make all records durable: before a checkpoint, whose steps will not be trained again."""
        with storage_errors("metrics", self.path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file.closed:
            return
        try:
            self.sync()
        finally:
            self._file.close()
            for sender in self._senders:
                sender.close()

    def _append(self, record: Record) -> None:
        with storage_errors("metrics", self.path):
            append_whole(self._file, _line(record))
        for sender in self._senders:
            sender.wake()


def record_of(head: Record, metrics: Mapping[str, float | None], at: float | None = None) -> Record:
    """A record, which is one line: its kind, the time, and the metrics as JSON numbers."""
    record: Record = {**head, "time": round(time.time() if at is None else at, 3)}
    clash = sorted(record.keys() & metrics.keys())
    if clash:
        raise ValueError(f"metrics cannot be named {', '.join(clash)}: a record has these fields already")
    return record | {name: _number(value) for name, value in metrics.items()}


def _number(value: Any) -> float | int | None:
    """A JSON number: counts stay whole, numpy and torch scalars are fine, what is not finite is null."""
    if value is None or isinstance(value, int):
        return value
    number = float(value)
    return number if math.isfinite(number) else None


def _line(record: Record) -> bytes:
    return json.dumps(record, allow_nan=False).encode() + b"\n"


def _restored(
    path: Path,
    resume_at: int,
    commit_of: Callable[[int], Commit | None],
    evaluations: Iterable[Record],
) -> list[Record]:
    """Keep only steps below `resume_at` and evaluations up to it in the file; returns them.

    The file may lack records: the newest after a crash, all after damage. Steps are restored from their
    commits, evaluations from the run's state.
    """
    records = read_records(path)
    steps = {record["step"]: record for record in records if record["kind"] == STEP}
    by_version_and_set = {(r["version"], r["set"]): r for r in records if r["kind"] == EVALUATION}
    missing = [step for step in range(resume_at) if step not in steps]
    num_lost = 0
    for step in missing:
        commit = commit_of(step)
        if commit is None:
            num_lost += 1
            continue
        head = {"kind": STEP, "step": commit.step}
        steps[commit.step] = record_of(head, commit.metrics, commit.finished_at)
    for record in evaluations:
        if record.get("kind") == EVALUATION:  # an older release had another form
            by_version_and_set.setdefault((record["version"], record["set"]), record)
    kept = [record for step, record in steps.items() if step < resume_at]
    kept += [record for (version, _), record in by_version_and_set.items() if version <= resume_at]
    # An evaluation of version v comes before step v, as it is run.
    kept.sort(key=lambda r: (r["step"], 1) if r["kind"] == STEP else (r["version"], 0))
    if num_lost:
        log.warning("metrics of some steps are lost: their commits are not there", count=num_lost)
    content = b"".join(map(_line, kept))
    if content != (path.read_bytes() if path.exists() else b""):
        write_atomically(path, content)
        log.info("metrics.jsonl restored", version=resume_at, lines=len(kept), lines_before=len(records))
    return kept

"""Makes `metrics.jsonl` whole again: steps that it lacks come back from commits, evaluations from Redis.

The file is a copy of what commits and the run's state say. Whoever empties or damages it loses nothing.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import structlog

from common.files import write_atomically
from common.messages import Commit
from common.records import EVALUATION, METRICS_FILE, STEP, Record, read_records
from services.trainer.recorder import record_of

log = structlog.get_logger(__name__)

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
    missing = [_step_of(commit) for commit in commits if commit is not None]
    seen = {(record["version"], record["set"]) for record in records if record["kind"] == EVALUATION}
    missing += [
        _evaluation_of(item) for item in evaluations if (item["version"], item["dataset"]) not in seen
    ]
    if num_unknown := sum(commit is None for commit in commits):
        log.warning("metrics of some steps are lost: their commits are not there", count=num_unknown)
    if missing:
        say = log.warning if any(record.get("step", -1) < saved for record in missing) else log.debug
        say("metrics.jsonl was not whole; restored it from commits", lines=len(missing))
        content = b"".join(json.dumps(record).encode() + b"\n" for record in _in_order([*records, *missing]))
        write_atomically(run_dir / METRICS_FILE, content)
    return len(missing)


def _in_order(records: list[Record]) -> list[Record]:
    """By version: an evaluation of version v comes before step v, as it is run."""
    return sorted(records, key=lambda r: (r["step"], 1) if r["kind"] == STEP else (r["version"], 0))


def _step_of(commit: Commit) -> Record:
    return record_of({"kind": STEP, "step": commit.step}, commit.metrics, commit.finished_at)


def _evaluation_of(item: Mapping[str, Any]) -> Record:
    numbers = {name: value for name, value in item.items() if name not in NOT_MEASURED}
    numbers |= {f"pass_at_{k}": value for k, value in item["pass_at"].items()}
    numbers |= {f"rewards/{name}/mean": value for name, value in item.get("components", {}).items()}
    head = {"kind": EVALUATION, "version": item["version"], "set": item["dataset"]}
    return record_of(head, numbers, item["at"])

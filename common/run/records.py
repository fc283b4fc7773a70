"""The lines of a run's `metrics.jsonl`: one JSON object each, either a step or an evaluation.

A step: `{"kind": "step", "step": 12, "time": ..., "reward": 0.41, ...}`; step 12 turned version 12 into 13.
An evaluation: `{"kind": "evaluation", "version": 13, "set": "test", "time": ..., "score": 0.5, ...}`.
Metric names are those that users of TRL and verl know. A value that was not finite is null.
"""

import json
from pathlib import Path
from typing import Any

METRICS_FILE = "metrics.jsonl"
"""Below the run's folder."""
BEST_FILE = "best.json"
"""Below the run's folder: which evaluated version is the best, and where its weights are."""
STEP = "step"
EVALUATION = "evaluation"

Record = dict[str, Any]


def read_records(path: Path) -> list[Record]:
    """All whole records of a file, in order, less a line that a crash cut off. A missing file has none."""
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    return [record for line in lines[:-1] if (record := _parse(line)) is not None]


def _parse(line: bytes) -> Record | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and record.get("kind") in (STEP, EVALUATION) else None

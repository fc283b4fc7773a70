"""The best evaluated version: its weights are never pruned, and `best.json` says which it is.

Only like evaluations are compared: over the same sets and as many samples (where a resumed run has others,
the comparison starts again), of which hardly any has failed (`MAX_FAILED_SHARE`).

The best version follows from the evaluations on record and the weights on the disk, so a trainer that resumes
finds the same one; `best.json` is written for people and tools.
"""

import json
import math
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import structlog

from tidemill.common.files import write_atomically
from tidemill.common.run.state import BEST_FILE, EVALUATION, Record
from tidemill.common.run.weight_files import WEIGHTS_FOLDER, folder_versions, version_name

log = structlog.get_logger(__name__)

MAX_FAILED_SHARE = 0.02
"""With more samples without a score, a set's mean is over other samples than those it is compared with."""


@dataclass(frozen=True, slots=True)
class Best:
    version: int
    metric: str
    value: float
    weights: str
    """Folder of the weights, below the run's."""
    at: float


class BestVersion:
    """Follows one run's evaluations. Without a metric it keeps nothing."""

    def __init__(self, run_dir: Path, metric: str, records: Iterable[Record]) -> None:
        """`records` are those that are left after a resume; only versions whose weights are there count."""
        self.path = run_dir / BEST_FILE
        self.metric = metric
        self._sizes: dict[str, float] = {}
        """Samples of each set in the best version's evaluation."""
        self.best: Best | None = None
        there = set(folder_versions(run_dir / WEIGHTS_FOLDER))
        by_version: dict[int, dict[str, Mapping[str, Any]]] = defaultdict(dict)
        for record in records:
            if record["kind"] == EVALUATION and record["version"] in there:
                by_version[record["version"]][record["set"]] = record
        for version in sorted(by_version):
            self._consider(version, by_version[version])

    @property
    def in_use(self) -> frozenset[int]:
        return frozenset({self.best.version}) if self.best else frozenset()

    def consider(self, version: int, results: Mapping[str, Mapping[str, float]]) -> None:
        """Take in the evaluation of `version`, by dataset; equal values leave the earlier version. Raises
        StorageError: the disk is full or read-only; call again."""
        if self._consider(version, results) and self.best is not None:
            log.info("best version so far", version=version, metric=self.metric, value=self.best.value)
        if self.best is not None:
            write_atomically(self.path, json.dumps(asdict(self.best), indent=1) + "\n")

    def as_state(self) -> dict[str, Any] | None:
        return asdict(self.best) if self.best else None

    def _consider(self, version: int, results: Mapping[str, Mapping[str, Any]]) -> bool:
        """Returns whether it is the best so far. `METRIC` is the mean over datasets, `DATASET/METRIC` that of
        one; an evaluation that lacks a number is ignored."""
        dataset, _, metric = self.metric.rpartition("/")
        wanted = {name: row for name, row in results.items() if dataset in ("", name)}
        values = [row.get(metric) for row in wanted.values()]
        numbers = [float(value) for value in values if value is not None and math.isfinite(value)]
        if not numbers or len(numbers) != len(values) or not self._is_sound(version, wanted):
            return False
        value = sum(numbers) / len(numbers)
        sizes = {name: _size(row) for name, row in wanted.items()}
        if self.best is not None and value <= self.best.value and sizes == self._sizes:
            return False
        weights = f"{WEIGHTS_FOLDER}/{version_name(version)}"
        self._sizes = sizes
        self.best = Best(version, self.metric, value, weights, time.time())
        return True

    def _is_sound(self, version: int, results: Mapping[str, Mapping[str, Any]]) -> bool:
        """Whether so few samples have failed in each set that its mean can be compared."""
        for name, row in results.items():
            share = (row.get("num_failed") or 0.0) / max(_size(row), 1.0)
            if share > MAX_FAILED_SHARE:
                log.warning(
                    "not compared with the best version: too many samples of its evaluation have no score",
                    version=version,
                    dataset=name,
                    failed_share=round(share, 4),
                    allowed=MAX_FAILED_SHARE,
                )
                return False
        return True


def _size(row: Mapping[str, Any]) -> float:
    """Samples that were evaluated, failed ones included."""
    return float((row.get("num_samples") or 0.0) + (row.get("num_failed") or 0.0))

"""Numbers of runs by step, from their metrics.jsonl: also of runs that are not open.

Guarantees: a line is read once, when it is complete, and one that is no record costs no other; of a step that
was written twice, the last line stands.
"""

import math
import os
import threading
from array import array
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from tidemill.common.run.state import METRICS_FILE, STEP, parse_record
from tidemill.services.console.status.snapshot import StepPoint

Numbers = NDArray[np.float64]

EVALUATION_PREFIX = "eval/"
"""Names of an evaluation's numbers: `eval/<set>/<number>`, as loggers have them."""
NO_METRICS = frozenset({"kind", "step", "version", "set", "time"})
MAX_KEPT_FILES = 16


@dataclass(frozen=True, slots=True)
class Series:
    """One number of a run: `x` are steps, or versions of an evaluation; `time` is in seconds."""

    x: Numbers
    y: Numbers
    time: Numbers

    @property
    def last(self) -> tuple[float, float, float] | None:
        """The newest `x`, `y` and `time`."""
        return (float(self.x[-1]), float(self.y[-1]), float(self.time[-1])) if len(self.x) else None


def _no_numbers() -> dict[str, "array[float]"]:
    return defaultdict(lambda: array("d"))


@dataclass(slots=True)
class Columns:
    """What has been read of a run's numbers."""

    inode: int = 0
    position: int = 0
    """Bytes that were read."""
    began_at: float = math.inf
    numbers: dict[str, "array[float]"] = field(default_factory=_no_numbers)
    """By name: x, y and time of each line, one after the other."""

    def add(self, record: Mapping[str, Any]) -> None:
        is_step = record.get("kind") == STEP
        prefix = "" if is_step else f"{EVALUATION_PREFIX}{record.get('set', '')}/"
        x, at = record.get("step" if is_step else "version"), record.get("time")
        if not (_is_finite(x) and _is_finite(at)):
            return
        self.began_at = min(self.began_at, at)
        for name, value in record.items():
            if name not in NO_METRICS and _is_finite(value):
                self.numbers[prefix + name].extend((x, value, at))

    def series(self, name: str) -> Series:
        """One number; empty where there is none of this name."""
        rows = np.array(self.numbers.get(name, ())).reshape(-1, 3)[::-1]
        # The last of equal steps is the first of them from behind.
        _, places = np.unique(rows[:, 0], return_index=True)
        x, y, at = rows[places].T
        return Series(x, y, at - self.began_at)


def _is_finite(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


class MetricFiles:
    """Reads and keeps the numbers of many runs."""

    def __init__(self) -> None:
        self._files: OrderedDict[Path, Columns] = OrderedDict()
        self._lock = threading.Lock()  # several requests read at once, each in a thread

    def names(self, run_dir: Path) -> list[str]:
        """Names of everything that the file has numbers of, in order."""
        with self._lock:
            return sorted(self._read(run_dir).numbers)

    def series(self, run_dir: Path, names: Sequence[str]) -> dict[str, Series]:
        """The named numbers; an empty series where the file has none."""
        with self._lock:
            columns = self._read(run_dir)
            return {name: columns.series(name) for name in names}

    def _read(self, run_dir: Path) -> Columns:
        """What the file holds now: what has been appended is read, a file in its place from its beginning."""
        columns = self._files.pop(run_dir, None) or Columns()
        try:
            with open(run_dir / METRICS_FILE, "rb") as file:
                stat = os.fstat(file.fileno())
                if stat.st_ino != columns.inode or stat.st_size < columns.position:
                    columns = Columns(stat.st_ino)
                file.seek(columns.position)
                data = file.read()
        except OSError:
            return Columns()
        data = data[: data.rfind(b"\n") + 1]
        columns.position += len(data)
        for line in data.splitlines():
            if (record := parse_record(line)) is not None:
                columns.add(record)
        self._files[run_dir] = columns
        while len(self._files) > MAX_KEPT_FILES:
            self._files.popitem(last=False)
        return columns


def columns_of(points: Iterable[StepPoint]) -> Columns:
    """The numbers of a run that has no file here."""
    columns = Columns()
    for point in points:
        columns.add({**point.metrics, "kind": STEP, "step": point.step, "time": point.finished_at})
    return columns

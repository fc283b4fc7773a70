"""Numbers of a run by step, from the records of metrics.jsonl or from commits, and their moving average.

Of a step that was written twice, the last record counts.
"""

import math
from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeGuard

import numpy as np
from numpy.typing import NDArray

from tidemill.common.run.state import STEP

Numbers = NDArray[np.float64]

EVALUATION_PREFIX = "eval/"
"""Names of an evaluation's numbers: `eval/<set>/<number>`, as loggers have them."""
NO_METRICS = frozenset({"kind", "step", "version", "set", "time"})


class Series(NamedTuple):
    """One number of a run: `x` are steps, or versions of an evaluation; `time` is in seconds.

    Example: the reward of three steps: `x` [0, 1, 2], `y` [0.1, 0.3, 0.4], `time` [12.0, 20.5, 29.0].
    """

    x: Numbers
    """[N]"""
    y: Numbers
    """[N]"""
    time: Numbers
    """[N]"""

    @property
    def last(self) -> tuple[float, float, float] | None:
        return (float(self.x[-1]), float(self.y[-1]), float(self.time[-1])) if len(self.x) else None


@dataclass(slots=True)
class Columns:
    """All numbers of a run's steps and evaluations, compact.

    Example: `numbers["reward"]` is [0, 0.1, t0, 1, 0.3, t1]: steps 0 and 1, their rewards and times.
    """

    began_at: float = math.inf
    numbers: dict[str, "array[float]"] = field(default_factory=lambda: defaultdict(lambda: array("d")))
    """By name: x, y and time of each record, in one flat array."""

    @classmethod
    def of(cls, records: Iterable[Mapping[str, Any]]) -> "Columns":
        columns = cls()
        for record in records:
            columns.add(record)
        return columns

    def add(self, record: Mapping[str, Any]) -> None:
        is_step = record.get("kind") == STEP
        prefix = "" if is_step else f"{EVALUATION_PREFIX}{record.get('set', '')}/"
        x = record.get("step" if is_step else "version")
        at = record.get("time")
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

    def scores(self) -> dict[str, Series]:
        """Scores of the evaluation sets, by the names of the sets."""
        sets = {name: name.removeprefix(EVALUATION_PREFIX).removesuffix("/score") for name in self.numbers}
        return {
            of: self.series(name) for name, of in sets.items() if name == f"{EVALUATION_PREFIX}{of}/score"
        }


def _is_finite(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def smooth(y: Numbers, weight: float) -> Numbers:
    """Exponential moving average, shape [N], without the pull of its start towards 0.

    m_n = w * m_(n-1) + (1 - w) * y_n with m_0 = 0; the result is m_n / (1 - w^n). Weight 0 is `y` itself.
    """
    if weight <= 0 or not len(y):
        return y
    averages = np.empty_like(y)
    average = 0.0
    weight_left = 1.0
    for index, value in enumerate(y.tolist()):
        average = weight * average + (1 - weight) * value
        weight_left = weight_left * weight
        averages[index] = average / (1 - weight_left)
    return averages

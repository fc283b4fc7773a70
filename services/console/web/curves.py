"""Curves as a screen can show them: smoothed as TensorBoard does it, thinned so that no spike is lost."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from tidemill.services.console.web.metric_files import Numbers, Series

MAX_POINTS = 500
"""Of one line."""


def smooth(y: Numbers, weight: float) -> Numbers:
    """Exponential moving average, shape [N], without the pull of its start towards 0.

    m_n = w * m_(n-1) + (1 - w) * y_n with m_0 = 0; the result is m_n / (1 - w^n). Weight 0 is `y` itself.
    """
    if weight <= 0 or not len(y):
        return y
    averages = np.empty_like(y)
    average, rest = 0.0, 1.0
    for place, value in enumerate(y.tolist()):
        average, rest = weight * average + (1 - weight) * value, rest * weight
        averages[place] = average / (1 - rest)
    return averages


def thin(y: Numbers, most: int = MAX_POINTS) -> "np.ndarray[Any, np.dtype[np.intp]]":
    """Places of at most `most` values: the first, the last, and least and greatest of each of equal parts."""
    count = len(y)
    if count <= most:
        return np.arange(count)
    edges = np.linspace(0, count, (most - 2) // 2 + 1).astype(int)
    places = {0, count - 1}
    for first, last in pairwise(edges):
        part = y[first:last]
        places |= {int(first + part.argmin()), int(first + part.argmax())}
    return np.array(sorted(places))


def line_of(label: str, series: Series, smoothing: float, unit_s: float = 0.0) -> dict[str, Any]:
    """A line as JSON: `[x, y]` pairs, and as `raw` those before smoothing. `unit_s`: of a time axis."""
    x = series.time / unit_s if unit_s else series.x
    line: dict[str, Any] = {"label": label, "points": _pairs(x, smooth(series.y, smoothing))}
    if smoothing > 0:
        line["raw"] = _pairs(x, series.y)
    return line


def _pairs(x: Numbers, y: Numbers) -> list[list[float]]:
    places = thin(y)
    pairs = zip(x[places].tolist(), y[places].tolist(), strict=True)
    return [[float(f"{a:.7g}"), float(f"{b:.6g}")] for a, b in pairs if math.isfinite(a)]


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """A config's fields by dotted names; lists are values."""
    if not isinstance(tree, Mapping) or not tree:
        return {prefix.removesuffix("."): tree}
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= flatten(value, f"{prefix}{name}.")
    return found


ABSENT = "\u2013"
"""What a config does not have: of another release, or of a section that is not there."""


def differing(configs: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[Any]]]:
    """Fields in which configs differ, with the value of each; the run's id is none of them.

    A config of which nothing is known differs in nothing.
    """
    fields = dict.fromkeys(name for config in configs for name in config if name != "run_id")
    rows = [(name, [config.get(name, ABSENT) for config in configs]) for name in fields]
    known = [place for place, config in enumerate(configs) if config]
    return [(name, values) for name, values in rows if any(values[at] != values[known[0]] for at in known)]

"""Curves of runs as a screen can show them.

Guarantee: curves are smoothed as TensorBoard does it, and thinned so that no spike is lost.
"""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tidemill.common.run.state import METRICS_FILE, read_records
from tidemill.services.console.look.series import EVALUATION_PREFIX, Columns, Numbers, Series, smooth
from tidemill.services.console.look.snapshot import StepPoint

MAX_KEPT_FILES = 16
MAX_POINTS = 500
"""Points of one line."""


def columns_in(run_dir: Path) -> Columns:
    """The numbers that a run's folder has; its file is read again when it has changed."""
    path = run_dir / METRICS_FILE
    try:
        status = path.stat()
    except OSError:
        return Columns()
    return _read_columns(path, status.st_ino, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=MAX_KEPT_FILES)
def _read_columns(path: Path, inode: int, changed_ns: int, size: int) -> Columns:
    return Columns.of(read_records(path))


def columns_of(points: Iterable[StepPoint]) -> Columns:
    """The numbers of a run that has no file here."""
    return Columns.of(point.record for point in points)


def thin(y: Numbers, most: int = MAX_POINTS) -> NDArray[np.intp]:
    """Indices of at most `most` values: of the first, of the last, and of the least and the greatest in each
    of equal parts."""
    count = len(y)
    if count <= most:
        return np.arange(count)
    edges = np.linspace(0, count, (most - 2) // 2 + 1).astype(int)
    indices = {0, count - 1}
    for first, last in pairwise(edges):
        window = y[first:last]
        indices |= {int(first + window.argmin()), int(first + window.argmax())}
    return np.array(sorted(indices))


def line_of(label: str, series: Series, smoothing: float = 0.0, unit_s: float = 0.0) -> dict[str, Any]:
    """A line as JSON: `[x, y]` pairs, `raw` before smoothing. `unit_s`: seconds in a unit of a time axis."""
    x = series.time / unit_s if unit_s else series.x
    line: dict[str, Any] = {"label": label, "points": _pairs(x, smooth(series.y, smoothing))}
    if smoothing > 0:
        line["raw"] = _pairs(x, series.y)
    return line


def _pairs(x: Numbers, y: Numbers) -> list[list[float]]:
    indices = thin(y)
    pairs = zip(x[indices].tolist(), y[indices].tolist(), strict=True)
    return [[float(f"{a:.7g}"), float(f"{b:.6g}")] for a, b in pairs if math.isfinite(a)]


class Chart(NamedTuple):
    """One small picture: a title, and its lines by label and metric."""

    key: str
    title: str
    lines: Mapping[str, str]
    unit: str = ""
    """A chart of "share" goes from 0 to 1."""
    x: str = "step"


KL = {"KL to reference": "kl", "KL of rollout": "rollout_kl", "entropy": "entropy"}
LENGTH = {"mean": "completions/mean_length", "longest": "completions/max_length"}
IDLE = {"trainer": "trainer_idle_share", "rollout": "idle/rollout", "reward": "idle/reward"}
LOST = {"failed scores": "scores/failed_ratio", "dropped groups": "groups_dropped_ratio"}
SESSION = {"engine": "sessions/engine_s", "environment": "sessions/environment_s"}
STAGES = {
    "generation": "stages/generation_s",
    "wait for reward": "stages/reward_queue_s",
    "score": "stages/score_s",
}
CHARTS = (
    Chart("reward", "Reward", {"mean": "reward", "std in groups": "reward_group_std"}),
    Chart("loss", "Loss", {"loss": "loss"}),
    Chart("kl", "KL and entropy", KL),
    Chart("grad", "Gradient norm", {"norm": "grad_norm"}),
    Chart("length", "Completion length, tokens", LENGTH),
    Chart("staleness", "Staleness, steps", {"mean": "staleness/mean", "most": "staleness/max"}),
    Chart("idle", "Idle shares", IDLE, "share"),
    Chart("failed", "Failed, dropped, cut", LOST | {"cut completions": "completions/clipped_ratio"}, "share"),
    Chart("turns", "Turns of a session", {"mean": "sessions/mean_turns"}),
    Chart("session", "A session's time, seconds", SESSION),
    Chart("use", "Use of the trainer's GPUs", {"MFU": "perf/mfu", "passes filled": "forward/fill"}, "share"),
    Chart("time", "Step time, seconds", {"step": "step_time_s", "training": "time/train_s"}),
    Chart("latency", "A completion's way, seconds", STAGES),
)
SOURCE_CHARTS = (
    ("source_reward", "Reward by source", "reward", ""),
    ("source_passes", "Pass rate by source", "pass_rate", "share"),
)
"""Key, title, metric and unit of the charts with a line for each source."""
MOST_SOURCES = 8
"""Most lines of a chart of sources."""
MOST_EVALUATIONS = 6
"""Most lines of the chart of evaluations."""


def chart_trees(
    steps: Mapping[int, StepPoint], evaluations: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """All charts that have points, as JSON: `[x, y]` pairs by line; evaluations come second."""
    columns = columns_of(_with_idle(steps[step]) for step in sorted(steps))
    for item in evaluations:
        columns.add(item)
    sets = list(dict.fromkeys(str(item.get("set", "")) for item in evaluations))[:MOST_EVALUATIONS]
    scores = {name[:60]: f"{EVALUATION_PREFIX}{name}/score" for name in sets}
    sources = sorted({name.split("/")[1] for name in columns.numbers if name.startswith("source/")})
    by_source = []
    for key, title, metric, unit in SOURCE_CHARTS:
        lines_of_sources = {name: f"source/{name}/{metric}" for name in sources[:MOST_SOURCES]}
        by_source.append(Chart(key, title, lines_of_sources, unit))
    evaluation = Chart("evaluation", "Evaluation", scores, x="version")
    trees = []
    for chart in (CHARTS[0], evaluation, *CHARTS[1:], *by_source):
        lines = [line_of(label, columns.series(name)) for label, name in chart.lines.items()]
        drawn = [line for line in lines if line["points"]]
        if drawn:
            trees.append({**chart._asdict(), "lines": drawn})
    return trees


def _with_idle(point: StepPoint) -> StepPoint:
    """The point with idle shares of workers, from the busy times that a step records."""
    metrics = point.metrics
    idle = {}
    for role in ("rollout", "reward"):
        capacity_s = metrics.get(f"stages/{role}_workers", 0.0) * metrics.get("step_time_s", 0.0)
        busy_s = metrics.get(f"stages/{role}_busy_s")
        if busy_s is not None and capacity_s > 0:
            idle[f"idle/{role}"] = max(0.0, 1.0 - busy_s / capacity_s)
    return replace(point, metrics={**metrics, **idle})

"""Which curves the overview draws, and their points, thinned to what a screen can show."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.console.web.group_index import StepRow

MAX_POINTS = 600


@dataclass(frozen=True, slots=True)
class Chart:
    """One small picture: a title, what it means, and its lines by label and metric."""

    key: str
    title: str
    lines: tuple[tuple[str, str], ...]
    unit: str = ""
    """"share" is drawn from 0 to 1, "s" are seconds."""


CHARTS = (
    Chart("reward", "Reward", (("mean", "reward"), ("std in groups", "reward_group_std"))),
    Chart("loss", "Loss", (("loss", "loss"),)),
    Chart(
        "kl",
        "KL and entropy",
        (("KL to reference", "kl"), ("KL of rollout", "rollout_kl"), ("entropy", "entropy")),
    ),
    Chart("grad", "Gradient norm", (("norm", "grad_norm"),)),
    Chart(
        "length",
        "Completion length, tokens",
        (
            ("mean", "completions/mean_length"),
            ("longest", "completions/max_length"),
        ),
    ),
    Chart("staleness", "Staleness, steps", (("mean", "staleness/mean"), ("most", "staleness/max"))),
    Chart(
        "idle",
        "Idle and waiting",
        (("trainer idle", "trainer_idle_share"), ("waiting", "time/wait_share")),
        "share",
    ),
    Chart(
        "failed",
        "Failed scores, dropped groups, cut completions",
        (
            ("failed scores", "scores/failed_ratio"),
            ("dropped groups", "groups_dropped_ratio"),
            ("cut", "completions/clipped_ratio"),
        ),
        "share",
    ),
    Chart("time", "Step time, seconds", (("step", "step_time_s"), ("training", "time/train_s"))),
)


def chart_trees(
    steps: Mapping[int, StepRow], evaluations: Sequence[Mapping[str, Any]], max_points: int = MAX_POINTS
) -> list[dict[str, Any]]:
    """All charts that have points, as JSON: `[x, y]` pairs by line; evaluations come second."""
    rows = _thinned([steps[step] for step in sorted(steps)], max_points)
    trees = [_tree(chart, rows) for chart in CHARTS]
    trees.insert(1, _evaluation_tree(evaluations, max_points))
    return [tree for tree in trees if any(line["points"] for line in tree["lines"])]


def _tree(chart: Chart, rows: Sequence[StepRow]) -> dict[str, Any]:
    lines = [{"label": label, "points": _points(rows, name)} for label, name in chart.lines]
    shown = [line for line in lines if line["points"]]
    return {"key": chart.key, "title": chart.title, "unit": chart.unit, "x": "step", "lines": shown}


def _points(rows: Iterable[StepRow], name: str) -> list[list[float]]:
    """Finite values only: JSON has no others, and no axis could show them."""
    found = [(row.step, row.metrics[name]) for row in rows if name in row.metrics]
    return [[step, _short(value)] for step, value in found if math.isfinite(value)]


def _evaluation_tree(evaluations: Sequence[Mapping[str, Any]], max_points: int) -> dict[str, Any]:
    lines: dict[str, list[list[float]]] = {}
    for found in evaluations:
        score = found.get("score")
        if isinstance(score, int | float) and math.isfinite(score):
            lines.setdefault(str(found.get("dataset", ""))[:60], []).append(
                [found.get("version", 0), _short(score)]
            )
    trees = [{"label": label, "points": _thinned(points, max_points)} for label, points in lines.items()]
    return {"key": "evaluation", "title": "Evaluation", "unit": "", "x": "version", "lines": trees[:6]}


def _thinned(items: Sequence[Any], most: int) -> list[Any]:
    """Every n-th item, the last one among them."""
    stride = max(1, -(-len(items) // most))
    return list(items[::-1][::stride])[::-1]


def _short(value: float) -> float:
    return float(f"{value:.6g}")

"""Which curves the overview draws, and their points, thinned to what a screen can show."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tidemill.services.console.status.snapshot import StepPoint

MAX_POINTS = 600


@dataclass(frozen=True, slots=True)
class Chart:
    """One small picture: a title, and its lines by label and metric."""

    key: str
    title: str
    lines: Mapping[str, str]
    unit: str = ""
    """"share" is drawn from 0 to 1."""


KL = {"KL to reference": "kl", "KL of rollout": "rollout_kl", "entropy": "entropy"}
LENGTH = {"mean": "completions/mean_length", "longest": "completions/max_length"}
IDLE = {"trainer": "trainer_idle_share", "rollout": "idle/rollout", "reward": "idle/reward"}
LOST = {"failed scores": "scores/failed_ratio", "dropped groups": "groups_dropped_ratio"}
SESSION = {"engine": "sessions/engine_s", "environment": "sessions/environment_s"}
STAGES = {"generation": "generation_s", "wait for reward": "reward_queue_s", "score": "score_s"}
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
    Chart("time", "Step time, seconds", {"step": "step_time_s", "training": "time/train_s"}),
    Chart("latency", "A completion's way, seconds", {k: f"stages/{v}" for k, v in STAGES.items()}),
)
IDLE_PREFIX = "idle/"
"""Of the roles whose commits tell how busy their workers were, not how idle."""

SOURCE_PREFIX = "source/"
SOURCE_CHARTS = (
    ("source_reward", "Reward by source", "reward", ""),
    ("source_passes", "Pass rate by source", "pass_rate", "share"),
)
"""Key, title, metric and unit of the charts with a line for each source."""
MOST_SOURCES = 8
"""Lines of these charts."""


def chart_trees(
    steps: Mapping[int, StepPoint], evaluations: Sequence[Mapping[str, Any]], max_points: int = MAX_POINTS
) -> list[dict[str, Any]]:
    """All charts that have points, as JSON: `[x, y]` pairs by line; evaluations come second."""
    rows = _thinned([steps[step] for step in sorted(steps)], max_points)
    trees = [_tree(chart, rows) for chart in (*CHARTS, *_source_charts(rows))]
    trees.insert(1, _evaluation_tree(evaluations, max_points))
    return [tree for tree in trees if any(line["points"] for line in tree["lines"])]


def _source_charts(rows: Iterable[StepPoint]) -> list[Chart]:
    """A line for each source of the run; nothing where it has none."""
    names = {name.split("/")[1] for row in rows for name in row.metrics if name.startswith(SOURCE_PREFIX)}
    shown = sorted(names)[:MOST_SOURCES]
    return [
        Chart(key, title, {name: f"{SOURCE_PREFIX}{name}/{metric}" for name in shown}, unit)
        for key, title, metric, unit in SOURCE_CHARTS
    ]


def _tree(chart: Chart, rows: Sequence[StepPoint]) -> dict[str, Any]:
    lines = [{"label": label, "points": _points(rows, name)} for label, name in chart.lines.items()]
    shown = [line for line in lines if line["points"]]
    return {"key": chart.key, "title": chart.title, "unit": chart.unit, "x": "step", "lines": shown}


def _points(rows: Iterable[StepPoint], name: str) -> list[list[float]]:
    """Finite values only: JSON has no others, and no axis could show them."""
    found = [(row.step, _value(row.metrics, name)) for row in rows]
    return [[step, _short(value)] for step, value in found if value is not None and math.isfinite(value)]


def _value(metrics: Mapping[str, float], name: str) -> float | None:
    if not name.startswith(IDLE_PREFIX):
        return metrics.get(name)
    role = name.removeprefix(IDLE_PREFIX)
    capacity_s = metrics.get(f"stages/{role}_workers", 0.0) * metrics.get("step_time_s", 0.0)
    busy_s = metrics.get(f"stages/{role}_busy_s")
    return max(0.0, 1.0 - busy_s / capacity_s) if busy_s is not None and capacity_s > 0 else None


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

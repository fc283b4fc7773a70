"""Which curves the overview draws, with their points."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tidemill.services.console.status.snapshot import StepPoint
from tidemill.services.console.web.curves import line_of
from tidemill.services.console.web.metric_files import EVALUATION_PREFIX, Columns, columns_of


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
SOURCE_PREFIX = "source/"
SOURCE_CHARTS = (
    ("source_reward", "Reward by source", "reward", ""),
    ("source_passes", "Pass rate by source", "pass_rate", "share"),
)
"""Key, title, metric and unit of the charts with a line for each source."""
MOST_SOURCES, MOST_EVALUATIONS = 8, 6
"""Lines of these charts, and of that of evaluations."""


def chart_trees(
    steps: Mapping[int, StepPoint], evaluations: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """All charts that have points, as JSON: `[x, y]` pairs by line; evaluations come second."""
    columns = columns_of(_with_idle(steps[step]) for step in sorted(steps))
    trees = [_tree(chart, columns, "step") for chart in (*CHARTS, *_source_charts(columns))]
    scores = Columns()
    for item in evaluations:
        scores.add(item)
    trees.insert(1, _tree(_evaluation_chart(evaluations), scores, "version"))
    return [tree for tree in trees if tree["lines"]]


def _with_idle(point: StepPoint) -> StepPoint:
    """The point, with shares of workers whose steps tell how busy they were, not how idle."""
    metrics, found = point.metrics, {}
    for role in ("rollout", "reward"):
        capacity_s = metrics.get(f"stages/{role}_workers", 0.0) * metrics.get("step_time_s", 0.0)
        busy_s = metrics.get(f"stages/{role}_busy_s")
        if busy_s is not None and capacity_s > 0:
            found[f"idle/{role}"] = max(0.0, 1.0 - busy_s / capacity_s)
    return replace(point, metrics={**metrics, **found})


def _source_charts(columns: Columns) -> Iterable[Chart]:
    """A line for each source of the run; nothing where it has none."""
    names = {name.split("/")[1] for name in columns.numbers if name.startswith(SOURCE_PREFIX)}
    shown = sorted(names)[:MOST_SOURCES]
    for key, title, metric, unit in SOURCE_CHARTS:
        yield Chart(key, title, {name: f"{SOURCE_PREFIX}{name}/{metric}" for name in shown}, unit)


def _evaluation_chart(evaluations: Sequence[Mapping[str, Any]]) -> Chart:
    names = list(dict.fromkeys(str(item.get("set", "")) for item in evaluations))[:MOST_EVALUATIONS]
    return Chart(
        "evaluation", "Evaluation", {name[:60]: f"{EVALUATION_PREFIX}{name}/score" for name in names}
    )


def _tree(chart: Chart, columns: Columns, x: str) -> dict[str, Any]:
    lines = [line_of(label, columns.series(name), 0.0) for label, name in chart.lines.items()]
    shown = [line for line in lines if line["points"]]
    return {"key": chart.key, "title": chart.title, "unit": chart.unit, "x": x, "lines": shown}

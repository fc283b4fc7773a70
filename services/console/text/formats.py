"""Numbers as people read them."""

from collections.abc import Mapping, Sequence

from services.console.status.snapshot import RunSnapshot

NOTHING = "–"


def size(num_bytes: float) -> str:
    """Bytes: 512 B, 9.5 kB, 1.2 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"


def short(value: float | None) -> str:
    """Three digits, or all before the point."""
    if value is None:
        return NOTHING
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


BARS = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 22
"""With it the dashboard fits a terminal of 80 columns."""


def step_line(snapshot: RunSnapshot, index: int = -1) -> str:
    """One committed step as one line of plain text."""
    point = snapshot.points[index]
    metrics = point.metrics
    parts = [f"step {point.step + 1}/{snapshot.steps}"]
    for label, name, form in (
        ("reward", "reward", ".3f"),
        ("staleness max", "staleness/max", ".0f"),
        ("mean", "staleness/mean", ".2f"),
    ):
        if name in metrics:
            parts.append(f"{label} {metrics[name]:{form}}")
    seconds = metrics.get("step_time_s")
    if seconds:
        parts.append(f"{metrics.get('completion_tokens', 0.0) / seconds:,.0f} tok/s")
        parts.append(f"{seconds:.1f} s")
    if failed := metrics.get("scores/failed_ratio"):
        parts.append(f"{failed:.0%} of the scores failed")
    if replaced := metrics.get("groups_dropped"):
        parts.append(f"{replaced:.0f} groups replaced")
    return "  ".join(parts)


def evaluation_line(evaluation: Mapping[str, object]) -> str:
    """One evaluation as one line of plain text."""
    shown = score_text(evaluation)
    return f"evaluation of version {evaluation.get('version')} on {evaluation.get('dataset')}: {shown}"


def warning_line(warning: Mapping[str, object]) -> str:
    """One warning of the trainer's diagnostics as one line of plain text; or that it is over."""
    until, metric = warning.get("until_step"), warning.get("metric")
    if isinstance(until, int):
        return f"healthy again since step {until + 1}: {metric}"
    since = warning.get("since_step")
    begun = f" (since step {since + 1})" if isinstance(since, int) else ""
    return f"{warning.get('text')}{begun}. {warning.get('advice')}"


def score_text(evaluation: Mapping[str, object]) -> str:
    """The score of an evaluation, and how many samples have none: a failure is never a zero."""
    score, num_failed = evaluation.get("score"), evaluation.get("num_failed")
    failed = f"{num_failed:,.0f}" if isinstance(num_failed, int | float) and num_failed else ""
    if not isinstance(score, int | float) or score != score:
        return f"all failed ({failed} samples)" if failed else "all failed"
    return f"{score:.3f}" + (f" ({failed} failed)" if failed else "")


def sparkline(values: Sequence[float], width: int = SPARK_WIDTH) -> str:
    """The course of `values` in `width` characters: each the mean of its part, from lowest to highest."""
    finite = [value for value in values if value == value]
    if not finite:
        return ""
    width = min(width, len(finite))
    means = []
    for column in range(width):
        part = finite[column * len(finite) // width : (column + 1) * len(finite) // width]
        means.append(sum(part) / len(part))
    low, span = min(means), max(means) - min(means)
    return "".join(BARS[int((mean - low) / span * (len(BARS) - 1) + 0.5) if span else 0] for mean in means)


def duration(seconds: float) -> str:
    """Seconds as people say them: 42 s, 3 min 05 s, 2 h 07 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"

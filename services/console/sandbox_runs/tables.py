"""The tables that `tidemill rescore` and `tidemill replay trajectories` end with."""

from typing import Any

from rich.table import Table
from rich.text import Text

MAX_TICKETS = 12


def rescore_tables(report: dict[str, Any]) -> list[Table]:
    """Agreement, cost, failures, and the trajectories to look at."""
    tables = [_agreement(report), _cost(report["cost"])]
    agreement = report["agreement"]
    if agreement["failures_now"]:
        tables.append(_failures(agreement["failures_now"]))
    if agreement["farthest"]:
        tables.append(_farthest(agreement["farthest"]))
    return tables


def replay_table(summary: dict[str, Any]) -> Table:
    """What a replayed stretch of traffic did to the reward service."""
    table = _two_columns(f"trajectories of {summary['run']} into {summary['sandbox']}")
    rows = {
        "emitted": f"{summary['emitted']:,} in {summary['seconds']:.1f} s",
        "scored": f"{summary['scored']:,} ({summary['scores_per_s']:,.0f}/s)",
        "failed": f"{summary['failed']:,}",
        "from emission to score": _quantiles(summary["wait_s"]),
        "the reward's own time": _quantiles(summary["latency_s"]),
        "most that waited at once": f"{summary['max_backlog']:,}",
        "behind its pace at the end": f"{summary['behind_s']:.1f} s",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _agreement(report: dict[str, Any]) -> Table:
    found = report["agreement"]
    table = _two_columns(f"{report['run']} scored again by {', '.join(report['reward'])}")
    flipped = found["groups_with_another_best"]
    named = ", ".join(map(str, flipped[:MAX_TICKETS])) + (", ..." if len(flipped) > MAX_TICKETS else "")
    rows = {
        "compared": f"{found['compared']:,} trajectories in {found['groups']:,} groups",
        "failed": f"{found['failed_before']:,} before, {found['failed_now']:,} now",
        "mean": f"{found['mean_before']:.4f} before, {found['mean_now']:.4f} now",
        "same score": f"{found['equal_share']:.1%}",
        "correlation (Pearson)": _number(found["pearson"]),
        "rank correlation (Spearman)": _number(found["spearman"]),
        "rank correlation within groups": _number(found["spearman_within_groups"]),
        "advantages that change sign": f"{found['sign_flips']:,}",
        "groups with another best": f"{len(flipped):,}" + (f": tickets {named}" if flipped else ""),
        "groups without variance": f"{found['groups_without_variance_before']:,} before, "
        f"{found['groups_without_variance_now']:,} now",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _cost(cost: dict[str, Any]) -> Table:
    table = _two_columns("cost")
    table.add_row("scores", f"{cost['trajectories']:,} in {cost['scoring_s']:.1f} s")
    table.add_row(
        "speed", f"{cost['scores_per_s']:,.0f}/s ({cost['wall_s']:.1f} s with starting and stopping)"
    )
    table.add_row("attempts", f"{cost['attempts']:,}")
    table.add_row("time of one", f"median {cost['latency_p50_s']:.3g} s, 95% {cost['latency_p95_s']:.3g} s")
    for reward, tokens in cost["tokens"].items():
        table.add_row(f"tokens of {reward}", f"{tokens:,}")
    return table


def _failures(failures: dict[str, int]) -> Table:
    table = Table(title="failures now", title_justify="left")
    table.add_column("times", justify="right")
    table.add_column("error")
    for error, count in failures.items():
        table.add_row(f"{count:,}", Text(error))
    return table


def _farthest(rows: list[list[float]]) -> Table:
    table = Table(title="farthest in rank; see `tidemill trace`", title_justify="left")
    for name in ("trajectory", "score before", "score now"):
        table.add_column(name, justify="right")
    for ticket, index, before, now in rows:
        table.add_row(f"{ticket}.{index}", f"{before:.4g}", f"{now:.4g}")
    return table


def _two_columns(title: str) -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(style="dim")
    table.add_column()
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _quantiles(found: dict[str, float]) -> str:
    return f"median {found['p50']:.2g} s, 95% {found['p95']:.2g} s, 99% {found['p99']:.2g} s"

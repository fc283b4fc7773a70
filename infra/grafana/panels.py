"""What a dashboard is made of, as plain data: boards have rows, rows have panels, panels have queries.

Expressions are PromQL with two shorthands: `$run` stands for the label of the chosen run, `$i` for a window
that fits the time range and the scrape interval.
"""

from dataclasses import dataclass
from typing import Literal

RUN = 'run_id="$run_id"'
INTERVAL = "$__rate_interval"

Kind = Literal["lines", "stacked", "stat", "table"]


@dataclass(frozen=True, slots=True)
class Query:
    """One expression, and the name of each of its series in the legend."""

    shorthand: str
    legend: str

    @property
    def expr(self) -> str:
        """PromQL as Grafana sends it, but for its variables."""
        return (
            self.shorthand.replace("$run}", RUN + "}")
            .replace("$run,", RUN + ",")
            .replace("$i]", INTERVAL + "]")
        )


@dataclass(frozen=True, slots=True)
class Panel:
    """One question and its answer. Read aloud, `tells` and `act` are the line below the title."""

    title: str
    unit: str
    """A unit of Grafana: s, percentunit, short, bytes, ..."""
    tells: str
    """What the panel shows, in plain words."""
    act: str
    """What to do about it."""
    runbook: str
    """Heading in docs/troubleshooting.md of the paragraph that says more."""
    queries: tuple[Query, ...]
    kind: Kind = "lines"
    span: int = 8
    """Columns out of 24."""
    thresholds: tuple[float, ...] = ()
    """Yellow from the first one on, red from the second."""
    max: float | None = None

    @property
    def description(self) -> str:
        """The line of the panel."""
        return f"{self.tells} {self.act}"


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under one heading."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Board:
    """One dashboard: `name` is its file, `question` is what it answers."""

    name: str
    title: str
    question: str
    rows: tuple[Row, ...]

    @property
    def uid(self) -> str:
        """Its address in Grafana: /d/<uid>."""
        return f"tidemill-{self.name.replace('_', '-')}"

    @property
    def panels(self) -> tuple[Panel, ...]:
        """All panels, from top to bottom."""
        return tuple(panel for row in self.rows for panel in row.panels)


def per_s(metric: str, by: str = "", where: str = "") -> str:
    """Increase of a counter a second, by labels."""
    return f"sum by ({by}) (rate({metric}{{$run{_also(where)}}}[$i]))"


def increase(metric: str, by: str = "", where: str = "") -> str:
    """Increase of a counter within the window, by labels."""
    return f"sum by ({by}) (increase({metric}{{$run{_also(where)}}}[$i]))"


def total(metric: str, by: str = "", where: str = "") -> str:
    """Sum of a gauge, by labels."""
    return f"sum by ({by}) ({metric}{{$run{_also(where)}}})"


def quantile(share: float, histogram: str, by: str = "", where: str = "") -> str:
    """A quantile of a histogram, by labels."""
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({share}, {per_s(f'{histogram}_bucket', labels, where)})"


def mean(histogram: str, by: str = "", where: str = "") -> str:
    """The mean of what a histogram saw, by labels."""
    on = f"on ({by}) " if by else ""
    return f"{per_s(f'{histogram}_sum', by, where)} / {on}({per_s(f'{histogram}_count', by, where)} > 0)"


def spread(histogram: str, by: str = "", where: str = "") -> tuple[Query, Query]:
    """Median and 95th percentile of a histogram, by labels."""
    name = " ".join(f"{{{{{label.strip()}}}}}" for label in by.split(",")) if by else ""
    return (
        Query(quantile(0.5, histogram, by, where), f"{name} median".strip()),
        Query(quantile(0.95, histogram, by, where), f"{name} 95 %".strip()),
    )


def _also(where: str) -> str:
    return f", {where}" if where else ""

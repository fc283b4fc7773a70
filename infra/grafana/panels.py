"""What a dashboard is made of, read from boards.yml: boards have rows of panels, panels have queries."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

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
        """PromQL with Grafana's variables."""
        return (
            self.shorthand.replace("$run}", RUN + "}")
            .replace("$run,", RUN + ",")
            .replace("$i]", INTERVAL + "]")
        )


@dataclass(frozen=True, slots=True)
class Panel:
    """One question and its answer."""

    title: str
    tells: str
    act: str
    runbook: str
    queries: tuple[Query, ...]
    unit: str
    """A unit of Grafana: s, percentunit, short, bytes, ..."""
    kind: Kind = "lines"
    span: int = 8
    """Columns out of 24."""
    thresholds: tuple[float, ...] = ()
    """Yellow from the first one on, red from the second."""
    max: float | None = None

    @property
    def description(self) -> str:
        return f"{self.tells} {self.act}"


@dataclass(frozen=True, slots=True)
class Board:
    """One dashboard: `name` is its file, `question` is what it answers, `rows` are panels by heading."""

    name: str
    title: str
    question: str
    rows: dict[str, list[Panel]]

    @property
    def uid(self) -> str:
        """Its address in Grafana: /d/<uid>."""
        return f"tidemill-{self.name}"

    @property
    def panels(self) -> list[Panel]:
        """All panels, from top to bottom."""
        return [panel for row in self.rows.values() for panel in row]


def _panel(board: dict[str, Any], tree: dict[str, Any]) -> Panel:
    queries = tuple(Query(shorthand, legend) for legend, shorthand in tree.pop("queries").items())
    return Panel(**{"runbook": board["question"], **tree.pop("look"), **tree}, queries=queries)


def _read(path: Path) -> tuple[Board, ...]:
    boards = yaml.safe_load(path.read_text(encoding="utf-8"))
    for board in boards.values():
        rows = {}
        for title, panels in board["rows"].items():
            rows[title] = [_panel(board, tree) for tree in panels]
        board["rows"] = rows
    return tuple(Board(name, **board) for name, board in boards.items())


BOARDS = _read(Path(__file__).with_name("boards.yml"))

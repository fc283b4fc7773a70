"""Draws the pictures of README.md from a run: `python -m infra.docs.pictures RUN_DIR [--prometheus URL]`.

`learning-curve.png` is the run's own picture; README has that of `make demo-instruct`. `dashboard.png` has
panels of the board "Run", as infra/grafana defines them, with what a Prometheus that has scraped the run (of
`make demo`) answers to their expressions: title, legend and expression are the board's, only the drawing is
not Grafana's.
"""

import argparse
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from infra.docs.pages import REPO
from tidemill.services.console.status.plots import plot_learning_curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FOLDER = REPO / "docs" / "images"
BOARD = REPO / "infra" / "grafana" / "dashboards" / "run.json"
PANELS = (
    "Reward",
    "Evaluation",
    "Groups that teach nothing",
    "Completion length",
    "Entropy",
    "Logprob gap",
    "Clipped tokens",
    "Gradient norm",
    "Importance weights",
)
"""Nine panels of the board, row by row."""
POINTS = 120
"""Points of a curve."""


def plain(axes: "Axes", title: str) -> None:
    """A title, a light grid, no frame."""
    axes.set_title(title, loc="left", fontsize=9, fontweight="bold")
    axes.grid(alpha=0.3, linewidth=0.6)
    axes.tick_params(labelsize=7, length=0)
    for side in axes.spines.values():
        side.set_visible(False)


def series(url: str, expression: str, start_s: float, end_s: float) -> list[dict[str, Any]]:
    """What Prometheus has for an expression, from start to end."""
    step_s = max((end_s - start_s) / POINTS, 1)
    asked: dict[str, str | float] = {"query": expression, "start": start_s, "end": end_s, "step": step_s}
    answer = httpx.get(f"{url}/api/v1/query_range", params=asked)
    answer.raise_for_status()
    found: list[dict[str, Any]] = answer.json()["data"]["result"]
    return found


def legend(pattern: str, labels: Mapping[str, str]) -> str:
    """`{{dataset}} score` with the labels of a series, as Grafana fills it in."""
    return re.sub(r"\{\{(\w+)\}\}", lambda name: labels.get(name[1], ""), pattern)


def dashboard(url: str, run_id: str, span_s: tuple[float, float], path: Path) -> None:
    """The panels of `PANELS`, three in a row, over the time of the run.

    Raises:
        ValueError: a panel has no data: the run was not scraped, or the board has no panel of that name.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    board = {panel["title"]: panel for panel in json.loads(BOARD.read_text(encoding="utf-8"))["panels"]}
    drawing = Figure((11, 7), layout="constrained", facecolor="white")
    for place, title in enumerate(PANELS, start=1):
        axes = drawing.add_subplot(3, 3, place)
        for target in board[title]["targets"]:
            expression = target["expr"].replace("$run_id", run_id)
            for one in series(url, expression, *span_s):
                minutes = [(float(at) - span_s[0]) / 60 for at, _ in one["values"]]
                values = [float(value) for _, value in one["values"]]
                axes.plot(minutes, values, linewidth=1.2, label=legend(target["legendFormat"], one["metric"]))
        if not axes.lines:
            raise ValueError(
                f"panel {title!r} has no data of run {run_id!r} at {url}; did it scrape the run?"
            )
        plain(axes, title)
        axes.legend(fontsize=6, frameon=False, loc="best")
    drawing.supxlabel("minutes", fontsize=8)
    FigureCanvasAgg(drawing)
    drawing.savefig(path, dpi=100)


def main() -> None:
    """Draw what there is data for."""
    parser = argparse.ArgumentParser(description="The pictures of README.md, from a run.")
    parser.add_argument("run_dir", type=Path, help="folder of a finished run")
    parser.add_argument("--prometheus", metavar="URL", help="has scraped the run: draw the dashboard, too")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the pictures")
    options = parser.parse_args()
    lines = (options.run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    options.out.mkdir(parents=True, exist_ok=True)
    plot_learning_curve(records, options.out / "learning-curve.png")
    if options.prometheus:
        times = [record["time"] for record in records]
        run_id = options.run_dir.resolve().name
        dashboard(options.prometheus, run_id, (min(times), max(times)), options.out / "dashboard.png")


if __name__ == "__main__":
    main()

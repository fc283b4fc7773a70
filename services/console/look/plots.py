"""Pictures: of a run, reward over steps and what the evaluations say; of several runs, their evaluations.

That of a run reads records of `metrics.jsonl` (see `common/run/state.py`) and nothing else, so it can be
drawn again at any time, during a run and after it.
"""

import io
from collections.abc import Iterable, Mapping
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidemill.common.files import write_atomically
from tidemill.services.console.look.series import Columns, Numbers, smooth

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TRAIN_COLOUR = "#2f6f8f"
EVAL_COLOURS = ("#c4512d", "#5b7f2b", "#7a4fa3", "#a67c00")
RUN_COLOURS = ("#c4512d", "#a67c00", TRAIN_COLOUR, "#5b7f2b")
INK = "#22292f"
SMOOTHING = 0.9


def plot_learning_curve(metrics: Iterable[Mapping[str, Any]], path: Path) -> bool:
    """Draw mean reward per step, smoothed reward, and evaluations, into a PNG at `path`.

    Step s is drawn at s and an evaluation of version v at v: version v is what step v starts from. Records
    without a finite reward are left out. Returns False, and draws nothing, where none is left.

    Raises:
        StorageError: the picture cannot be written.
    """
    columns = Columns.of(metrics)
    train = columns.series("reward")
    scores = columns.scores()
    if not len(train.x) and not scores:
        return False

    figure = _make_figure()
    from matplotlib.patheffects import withStroke

    halo = [withStroke(linewidth=3, foreground="white")]  # numbers stay legible on top of curves
    axes = figure.add_subplot()
    _draw_train(axes, train.x, train.y)
    for index, (dataset, (versions, rewards, _)) in enumerate(scores.items()):
        colour = EVAL_COLOURS[index % len(EVAL_COLOURS)]
        axes.plot(
            versions, rewards, "o--", color=colour, lw=1.2, ms=6, mec="white", label=f"evaluation: {dataset}"
        )
        # The first and the last number are what people compare.
        for at in {0, len(versions) - 1}:
            axes.annotate(
                f"{rewards[at]:.3g}", (versions[at], rewards[at]), (0, 8), textcoords="offset points",
                ha="center", color=colour, fontsize=9, fontweight="bold", path_effects=halo, zorder=5,
            )  # fmt: skip
    _style(axes, "mean reward per completion")
    _write(figure, path)
    return True


def plot_evaluations(curves: Mapping[str, Mapping[int, float]], path: Path) -> None:
    """Draw the evaluations of several runs, score by version under each run's label, into a PNG at `path`.

    Raises:
        StorageError: the picture cannot be written.
    """
    figure = _make_figure()
    axes = figure.add_subplot()
    for (label, scores), colour in zip(curves.items(), cycle(RUN_COLOURS), strict=False):
        values = list(scores.values())
        ends = f"{label}: {values[0]:.3f} to {values[-1]:.3f}"
        axes.plot(list(scores), values, "o-", color=colour, lw=1.6, ms=6, mec="white", label=ends)
    _style(axes, "held-out accuracy")
    _write(figure, path)


def _make_figure() -> "Figure":
    # Late, for the import takes longer than most commands; and without pyplot, which keeps every figure.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=150, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _write(figure: "Figure", path: Path) -> None:
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    write_atomically(path, picture.getvalue())


def _draw_train(axes: "Axes", steps: Numbers, rewards: Numbers) -> None:
    if not len(steps):
        return
    is_long = len(steps) >= 5
    style = {"lw": 0.8, "alpha": 0.4} if is_long else {"lw": 1.6, "marker": "o"}
    axes.plot(steps, rewards, color=TRAIN_COLOUR, label="training, per step", **style)
    if is_long:
        axes.plot(
            steps, smooth(rewards, SMOOTHING), color=TRAIN_COLOUR, lw=2.2, label="training, moving average"
        )


def _style(axes: "Axes", quantity: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("optimizer step", color=INK)
    axes.set_ylabel(quantity, color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0.03, y=0.12)
    axes.grid(axis="y", color="#dfe3e6", lw=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, length=3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#8a949c")
    axes.legend(frameon=False, loc="best", fontsize=9, labelcolor=INK)

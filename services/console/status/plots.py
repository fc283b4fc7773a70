"""The picture of a run: reward over steps, and what the evaluations say.

Reads records of `metrics.jsonl` (see `common/run/state.py`) and nothing else, so it can be drawn again at any
time, during a run and after it.
"""

import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tidemill.common.files import write_atomically
from tidemill.common.run.state import EVALUATION, STEP

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Floats = NDArray[np.float64]

TRAIN_COLOUR = "#2f6f8f"
EVAL_COLOURS = ("#c4512d", "#5b7f2b", "#7a4fa3", "#a67c00")
INK = "#22292f"


def plot_learning_curve(metrics: Iterable[Mapping[str, Any]], path: Path) -> bool:
    """Draw mean reward per step, smoothed reward, and evaluations, into a PNG at `path`.

    Step s is drawn at s and an evaluation of version v at v: version v is what step v starts from. Records
    without a finite reward are left out. Returns False, and draws nothing, where none is left.

    Raises:
        StorageError: the picture cannot be written.
    """
    records = list(metrics)
    train = _series(records, STEP, "step")
    evaluations = {}
    for name in dict.fromkeys(str(r.get("set")) for r in records if r.get("kind") == EVALUATION):
        series = _series([r for r in records if str(r.get("set")) == name], EVALUATION, "version")
        if len(series[0]):
            evaluations[name] = series
    if not len(train[0]) and not evaluations:
        return False

    # Late, for the import takes longer than most commands; and without pyplot, which keeps every figure.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patheffects import withStroke

    halo = [withStroke(linewidth=3, foreground="white")]  # numbers stay legible on top of curves
    figure = Figure(figsize=(8, 4.5), dpi=150, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _draw_train(axes, *train)
    for index, (name, (versions, rewards)) in enumerate(evaluations.items()):
        colour = EVAL_COLOURS[index % len(EVAL_COLOURS)]
        axes.plot(
            versions, rewards, "o--", color=colour, lw=1.2, ms=6, mec="white", label=f"evaluation: {name}"
        )
        # The first and the last number are what people compare.
        for at in {0, len(versions) - 1}:
            axes.annotate(
                f"{rewards[at]:.3g}", (versions[at], rewards[at]), (0, 8), textcoords="offset points",
                ha="center", color=colour, fontsize=9, fontweight="bold", path_effects=halo, zorder=5,
            )  # fmt: skip
    _style(axes)
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    write_atomically(path, picture.getvalue())
    return True


def smooth(values: Floats) -> Floats:
    """Centred moving average over a tenth of the run, at least 3 values; the window shrinks at the ends."""
    half = max(1, len(values) // 20)
    sums = np.concatenate(([0.0], np.cumsum(values)))
    at = np.arange(len(values))
    first, last = np.maximum(at - half, 0), np.minimum(at + half + 1, len(values))
    means: Floats = (sums[last] - sums[first]) / (last - first)
    return means


def _series(records: Iterable[Mapping[str, Any]], kind: str, axis: str) -> tuple[Floats, Floats]:
    """Positions and rewards (scores, for evaluations) of the records of one kind, in order of position."""
    value = "reward" if kind == STEP else "score"
    pairs = sorted(
        (float(record[axis]), float(record[value]))
        for record in records
        if record.get("kind") == kind and isinstance(record.get(value), int | float)
    )
    finite = [pair for pair in pairs if np.isfinite(pair[1])]
    points = np.asarray(finite, dtype=np.float64).reshape(-1, 2)
    return points[:, 0], points[:, 1]


def _draw_train(axes: "Axes", steps: Floats, rewards: Floats) -> None:
    if not len(steps):
        return
    is_long = len(steps) >= 5
    style = {"lw": 0.8, "alpha": 0.4} if is_long else {"lw": 1.6, "marker": "o"}
    axes.plot(steps, rewards, color=TRAIN_COLOUR, label="training, per step", **style)
    if is_long:
        axes.plot(steps, smooth(rewards), color=TRAIN_COLOUR, lw=2.2, label="training, moving average")


def _style(axes: "Axes") -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("optimizer step", color=INK)
    axes.set_ylabel("mean reward per completion", color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0.03, y=0.12)
    axes.grid(axis="y", color="#dfe3e6", lw=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, length=3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#8a949c")
    axes.legend(frameon=False, loc="best", fontsize=9, labelcolor=INK)

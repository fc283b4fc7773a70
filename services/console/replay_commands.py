"""The command line of `tidemill replay`. Wiring only."""

from pathlib import Path
from typing import Annotated

import typer

from services.console.sandbox_commands import trajectories
from services.console.shared_options import Json, RunId, RunsDir

app = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown")
app.command(epilog="Example: tidemill replay trajectories arith-1 --from 10 --to 20 --speed 10x")(
    trajectories
)


@app.command(epilog="Example: tidemill replay step 412 --set trainer.optimizer.lr=1e-4")
def step(
    steps: Annotated[
        str,
        typer.Argument(metavar="STEPS", help="A step, or several: 3,17 or 10..14.", show_default=False),
    ],
    run_id: RunId = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="FIELD=VALUE",
            help="Also compute each step with this changed: any trainer field that does not change what was "
            "collected. May be repeated.",
            show_default=False,
        ),
    ] = None,
    to_torch: Annotated[
        Path | None,
        typer.Option(
            "--to-torch", metavar="FILE", help="Write the batch of the step as tensors.", show_default=False
        ),
    ] = None,
    with_weights: Annotated[
        bool, typer.Option("--with-weights", help="With --to-torch: also the weights before the step.")
    ] = False,
    shows_all: Annotated[
        bool, typer.Option("--all", help="Show every metric, also those that agree.")
    ] = False,
    as_json: Json = False,
    runs_dir: RunsDir = None,
) -> None:
    """Train a committed step again, and compare it bit by bit with what was recorded.

    Restores the newest checkpoint before the step, replays the commits after it, and computes the step from
    the run's own records in the recorded micro-batches. Changes nothing of the run.

    Exits with 0 when loss, gradient norm, every other metric and the digest come out the same, else with 1.
    """
    from services.console.replay import ReplayOptions, replay_steps

    options = ReplayOptions(run_id, runs_dir, steps, tuple(overrides or ()), to_torch, with_weights)
    raise typer.Exit(replay_steps(options, shows_all, as_json))


def diff(
    run_a: Annotated[str, typer.Argument(help="A run, by id or folder.", show_default=False)],
    run_b: Annotated[str, typer.Argument(help="The run to compare it with.", show_default=False)],
    tolerance: Annotated[
        float,
        typer.Option("--tolerance", min=0.0, max=1.0, help="Numbers this close count as rounding; 0: none."),
    ] = 1e-3,
    as_json: Json = False,
    runs_dir: RunsDir = None,
    runs_dir_b: Annotated[
        Path | None,
        typer.Option(
            "--runs-dir-b", metavar="FOLDER", help="Folder of RUN_B, if another one.", show_default=False
        ),
    ] = None,
) -> None:
    """Find the first step at which two runs differ, and why: data, versions, tokens, rewards, numerics.

    Compares step by step what both were trained on and what came out, and stops at the first step that
    differs by more than rounding. Exits with 0 when there is none, and 1 when there is.
    """
    from services.console.diff import show_diff

    raise typer.Exit(show_diff(run_a, run_b, runs_dir, runs_dir_b, tolerance, as_json))

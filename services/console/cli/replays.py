"""The command line of `tidemill replay`. Wiring only."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from services.console.cli.options import Json, RunId, RunsDir

Into = Annotated[
    str | None,
    typer.Option(
        "--into",
        metavar="SANDBOX",
        help="Name of the sandbox run, a new one. Without it: made from the run's name.",
        show_default=False,
    ),
]
Reward = Annotated[
    str | None,
    typer.Option(
        "--reward",
        metavar="FILE.py:FUNCTION",
        help="The reward function, or a built-in one. Without it: the run's own rewards.",
        show_default=False,
    ),
]
RewardSource = Annotated[
    Path | None,
    typer.Option(
        "--config", metavar="FILE", help="Take the whole reward section of this config.", show_default=False
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help="Override one field, such as reward.timeout_s=5."),
]
Workers = Annotated[
    int | None,
    typer.Option("--workers", min=0, help="Reward workers to start. Without it: as the run's config says."),
]
LaneOption = Annotated[Literal["train", "eval"], typer.Option("--lane", help="Training or evaluation.")]
RedisUrl = Annotated[
    str | None,
    typer.Option(
        "--redis",
        metavar="URL",
        help="Server for the sandbox, for workers on other machines. Without it: a private one.",
        show_default=False,
    ),
]


def rescore(
    run_id: RunId = None,
    reward: Reward = None,
    config: RewardSource = None,
    first: Annotated[
        str | None, typer.Option("--from-step", metavar="A", help="First step.", show_default=False)
    ] = None,
    last: Annotated[
        str | None, typer.Option("--to-step", metavar="B", help="Last step.", show_default=False)
    ] = None,
    into: Into = None,
    overrides: Overrides = None,
    workers: Workers = None,
    lane: LaneOption = "train",
    redis: RedisUrl = None,
    as_json: Json = False,
    runs_dir: RunsDir = None,
) -> None:
    """Score a run's history with another reward, and say how the two agree.

    Nothing is generated again and nothing of the run changes: real reward workers score its trajectories into
    a scores stream of their own, in a sandbox run. The report has agreement, rank correlation, the groups
    that would have had another best completion, and what it cost.
    """
    from common.wire.messages import Lane
    from services.console.rescore.commands import rescore as rescore_run
    from services.console.rescore.options import SandboxOptions

    given = (into, reward, config, tuple(overrides or ()), workers, Lane(lane), redis, runs_dir)
    rescore_run(SandboxOptions(run_id, first, last, *given), as_json)


def trajectories(
    run_id: RunId = None,
    first: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="A", help="First step, or a time (2026-01-31T10:00).", show_default=False
        ),
    ] = None,
    last: Annotated[
        str | None, typer.Option("--to", metavar="B", help="Last step, or a time.", show_default=False)
    ] = None,
    speed: Annotated[
        str,
        typer.Option("--speed", metavar="TIMES|max", help="1x keeps the old pace; max follows the scores."),
    ] = "1x",
    into: Into = None,
    reward: Reward = None,
    config: RewardSource = None,
    overrides: Overrides = None,
    workers: Workers = None,
    max_backlog: Annotated[
        int, typer.Option("--max-backlog", min=1, max=1_000_000, help="Most that wait for a score at once.")
    ] = 4096,
    lane: LaneOption = "train",
    redis: RedisUrl = None,
    as_json: Json = False,
    runs_dir: RunsDir = None,
) -> None:
    """Feed recorded trajectories to a reward service again: for load tests, and to develop a reward.

    They enter a sandbox run at the pace at which they were recorded, or faster, and real reward workers score
    them; with --workers 0 the workers are yours to start. The run they come from is only read.
    """
    from common.wire.messages import Lane
    from services.console.rescore.commands import replay_trajectories
    from services.console.rescore.options import SandboxOptions

    given = (into, reward, config, tuple(overrides or ()), workers, Lane(lane), redis, runs_dir)
    replay_trajectories(SandboxOptions(run_id, first, last, *given), speed, max_backlog, as_json)


app = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown")
app.command(epilog="Example: tidemill replay trajectories arith-1 --from 10 --to 20 --speed 10x")(
    trajectories
)


@app.command(epilog="Example: tidemill replay step 412 --set trainer.optimizer.lr=1e-4")
def step(
    steps: Annotated[
        str, typer.Argument(metavar="STEPS", help="A step, or several: 3,17 or 10..14.", show_default=False)
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
    from services.console.compare.replay import ReplayOptions, replay_steps

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
    from services.console.compare.commands import show_diff

    raise typer.Exit(show_diff(run_a, run_b, runs_dir, runs_dir_b, tolerance, as_json))

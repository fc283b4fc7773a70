"""`tidemill rescore` and `tidemill replay trajectories`. Wiring only."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from services.console.shared_options import Json, RunId, RunsDir

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
    from common.messages import Lane
    from services.console.sandbox_runs.options import SandboxOptions
    from services.console.sandbox_runs.rescore import rescore as rescore_run

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
    from common.messages import Lane
    from services.console.sandbox_runs.options import SandboxOptions
    from services.console.sandbox_runs.replay_trajectories import replay_trajectories

    given = (into, reward, config, tuple(overrides or ()), workers, Lane(lane), redis, runs_dir)
    replay_trajectories(SandboxOptions(run_id, first, last, *given), speed, max_backlog, as_json)

"""The commands that do again what was recorded, or compare it: `tidemill replay`, `rescore` and `diff`."""

from typing import Annotated

import typer

from services.console.options import DiffOptions, ReplayOptions, SandboxOptions, grouped, option

app = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown")


@grouped
def rescore(
    options: SandboxOptions,
    first: Annotated[str | None, option("--from-step", "First step.", "A")] = None,
    last: Annotated[str | None, option("--to-step", "Last step.", "B")] = None,
) -> None:
    """Score a run's history with another reward, and say how the two agree.

    Nothing is generated again and nothing of the run changes: real reward workers score its trajectories into
    a scores stream of their own, in a sandbox run. The report has agreement, rank correlation, the groups
    that would have had another best completion, and what it cost.
    """
    from services.console.rescore.commands import rescore as rescore_run

    rescore_run(options, first, last)


@app.command(epilog="Example: tidemill replay trajectories arith-1 --from 10 --to 20 --speed 10x")
@grouped
def trajectories(
    options: SandboxOptions,
    first: Annotated[str | None, option("--from", "First step, or a time (2026-01-31T10:00).", "A")] = None,
    last: Annotated[str | None, option("--to", "Last step, or a time.", "B")] = None,
    speed: Annotated[
        str,
        typer.Option("--speed", metavar="TIMES|max", help="1x keeps the old pace; max follows the scores."),
    ] = "1x",
    max_backlog: Annotated[
        int, typer.Option("--max-backlog", min=1, max=1_000_000, help="Most that wait for a score at once.")
    ] = 4096,
) -> None:
    """Feed recorded trajectories to a reward service again: for load tests, and to develop a reward.

    They enter a sandbox run at the pace at which they were recorded, or faster, and real reward workers score
    them; with --workers 0 the workers are yours to start. The run they come from is only read.
    """
    from services.console.rescore.commands import replay_trajectories

    replay_trajectories(options, first, last, speed, max_backlog)


@app.command(epilog="Example: tidemill replay step 412 --set trainer.optimizer.lr=1e-4")
@grouped
def step(options: ReplayOptions) -> None:
    """Train a committed step again, and compare it bit by bit with what was recorded.

    Restores the newest checkpoint before the step, replays the commits after it, and computes the step from
    the run's own records in the recorded micro-batches. Changes nothing of the run.

    Exits with 0 when loss, gradient norm, every other metric and the digest come out the same, else with 1.
    """
    from services.console.compare.replay import replay_steps

    raise typer.Exit(replay_steps(options))


@grouped
def diff(options: DiffOptions) -> None:
    """Find the first step at which two runs differ, and why: data, versions, tokens, rewards, numerics.

    Compares step by step what both were trained on and what came out, and stops at the first step that
    differs by more than rounding. Exits with 0 when there is none, and 1 when there is.
    """
    from services.console.compare.commands import show_diff

    raise typer.Exit(show_diff(options))

"""The commands of `tidemill dead`."""

from dataclasses import asdict
from typing import Annotated

import typer

from tidemill.services.console.options import (
    DeadChoice,
    DeadFilter,
    Json,
    RunId,
    RunOption,
    RunsDir,
    argument,
    flag,
    grouped,
    naming_the_run,
)

app = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown")


@app.command("list", epilog="Example: tidemill dead list --stream prompts --error 'schema 2'")
@naming_the_run
@grouped
def show_list(
    wanted: DeadFilter,
    run_id: RunId = None,
    limit: Annotated[int, typer.Option("--limit", min=0, help="At most so many, the newest; 0: all.")] = 100,
    as_json: Json = False,
    runs_dir: RunsDir = None,
) -> None:
    """List the dead letters: when, from where, which sample, why."""
    from tidemill.services.console.dead import commands

    commands.show_list(DeadChoice(**asdict(wanted), run_id=run_id, runs_dir=runs_dir), as_json, limit)


@app.command(epilog="Example: tidemill dead show 1790000000000-0 --hex")
def show(
    entry_id: Annotated[str, argument("Its id, from `list`.", metavar="ID")],
    run_id: RunOption = None,
    with_hex: Annotated[bool, flag("--hex", "Show all original bytes.")] = False,
    as_json: Json = False,
    runs_dir: RunsDir = None,
) -> None:
    """Show one dead letter with the message that died, decoded where that is possible."""
    from tidemill.services.console.dead import commands

    commands.show_one(DeadChoice(ids=[entry_id], run_id=run_id, runs_dir=runs_dir), as_json, with_hex)


@app.command(epilog="Example: tidemill dead requeue --all --stream prompts:eval")
@grouped
def requeue(choice: DeadChoice) -> None:
    """Put messages back where they belong, each exactly once.

    Refuses, with the reason, what can no longer matter: the trainer replaces the group of a dead ticket or
    trajectory by a fresh one. Exits with 1 when one that was named could not be put back.
    """
    from tidemill.services.console.dead import commands

    raise typer.Exit(commands.requeue_entries(choice))


@app.command(epilog="Example: tidemill dead drop --all --error 'schema 2' --yes")
@grouped
def drop(
    choice: DeadChoice,
    is_sure: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove dead letters for good, after asking. Those that the trainer has yet to act on are kept."""
    from tidemill.services.console.dead import commands

    raise typer.Exit(commands.drop_entries(choice, is_sure))

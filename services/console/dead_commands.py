"""The command line of `tidemill dead`. Wiring only."""

from typing import Annotated

import typer

from services.console.shared_options import Json, RunOption, RunsDir

app = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown")

Stream = Annotated[
    str, typer.Option("--stream", help="Only from this stream, such as prompts:eval.", show_default=False)
]
Ticket = Annotated[
    int | None, typer.Option("--ticket", min=0, help="Only of this ticket.", show_default=False)
]
Error = Annotated[
    str, typer.Option("--error", metavar="TEXT", help="Only with this in the error.", show_default=False)
]
Worker = Annotated[
    str, typer.Option("--worker", metavar="TEXT", help="Only from this worker.", show_default=False)
]
Ids = Annotated[list[str] | None, typer.Argument(metavar="ID", help="Ids of letters.", show_default=False)]
All = Annotated[bool, typer.Option("--all", help="All letters that the filters leave.")]


@app.command("list", epilog="Example: tidemill dead list --stream prompts --error 'schema 2'")
def show_list(
    run: RunOption = None,
    stream: Stream = "",
    ticket: Ticket = None,
    error: Error = "",
    worker: Worker = "",
    limit: Annotated[int, typer.Option("--limit", min=0, help="At most so many, the newest; 0: all.")] = 100,
    as_json: Json = False,
    runs_dir: RunsDir = None,
) -> None:
    """List the dead letters: when, from where, which sample, why."""
    from services.console import dead
    from services.console.letters import LetterFilter

    wanted = LetterFilter(stream, ticket, error, worker)
    dead.show_list(dead.DeadOptions(run, runs_dir, wanted), as_json, limit)


@app.command(epilog="Example: tidemill dead show 1790000000000-0 --hex")
def show(
    letter_id: Annotated[
        str, typer.Argument(metavar="ID", help="Id of the letter, from `list`.", show_default=False)
    ],
    run: RunOption = None,
    with_hex: Annotated[bool, typer.Option("--hex", help="Show all original bytes.")] = False,
    as_json: Json = False,
    runs_dir: RunsDir = None,
) -> None:
    """Show one letter with the message that died, decoded where that is possible."""
    from services.console import dead

    dead.show_one(dead.DeadOptions(run, runs_dir, ids=(letter_id,)), as_json, with_hex)


@app.command(epilog="Example: tidemill dead requeue --all --stream prompts:eval")
def requeue(
    ids: Ids = None,
    has_all: All = False,
    run: RunOption = None,
    stream: Stream = "",
    ticket: Ticket = None,
    error: Error = "",
    worker: Worker = "",
    runs_dir: RunsDir = None,
) -> None:
    """Put messages back where they belong, each exactly once.

    Refuses, with the reason, what can no longer matter: the trainer replaces the group of a dead ticket or
    trajectory by a fresh one. Exits with 1 when a letter that was named could not be put back.
    """
    from services.console import dead
    from services.console.letters import LetterFilter

    wanted = LetterFilter(stream, ticket, error, worker)
    raise typer.Exit(dead.requeue_letters(dead.DeadOptions(run, runs_dir, wanted, tuple(ids or ()), has_all)))


@app.command(epilog="Example: tidemill dead drop --all --error 'schema 2' --yes")
def drop(
    ids: Ids = None,
    has_all: All = False,
    run: RunOption = None,
    stream: Stream = "",
    ticket: Ticket = None,
    error: Error = "",
    worker: Worker = "",
    is_sure: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    runs_dir: RunsDir = None,
) -> None:
    """Remove letters for good, after asking. What the trainer has yet to learn from one keeps it."""
    from services.console import dead
    from services.console.letters import LetterFilter

    wanted = LetterFilter(stream, ticket, error, worker)
    options = dead.DeadOptions(run, runs_dir, wanted, tuple(ids or ()), has_all)
    raise typer.Exit(dead.drop_letters(options, is_sure))

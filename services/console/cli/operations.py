"""The command line of `tidemill archive`. Wiring only."""

from typing import Annotated

import typer

from services.console.cli.options import ConfigFile, Json, Overrides, RunId, RunOption, RunsDir


def archive(
    run_id: RunId = None,
    check: Annotated[
        bool, typer.Option("--check", help="Archive nothing; read every file and compare its checksum.")
    ] = False,
    as_json: Json = False,
    runs_dir: RunsDir = None,
) -> None:
    """Write what a run's streams hold now into its archive: Parquet files in the run's folder.

    `tidemill up` does this at the end of a run by itself; this is for runs whose services were started one by
    one, or whose end was cut short. What is archived already is passed over.
    """
    from services.console.exports.archive import archive as archive_run

    raise typer.Exit(archive_run(run_id, runs_dir, check, as_json))


def plan(
    config: ConfigFile,
    overrides: Overrides = None,
    run: Annotated[
        str | None,
        typer.Option("--run", metavar="RUN_ID", help="Take the times of this run.", show_default=False),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Do a few steps first, in a folder that is thrown away.")
    ] = False,
    assume: Annotated[
        str,
        typer.Option(
            "--assume",
            metavar="TIMES",
            help="Take these: reward=5s,rollout=2000tok/s,trainer=30s.",
            show_default=False,
        ),
    ] = "",
    as_json: Json = False,
    runs_dir: RunsDir = None,
) -> None:
    """Say how many workers, how much memory and disk a run needs, from the times of its stages.

    The times are those of the newest run with this config, unless told otherwise. The formulas are in
    docs/operations/sizing.md; each is shown with its numbers.
    """
    from services.console.plan.plan import PlanOptions
    from services.console.plan.plan import plan as print_plan

    print_plan(PlanOptions(config, tuple(overrides or ()), run, assume, measure, as_json, runs_dir))


def web(
    run_id: Annotated[
        str | None, typer.Argument(help="The run to begin with; without it, all runs.", show_default=False)
    ] = None,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on. Any but this machine's own asks for a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 takes a free one.")] = 8420,
    host_names: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-host",
            metavar="NAME",
            help="A further name under which browsers may ask, such as that of a proxy. May be repeated.",
            show_default=False,
        ),
    ] = None,
    runs_dir: RunsDir = None,
) -> None:
    """Look at runs in a browser: curves, groups, completions token by token, steps, dead letters.

    Pages are read only, and need nothing from the network. They listen on this machine alone, unless --host
    says otherwise; then the printed address carries a token that browsers must show.
    """
    from services.console.web.server import WebOptions, serve

    serve(WebOptions(run_id, host, port, tuple(host_names or ()), runs_dir))


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
    from services.console.dead import commands
    from services.console.dead.dead_letters import LetterFilter

    wanted = LetterFilter(stream, ticket, error, worker)
    commands.show_list(commands.DeadOptions(run, runs_dir, wanted), as_json, limit)


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
    from services.console.dead import commands

    commands.show_one(commands.DeadOptions(run, runs_dir, ids=(letter_id,)), as_json, with_hex)


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
    from services.console.dead import commands
    from services.console.dead.dead_letters import LetterFilter

    wanted = LetterFilter(stream, ticket, error, worker)
    raise typer.Exit(
        commands.requeue_letters(commands.DeadOptions(run, runs_dir, wanted, tuple(ids or ()), has_all))
    )


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
    from services.console.dead import commands
    from services.console.dead.dead_letters import LetterFilter

    wanted = LetterFilter(stream, ticket, error, worker)
    options = commands.DeadOptions(run, runs_dir, wanted, tuple(ids or ()), has_all)
    raise typer.Exit(commands.drop_letters(options, is_sure))

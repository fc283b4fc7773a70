"""The command line of `tidemill streams`. Wiring only."""

from typing import Annotated

import typer

from services.console.shared_options import Full, RunOption, RunsDir

app = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown")

Json = Annotated[bool, typer.Option("--json", help="Print JSON lines with everything, for programs.")]
Stream = Annotated[
    str,
    typer.Argument(
        metavar="STREAM",
        help="prompts, trajectories, scores, weights, commits or dead; prompts:eval and so on.",
        show_default=False,
    ),
]
Step = Annotated[str, typer.Option("--step", metavar="A..B", help="Only of these steps.", show_default=False)]
Ticket = Annotated[
    str, typer.Option("--ticket", metavar="A..B", help="Only of these tickets.", show_default=False)
]
Time = Annotated[
    str,
    typer.Option(
        "--time", metavar="A..B", help="Only then: ISO times or ages, such as '10m ago'.", show_default=False
    ),
]
Worker = Annotated[
    str, typer.Option("--worker", metavar="NAME", help="Only from this worker.", show_default=False)
]
Reward = Annotated[
    str,
    typer.Option("--reward", metavar="LOW..HIGH", help="Only samples with this reward.", show_default=False),
]
Version = Annotated[
    str,
    typer.Option(
        "--version", metavar="A..B", help="Only with a token of these versions.", show_default=False
    ),
]
LaneName = Annotated[
    str, typer.Option("--lane", metavar="train|eval", help="Training or evaluation.", show_default=False)
]


@app.command("ls", epilog="Example: tidemill streams ls --json")
def show_list(run: RunOption = None, as_json: Json = False, runs_dir: RunsDir = None) -> None:
    """List the streams: how much there is and where, from when, and how far its readers are."""
    from services.console import streams

    streams.show_list(streams.View(run, runs_dir, as_json))


@app.command(epilog="Example: tidemill streams tail trajectories --reward 0.9.. --step 40..45 -n 20")
def tail(
    stream: Stream,
    limit: Annotated[int, typer.Option("-n", min=1, help="How many entries.")] = 10,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes.")] = False,
    step: Step = "",
    ticket: Ticket = "",
    time: Time = "",
    worker: Worker = "",
    reward: Reward = "",
    version: Version = "",
    lane: LaneName = "",
    run: RunOption = None,
    as_json: Json = False,
    full: Full = False,
    runs_dir: RunsDir = None,
) -> None:
    """Show the newest entries of a stream, or of a part of it.

    Ranges hold both ends; `A..` and `..B` are open, `A` is one number.
    """
    from services.console import streams
    from services.console.selection_options import SelectionOptions

    options = SelectionOptions(step, ticket, time, worker, reward, version, lane)
    streams.show_tail(streams.View(run, runs_dir, as_json, full), stream, options, limit, follow)


@app.command(epilog="Examples: tidemill streams show trajectories 412.3  ·  tidemill streams show commits 51")
def show(
    stream: Stream,
    what: Annotated[
        str,
        typer.Argument(
            metavar="ID",
            help="An entry's id, a sample as TICKET.INDEX, or the number of a ticket, step or version.",
            show_default=False,
        ),
    ],
    lane: LaneName = "",
    run: RunOption = None,
    as_json: Json = False,
    full: Full = False,
    runs_dir: RunsDir = None,
) -> None:
    """Show everything that one entry holds."""
    from services.console import streams

    streams.show_entries(streams.View(run, runs_dir, as_json, full), stream, what, lane)


@app.command(epilog="Example: tidemill streams grep 'as an AI' --ignore-case --reward 0.8.. -n 20")
def grep(
    pattern: Annotated[
        str, typer.Argument(metavar="PATTERN", help="A regular expression of Python.", show_default=False)
    ],
    stream: Annotated[
        list[str] | None,
        typer.Option("--stream", help="Where to look. May be repeated. Without it: trajectories and scores."),
    ] = None,
    ignore_case: Annotated[bool, typer.Option("--ignore-case", "-i", help="A is a.")] = False,
    limit: Annotated[int, typer.Option("-n", min=0, help="Stop after so many; 0: never.")] = 0,
    step: Step = "",
    ticket: Ticket = "",
    time: Time = "",
    worker: Worker = "",
    reward: Reward = "",
    version: Version = "",
    lane: LaneName = "",
    run: RunOption = None,
    as_json: Json = False,
    full: Full = False,
    runs_dir: RunsDir = None,
) -> None:
    """Find text in prompts and completions, in judges' words and in errors; shown as it is found.

    Exits with 1 where nothing was found.
    """
    from services.console import grep as search
    from services.console.selection_options import SelectionOptions
    from services.console.streams import View

    options = SelectionOptions(step, ticket, time, worker, reward, version, lane)
    view = View(run, runs_dir, as_json, full)
    found = search.show_hits(view, pattern, options, stream or [], ignore_case, limit)
    raise typer.Exit(0 if found else 1)

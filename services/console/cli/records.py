"""The command line of `tidemill streams`. Wiring only."""

from pathlib import Path
from typing import Annotated

import typer

from services.console.cli.options import Full, RunId, RunOption, RunsDir

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
    from services.console.records import streams

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
    from services.console.cli.options import SelectionOptions
    from services.console.records import streams

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
    from services.console.records import streams

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
    from services.console.cli.options import SelectionOptions
    from services.console.records import search
    from services.console.records.streams import View

    options = SelectionOptions(step, ticket, time, worker, reward, version, lane)
    view = View(run, runs_dir, as_json, full)
    found = search.show_hits(view, pattern, options, stream or [], ignore_case, limit)
    raise typer.Exit(0 if found else 1)


JsonOutput = Annotated[bool, typer.Option("--json", help="Print JSON with everything, for programs.")]


def trace(
    sample: Annotated[
        str,
        typer.Argument(
            metavar="TICKET[.INDEX]", help="A group, or one sample of it, such as 412.3.", show_default=False
        ),
    ],
    run_id: RunId = None,
    lane: Annotated[
        str, typer.Option("--lane", metavar="train|eval", help="Training or evaluation.")
    ] = "train",
    as_json: JsonOutput = False,
    full: Full = False,
    runs_dir: RunsDir = None,
) -> None:
    """Follow a ticket, or one sample, through the run: prompt, generation, reward, training, version.

    Who generated it with which version, every attempt at its score, its group, advantages, and the step and
    micro-batch that trained on it, or why none did.
    """
    from services.console.records.streams import View
    from services.console.records.trace_view import show_trace

    show_trace(View(run_id, runs_dir, as_json, full), sample, lane)


def step(
    number: Annotated[
        int,
        typer.Argument(metavar="STEP", min=0, help="Counted from 0, as in the commits.", show_default=False),
    ],
    run_id: RunId = None,
    as_json: JsonOutput = False,
    full: Full = False,
    runs_dir: RunsDir = None,
) -> None:
    """Show one step: what went in, in which micro-batches, where the time went, and what came out.

    Step N turned version N into version N + 1.
    """
    from services.console.records.streams import View
    from services.console.records.trace_view import show_step

    show_step(View(run_id, runs_dir, as_json, full), number)


def timeline(
    first: Annotated[
        int, typer.Option("--from-step", metavar="A", min=0, help="The first step.", show_default=False)
    ],
    last: Annotated[
        int, typer.Option("--to-step", metavar="B", min=0, help="The last step.", show_default=False)
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The file to write.")] = Path(
        "trace.json"
    ),
    run_id: RunId = None,
    runs_dir: RunsDir = None,
) -> None:
    """Write a stretch of a run as a Chrome trace: every sample from its queue to its training.

    Open the file at https://ui.perfetto.dev or in chrome://tracing.
    """
    from services.console.records.streams import View
    from services.console.records.timeline import write_timeline

    write_timeline(View(run_id, runs_dir), first, last, output)

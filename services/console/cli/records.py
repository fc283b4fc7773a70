"""The commands that look at what a run has written: `tidemill streams`, `trace`, `step` and `timeline`."""

from typing import Annotated

import typer

from tidemill.services.console.options import (
    SelectionOptions,
    StreamsOptions,
    TimelineOptions,
    TraceOptions,
    ViewOptions,
    argument,
    flag,
    grouped,
    naming_the_run,
    option,
)

app = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown")

_STREAM_TEXT = "prompts, trajectories, scores, weights, commits or dead; prompts:eval and so on."
Stream = Annotated[str, argument(_STREAM_TEXT, metavar="STREAM")]
_ENTRY_TEXT = "An entry's id, a sample as TICKET.INDEX, or the number of a ticket, step or version."


@app.command("ls", epilog="Example: tidemill streams ls --json")
@naming_the_run
@grouped
def show_list(options: StreamsOptions) -> None:
    """List the streams: how much there is and where, from when, and how far its readers are."""
    from tidemill.services.console.records import streams

    streams.show_list(options)


@app.command(epilog="Example: tidemill streams tail trajectories --reward 0.9.. --step 40..45 -n 20")
@grouped
def tail(
    stream: Stream,
    selection: SelectionOptions,
    view: ViewOptions,
    limit: Annotated[int, typer.Option("-n", min=1, help="How many entries.")] = 10,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes.")] = False,
) -> None:
    """Show the newest entries of a stream, or of a part of it.

    Ranges hold both ends; `A..` and `..B` are open, `A` is one number.
    """
    from tidemill.services.console.records import streams

    streams.show_tail(view, stream, selection, limit, follow)


@app.command(epilog="Examples: tidemill streams show trajectories 412.3  ·  tidemill streams show commits 51")
@grouped
def show(
    stream: Stream,
    what: Annotated[str, argument(_ENTRY_TEXT, metavar="ID")],
    view: ViewOptions,
    lane: Annotated[str, option("--lane", "Training or evaluation.", "train|eval")] = "",
) -> None:
    """Show everything that one entry holds."""
    from tidemill.services.console.records import streams

    streams.show_entries(view, stream, what, lane)


@app.command(epilog="Example: tidemill streams grep 'as an AI' --ignore-case --reward 0.8.. -n 20")
@grouped
def grep(
    pattern: Annotated[str, argument("A regular expression of Python.", metavar="PATTERN")],
    selection: SelectionOptions,
    view: ViewOptions,
    stream: Annotated[
        list[str] | None,
        flag("--stream", "Where to look. May be repeated. Without it: trajectories and scores."),
    ] = None,
    ignore_case: Annotated[bool, typer.Option("--ignore-case", "-i", help="A is a.")] = False,
    limit: Annotated[int, typer.Option("-n", min=0, help="Stop after so many; 0: never.")] = 0,
) -> None:
    """Find text in prompts and completions, in judges' words and in errors; shown as it is found.

    Exits with 1 where nothing was found.
    """
    from tidemill.services.console.records import search

    raise typer.Exit(0 if search.show_hits(view, pattern, selection, stream or [], ignore_case, limit) else 1)


@grouped
def trace(
    sample: Annotated[
        str, argument("A group, or one sample of it, such as 412.3.", metavar="TICKET[.INDEX]")
    ],
    options: TraceOptions,
    lane: Annotated[
        str, typer.Option("--lane", metavar="train|eval", help="Training or evaluation.")
    ] = "train",
) -> None:
    """Follow a ticket, or one sample, through the run: prompt, generation, reward, training, version.

    Who generated it with which version, every attempt at its score, its group, advantages, and the step and
    micro-batch that trained on it, or why none did.
    """
    from tidemill.services.console.records.trace import show_trace

    show_trace(options, sample, lane)


@grouped
def step(
    number: Annotated[int, argument("Counted from 0, as in the commits.", metavar="STEP", min=0)],
    options: TraceOptions,
) -> None:
    """Show one step: what went in, in which micro-batches, where the time went, and what came out.

    Step N turned version N into version N + 1.
    """
    from tidemill.services.console.records.step import show_step

    show_step(options, number)


@grouped
def timeline(options: TimelineOptions) -> None:
    """Write a stretch of a run for Perfetto: every sample from its queue to its training.

    Open the file at https://ui.perfetto.dev.
    """
    from tidemill.services.console.records.timeline import write_timeline

    write_timeline(options)

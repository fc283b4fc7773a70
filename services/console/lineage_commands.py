"""The command lines of `tidemill trace`, `step` and `timeline`. Wiring only."""

from pathlib import Path
from typing import Annotated

import typer

from services.console.shared_options import Full, RunId, RunsDir

Json = Annotated[bool, typer.Option("--json", help="Print JSON with everything, for programs.")]


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
    as_json: Json = False,
    full: Full = False,
    runs_dir: RunsDir = None,
) -> None:
    """Follow a ticket, or one sample, through the run: prompt, generation, reward, training, version.

    Who generated it with which version, every attempt at its score, its group, advantages, and the step and
    micro-batch that trained on it, or why none did.
    """
    from services.console.lineage import show_trace
    from services.console.streams import View

    show_trace(View(run_id, runs_dir, as_json, full), sample, lane)


def step(
    number: Annotated[
        int,
        typer.Argument(metavar="STEP", min=0, help="Counted from 0, as in the commits.", show_default=False),
    ],
    run_id: RunId = None,
    as_json: Json = False,
    full: Full = False,
    runs_dir: RunsDir = None,
) -> None:
    """Show one step: what went in, in which micro-batches, where the time went, and what came out.

    Step N turned version N into version N + 1.
    """
    from services.console.lineage import show_step
    from services.console.streams import View

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
    from services.console.streams import View
    from services.console.timeline.command import write_timeline

    write_timeline(View(run_id, runs_dir), first, last, output)

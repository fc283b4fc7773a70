"""`tidemill timeline`: writes the trace of a stretch into a file."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.text import Text

from common.errors import ConfigError
from common.files import aside_file, publish_file
from common.main_task import run_main
from services.console.history_access import RunAccess, open_history
from services.console.run_folder import nearest
from services.console.streams import View, terminal
from services.console.timeline.stretch import read_stretch
from services.console.timeline.timeline import build
from services.console.timeline.trace_events import TraceEvents

MANY_EVENTS = 2_000_000
"""More than a browser shows without trouble."""


def write_timeline(view: View, first: int, last: int, output: Path) -> None:
    """Write steps `first` to `last` of a run into `output`, which is replaced as a whole.

    Raises:
        ConfigError: the run has none of these steps, or the file cannot be where it should.
    """
    if last < first:
        raise ConfigError(f"--from-step {first} is after --to-step {last}.")
    if output.is_dir() or not output.parent.is_dir():
        raise ConfigError(f"{output} cannot be written: give the name of a file in a folder that exists.")

    async def look() -> tuple[TraceEvents, str]:
        async with open_history(view.run, view.runs_dir) as access:
            stretch = await read_stretch(access.history, first, last, _max_staleness(access))
            steps = f"steps {stretch.commits[0].step} to {stretch.commits[-1].step}"
            return build(stretch), f"{steps} of run {access.run_id}"

    trace, words = run_main(look())
    with aside_file(output, "the timeline") as aside:
        num_events = _write(aside, trace, {"run": words})
        publish_file(aside, output)
    console = terminal()
    size = f"{num_events:,} events, {output.stat().st_size / 1e6:,.1f} MB"
    console.print(Text(f"{nearest(output.resolve())}: {words}, {size}"), soft_wrap=True)
    console.print(Text("open it at https://ui.perfetto.dev, or in chrome://tracing", "dim"), soft_wrap=True)
    if num_events > MANY_EVENTS:
        console.print(Text("that is much for a browser: give fewer steps if it is slow", "yellow"))


def _max_staleness(access: RunAccess) -> int | None:
    return access.config.trainer.max_staleness if access.config else None


def _write(path: Path, trace: TraceEvents, notes: dict[str, Any]) -> int:
    """One event a line; returns how many."""
    num_events = 0
    head = {"displayTimeUnit": "ms", "otherData": notes | {"begin_s": trace.begin_s}}
    with path.open("w", encoding="utf-8") as file:
        file.write(json.dumps(head)[:-1] + ', "traceEvents": [\n')
        for line in _lines(trace):
            file.write((",\n" if num_events else "") + line)
            num_events += 1
        file.write("\n]}\n")
    return num_events


def _lines(trace: TraceEvents) -> Iterator[str]:
    for event in trace.events():
        yield json.dumps(_finite(event), separators=(",", ":"), allow_nan=False)


def _finite(event: dict[str, Any]) -> dict[str, Any]:
    """The event with what JSON cannot say left out of its arguments."""
    args = event.get("args")
    if not args or not any(isinstance(v, float) and not abs(v) < float("inf") for v in args.values()):
        return event
    return event | {
        "args": {k: v for k, v in args.items() if not isinstance(v, float) or abs(v) < float("inf")}
    }

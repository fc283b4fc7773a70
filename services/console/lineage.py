"""`tidemill trace` and `tidemill step`: where a sample went, and what a step was made of."""

import json

from common.errors import ConfigError
from common.main_task import run_main
from services.console.history_access import open_history
from services.console.selection_options import parse_lane, parse_sample
from services.console.step_trace import trace_step
from services.console.step_view import print_step
from services.console.streams import View, terminal
from services.console.ticket_trace import trace_ticket
from services.console.trace_view import print_sample, print_ticket


def show_trace(view: View, what: str, lane: str) -> None:
    """Everything that became of `TICKET` or `TICKET.INDEX`.

    Raises:
        ConfigError: it is neither, or the run has no such ticket or sample.
    """
    number, index = parse_sample(what)
    wanted_lane = parse_lane(lane)

    async def look() -> None:
        async with open_history(view.run, view.runs_dir) as access:
            trace = await trace_ticket(access.history, number, wanted_lane)
        sample = next((sample for sample in trace.samples if sample.index == index), None)
        if index is not None and sample is None:
            made = ", ".join(str(sample.index) for sample in trace.samples) or "none"
            raise ConfigError(f"ticket {number} has no sample {index} in the streams; it has {made}.")
        if view.as_json:
            print(json.dumps(trace.as_tree(index)))
        elif sample is not None:
            print_sample(terminal(), trace, sample, view.is_full)
        else:
            print_ticket(terminal(), trace, view.is_full)

    run_main(look())


def show_step(view: View, step: int) -> None:
    """What went into a step, where its time went, and what came out.

    Raises:
        ConfigError: the run has no commit of it.
    """

    async def look() -> None:
        async with open_history(view.run, view.runs_dir) as access:
            trace = await trace_step(access.history, step)
        if view.as_json:
            print(json.dumps(trace.as_tree()))
        else:
            print_step(terminal(), trace, view.is_full)

    run_main(look())

"""One line that moves while a sandbox is fed: how much went in, how much came back, how fast."""

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console

from services.console.sandbox_runs.emission import Flow

EVERY_S = 0.5
SAY_EVERY_S = 10.0
"""Where nobody watches: a line each."""


@contextlib.contextmanager
def shown(console: Console, verb: str) -> Iterator[Callable[[Flow], None]]:
    """Give a function that shows a flow: a live line on a terminal, else a line now and then."""
    said_at = time.monotonic()

    def text(flow: Flow) -> str:
        rate = flow.scored / max(time.time() - flow.started_at, 1e-9)
        behind = f", {flow.behind_s:.1f} s behind its pace" if flow.behind_s > 1 else ""
        more = "" if flow.is_complete else " so far"
        return f"{flow.scored:,} of {flow.emitted:,}{more} {verb}, {rate:,.0f}/s{behind}"

    if not console.is_terminal:

        def say(flow: Flow) -> None:
            nonlocal said_at
            if time.monotonic() - said_at > SAY_EVERY_S:
                said_at = time.monotonic()
                console.print(text(flow))

        yield say
        return
    with console.status("starting the reward workers") as status:

        def update(flow: Flow) -> None:
            nonlocal said_at
            if time.monotonic() - said_at > EVERY_S:
                said_at = time.monotonic()
                status.update(text(flow))

        yield update

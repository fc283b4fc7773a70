"""What `tidemill up` shows while it runs: a live view on a terminal, else a line for each event and step."""

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from rich.console import Console
from rich.live import Live
from rich.text import Text

from tidemill.common.process.failures import cause_of, doubling
from tidemill.common.run.state import EVALUATION, STEP
from tidemill.services.console.processes.supervisor import ServiceStatus
from tidemill.services.console.status.dashboard import (
    dashboard,
    evaluation_line,
    failure_line,
    starved_line,
    step_line,
    warning_line,
)
from tidemill.services.console.status.snapshot import RunSnapshot

MAX_EVENTS = 5
BLOCKED = "blocked"
FAILING = "failing"
SHORT_OF_CPU = "short of CPU"
PRESENT = (BLOCKED, FAILING, SHORT_OF_CPU)
"""Kinds of news about processes that are alive."""


class LiveView:
    """Redraws the dashboard in place."""

    def __init__(self, console: Console, hint: str) -> None:
        self.console, self.hint = console, hint
        self._events: deque[str] = deque(maxlen=MAX_EVENTS)
        self._live = Live(console=console, auto_refresh=False, transient=False, vertical_overflow="crop")
        self._live.start()

    def show(self, snapshot: RunSnapshot, services: Mapping[str, ServiceStatus], silent_s: float) -> None:
        picture = dashboard(
            snapshot,
            services=services,
            events=list(self._events),
            hint=self.hint,
            silent_s=silent_s,
            console=self.console,
        )
        with contextlib.suppress(OSError):  # the terminal may be gone; the run goes on
            self._live.update(picture, refresh=True)

    def event(self, text: str) -> None:
        """Keep the last few events below the dashboard."""
        self._events.append(text.splitlines()[0])

    def close(self) -> None:
        """Leave the last picture on the screen."""
        with contextlib.suppress(OSError):
            self._live.stop()


class News(NamedTuple):
    """An item of a snapshot that is shown once."""

    place: tuple[float, int]
    """Sort key."""
    what: tuple[object, ...]
    """Its identity; its kind comes first."""
    line: Callable[[], str]
    record: dict[str, Any] | None = None
    """The record of a step or an evaluation, as in metrics.jsonl."""


def _news(snapshot: RunSnapshot) -> Iterator[News]:
    for index, point in enumerate(snapshot.points):
        line = partial(step_line, snapshot, index)
        yield News((point.step + 1, 0), (STEP, point.step), line, point.record)
    for item in snapshot.evaluations:  # that of a version belongs after the step that made the version
        version, name = int(item.get("version", 0)), item.get("set")
        yield News((version, 1), (EVALUATION, version, name), partial(evaluation_line, item), item)
    for item in snapshot.state.get("warnings") or []:
        place = (item.get("check"), item.get("since_step"), item.get("until_step"))
        begun = "warning: " if place[-1] is None else ""
        yield News((math.inf, 0), ("warning", *place), partial("{}{}".format, begun, warning_line(item)))
    for name, detail in snapshot.blocked.items():
        line = partial("warning: {}: {}".format, name, detail)
        # By its cause: how long a loop was blocked changes with every heartbeat.
        yield News((math.inf, 1), (BLOCKED, name, cause_of(detail)), line)
    for failure in snapshot.failures:
        identity = (FAILING, failure.what, failure.kind, failure.cause, doubling(failure.count))
        yield News((math.inf, 2), identity, partial("failing: {}".format, failure_line(failure)))
    if starved := starved_line(snapshot):
        yield News((math.inf, 3), (SHORT_OF_CPU,), partial("warning: {}".format, starved))


class PlainView:
    """Prints each step, evaluation, warning and event once."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._shown: set[tuple[object, ...]] | None = None

    def show(self, snapshot: RunSnapshot, services: Mapping[str, ServiceStatus], silent_s: float) -> None:
        """Report what is new since the last call; what a resumed run did before is not new."""
        news = sorted(_news(snapshot), key=lambda item: item.place)
        if self._shown is None:
            # What troubles processes troubles them now: it is printed after a resume, too.
            self._shown = {item.what for item in news if item.what[0] not in PRESENT}
        for item in news:
            if item.what not in self._shown:
                self._shown.add(item.what)
                self.report(item)

    def report(self, news: News) -> None:
        self.event(news.line())

    def event(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self.console.print(Text(text), soft_wrap=not self.console.is_terminal)

    def close(self) -> None:
        """Nothing to close."""


View = LiveView | PlainView

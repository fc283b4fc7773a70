"""What `tidemill up` shows while it runs: a live view on a terminal, else a line for each event and step."""

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from rich.console import Console
from rich.live import Live
from rich.text import Text

from tidemill.common.process.activity import LOAD, WAIT_DISK
from tidemill.common.process.failures import cause_of, doubling
from tidemill.common.run.state import EVALUATION, STEP
from tidemill.services.console.look.dashboard import (
    DISK_FULL,
    FULL,
    dashboard,
    evaluation_line,
    failure_line,
    starved_line,
    state_text,
    step_line,
    warning_line,
)
from tidemill.services.console.look.snapshot import RunSnapshot
from tidemill.services.console.run.folder import RunFolder
from tidemill.services.console.run.service_status import ServiceStatus
from tidemill.services.console.text.formats import duration, size

MAX_EVENTS = 5
BLOCKED = "blocked"
FAILING = "failing"
SHORT_OF_CPU = "short of CPU"
OF_PROCESSES = (BLOCKED, FAILING, SHORT_OF_CPU)
"""Kinds of news about what goes wrong in processes now; the others are of the run, and stay true."""
SILENCE_S = 10.0
"""With a snapshot older than this, it is said that Redis does not answer."""
LOADING_S = 30.0
"""A process that has loaded for this long is named."""
FIRST_STEP = "the first step"
FIRST_STEP_S = 10.0
"""Until the first step a line says what the processes do, so that the start is not silent."""
REPORTING = ("trainer", "rollout", "reward")
"""Roles whose processes report."""
AGAIN_AFTER_S = 10.0
"""A trouble is said again no sooner than when it has lasted this long."""
OVER_AFTER_S = 60.0
"""A trouble that was not seen for this long is over: a disk is tried again every half minute."""


class LiveView:
    """Redraws the dashboard in place."""

    def __init__(self, console: Console, folder: RunFolder, hint: str) -> None:
        self.console = console
        self.folder = folder
        self.hint = hint
        self._events: deque[str] = deque(maxlen=MAX_EVENTS)
        self._live = Live(console=console, auto_refresh=False, transient=False, vertical_overflow="crop")
        self._live.start()

    def show(self, snapshot: RunSnapshot, services: Mapping[str, ServiceStatus], silent_s: float) -> None:
        picture = dashboard(
            snapshot,
            self.folder,
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
    """An item of a snapshot that is shown once.

    Example: of step 3: `identity` ("step", 3), and a `line` that is made only where it is printed.
    """

    position: tuple[float, int]
    """Sort key."""
    identity: tuple[object, ...]
    """Its identity; its kind comes first."""
    line: Callable[[], str]
    record: dict[str, Any] | None = None
    """The record of a step or an evaluation, as in metrics.jsonl."""


def _news(snapshot: RunSnapshot) -> Iterator[News]:
    for index, point in enumerate(snapshot.points):
        line = partial(step_line, snapshot, index)
        yield News((point.step + 1, 0), (STEP, point.step), line, point.record)
    for item in snapshot.evaluations:  # that of a version belongs after the step that made the version
        version = int(item.get("version", 0))
        name = item.get("set")
        yield News((version, 1), (EVALUATION, version, name), partial(evaluation_line, item), item)
    for item in snapshot.state.get("warnings") or []:
        until_step = item.get("until_step")
        identity = ("warning", item.get("check"), item.get("since_step"), until_step)
        begun = "warning: " if until_step is None else ""
        yield News((math.inf, 0), identity, partial("{}{}".format, begun, warning_line(item)))
    for name, detail in snapshot.blocked.items():
        line = partial("warning: {}: {}".format, name, detail)
        # By its cause: how long a loop was blocked changes with every heartbeat.
        yield News((math.inf, 1), (BLOCKED, name, cause_of(detail)), line)
    for failure in snapshot.failures:
        cause = (FAILING, failure.what, failure.kind, failure.cause, doubling(failure.count))
        yield News((math.inf, 2), cause, partial(failure_line, failure))
    starved = starved_line(snapshot)
    if starved:
        yield News((math.inf, 3), (SHORT_OF_CPU,), partial("warning: {}".format, starved))


@dataclass(slots=True)
class Trouble:
    """Something that a run waits for, and that a person may have to put right."""

    text: str
    since: float
    seen_at: float
    due_s: float
    """How long it must have lasted until it is said the next time."""
    is_said: bool = False


class Troubles:
    """Says each trouble at once and at doublings of the time that it lasts, and once that it is over."""

    def __init__(self) -> None:
        self._held: dict[str, Trouble] = {}

    def lines(self, present: Mapping[str, tuple[str, float]], now: float) -> Iterator[str]:
        """What to say now. `present` has each trouble by its name: its text, and after how many seconds it is
        said first."""
        for name, (text, first_s) in present.items():
            trouble = self._held.setdefault(name, Trouble(text, now, now, first_s))
            trouble.text = text
            trouble.seen_at = now
        for name, trouble in list(self._held.items()):
            lasted_s = now - trouble.since
            if now - trouble.seen_at > OVER_AFTER_S:
                del self._held[name]
                if trouble.is_said and name != FIRST_STEP:  # the step itself is said
                    yield f"over after {duration(trouble.seen_at - trouble.since)}: {name}"
            elif name in present and lasted_s >= trouble.due_s:
                so_far = f" (for {duration(lasted_s)})" if lasted_s >= 1.0 else ""
                yield f"waiting: {trouble.text}{so_far}"
                trouble.is_said = True
                trouble.due_s = max(2 * lasted_s, AGAIN_AFTER_S)


def _troubles(
    snapshot: RunSnapshot, services: Mapping[str, ServiceStatus], silent_s: float
) -> dict[str, tuple[str, float]]:
    """What the run waits for now that is no part of its work; by name, with its text and the seconds after
    which it is said first."""
    if silent_s > SILENCE_S:  # all else in the snapshot is old
        text = "Redis does not answer; the processes wait, and nothing is lost. Is it running, and reached?"
        return {"Redis does not answer": (text, 0.0)}
    troubles: dict[str, tuple[str, float]] = {}
    if snapshot.memory.is_full:
        used = size(snapshot.memory.used_bytes)
        limit = size(snapshot.memory.max_bytes)
        troubles["Redis is full"] = (f"Redis is full ({used} of {limit}). {FULL}", 0.0)
    if snapshot.append_only_error:
        text = f"Redis cannot write to its disk. {DISK_FULL}"
        troubles["Redis cannot write to its disk"] = (text, 0.0)
    for beat in snapshot.workers:
        service = services.get(beat.name)
        if not beat.is_alive and service is not None and service.pid == beat.pid:
            text = f"{beat.name} has not reported for {duration(max(0.0, beat.age_s))}; its log may say why"
            troubles[f"{beat.name} does not report"] = (text, 0.0)
        if not beat.is_alive:
            continue
        if beat.state == WAIT_DISK:
            troubles[f"{beat.name} waits for the disk"] = (f"{beat.name}: {beat.detail}", 0.0)
        elif beat.state == LOAD:
            text = f"{beat.name} is loading{f': {beat.detail}' if beat.detail else ''}; its log says more"
            troubles[f"{beat.name} is loading"] = (text, LOADING_S)
    if not troubles and not snapshot.points and (doing := _doing(snapshot, services)):
        troubles[FIRST_STEP] = (f"{FIRST_STEP}; {doing}", FIRST_STEP_S)
    return troubles


def _doing(snapshot: RunSnapshot, services: Mapping[str, ServiceStatus]) -> str:
    """What each process that runs does now, as it has reported."""
    beats = {beat.name: beat for beat in snapshot.workers}
    names = [
        service.name
        for service in services.values()
        if service.role in REPORTING and service.state not in ("stopping", "stopped")
    ]
    return ", ".join(f"{name}: {state_text(beats[name]) if name in beats else 'starts'}" for name in names)


class PlainView:
    """Prints each step, evaluation, warning and event once, and what the run waits for."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._shown: set[tuple[object, ...]] | None = None
        self._troubles = Troubles()

    def show(self, snapshot: RunSnapshot, services: Mapping[str, ServiceStatus], silent_s: float) -> None:
        """Report what is new since the last call; what a resumed run did before is not new."""
        news = sorted(_news(snapshot), key=lambda item: item.position)
        if self._shown is None:
            # What goes wrong in processes goes wrong now: after a resume it is printed, too.
            self._shown = {item.identity for item in news if item.identity[0] not in OF_PROCESSES}
        for item in news:
            if item.identity not in self._shown:
                self._shown.add(item.identity)
                self.report(item)
        for line in self._troubles.lines(_troubles(snapshot, services, silent_s), time.monotonic()):
            self.event(line)

    def report(self, news: News) -> None:
        self.event(news.line())

    def event(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self.console.print(Text(text), soft_wrap=not self.console.is_terminal)

    def close(self) -> None:
        """Nothing to close."""


View = LiveView | PlainView

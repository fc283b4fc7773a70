"""What `tidemill up` shows while it runs: a live view on a terminal, else a line for each event and step."""

import contextlib
from collections import deque
from collections.abc import Mapping

from rich.console import Console
from rich.live import Live
from rich.text import Text

from tidemill.services.console.processes.supervisor import ServiceStatus
from tidemill.services.console.status.dashboard import dashboard, evaluation_line, step_line, warning_line
from tidemill.services.console.status.snapshot import RunSnapshot

MAX_EVENTS = 5


class LiveView:
    """Redraws the dashboard in place."""

    def __init__(self, console: Console, hint: str) -> None:
        self.console, self.hint = console, hint
        self._events: deque[str] = deque(maxlen=MAX_EVENTS)
        self._live = Live(console=console, auto_refresh=False, transient=False, vertical_overflow="crop")
        self._live.start()

    def show(self, snapshot: RunSnapshot, services: Mapping[str, ServiceStatus], silent_s: float) -> None:
        picture = dashboard(
            snapshot, services=services, events=list(self._events), hint=self.hint, silent_s=silent_s
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


class PlainView:
    """Prints each step, evaluation and event once."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._next_step: int | None = None
        self._evaluated: set[tuple[object, object]] = set()
        self._warned: set[tuple[object, ...]] | None = None
        self._blocked: set[str] = set()

    def show(self, snapshot: RunSnapshot, services: Mapping[str, ServiceStatus], silent_s: float) -> None:
        """Print what is new since the last call; what a resumed run did before is not new."""
        evaluations = {(item.get("version"), item.get("set")): item for item in snapshot.evaluations}
        if self._next_step is None:
            self._next_step, self._evaluated = snapshot.version, set(evaluations)
        # A version's evaluation belongs after the step that made the version.
        lines = [
            (int(item.get("version", 0)), 1, evaluation_line(item))
            for key, item in evaluations.items()
            if key not in self._evaluated
        ]
        lines += [
            (point.step + 1, 0, step_line(snapshot, index))
            for index, point in enumerate(snapshot.points)
            if point.step >= self._next_step
        ]
        self._evaluated |= set(evaluations)
        self._next_step = max(self._next_step, snapshot.version)
        for _, _, line in sorted(lines):
            self.event(line)
        self._show_warnings(snapshot)
        for name in snapshot.blocked.keys() - self._blocked:
            self.event(f"warning: {name}: {snapshot.blocked[name]}")
        self._blocked = set(snapshot.blocked)

    def _show_warnings(self, snapshot: RunSnapshot) -> None:
        """Each once when it begins and once when it ends; what a resumed run said before is not new."""
        known = {
            (item.get("check"), item.get("since_step"), item.get("until_step")): item
            for item in snapshot.state.get("warnings") or []
        }
        if self._warned is None and "warnings" not in snapshot.state:
            return  # the trainer has not written its state yet
        for key, item in known.items():
            if self._warned is not None and key not in self._warned:
                self.event(f"warning: {warning_line(item)}" if key[2] is None else warning_line(item))
        self._warned = set(known)

    def event(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self.console.print(Text(text), soft_wrap=not self.console.is_terminal)

    def close(self) -> None:
        """Nothing to leave."""


View = LiveView | PlainView

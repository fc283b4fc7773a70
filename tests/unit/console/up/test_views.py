"""Without a terminal: what a run waits for is said at once, at doublings of the time, and when it is over."""

from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from tidemill.common.process.heartbeats import Heartbeat
from tidemill.common.redis.broker import MemoryUse
from tidemill.services.console.look.snapshot import RunSnapshot, StepPoint
from tidemill.services.console.run.service_status import ServiceStatus
from tidemill.services.console.up import views
from tidemill.services.console.up.views import PlainView

DISK = "cannot write a checkpoint to /runs/a: No space left on device; free some space on that disk."
SERVICES = {"trainer": ServiceStatus("trainer", "trainer", "running", pid=7)}

FIRST = StepPoint(step=0, metrics={}, finished_at=0.0)


class Screen:
    """A view, what it has printed, and its clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.text = StringIO()
        self.view = PlainView(Console(file=self.text, width=300))
        self.now_s = 1000.0
        monkeypatch.setattr(views.time, "monotonic", lambda: self.now_s)

    def lines_at(self, seconds: float, silent_s: float = 0.0, **state: Any) -> list[str]:
        """Lines that are printed for a snapshot that is taken so many seconds after the first."""
        state = {"points": [FIRST]} | state
        self.now_s = 1000.0 + seconds
        printed = len(self.text.getvalue())
        self.view.show(RunSnapshot("a", 5, 1, **state), SERVICES, silent_s)
        return self.text.getvalue()[printed:].splitlines()


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Screen:
    return Screen(monkeypatch)


def beat(state: str, detail: str = "", age_s: float = 0.0) -> Heartbeat:
    return Heartbeat("trainer", "trainer", state=state, detail=detail, pid=7, at=100.0, read_at=100.0 + age_s)


def test_a_full_disk_is_said_at_once_with_its_remedy_and_at_doublings(screen: Screen) -> None:
    waits = {"workers": [beat("wait:disk", DISK)]}
    assert screen.lines_at(0, **waits) == [f"waiting: trainer: {DISK}"]
    times = [second for second in range(1, 200) if screen.lines_at(second, **waits)]
    assert times == [10, 20, 40, 80, 160]


def test_a_write_that_is_tried_between_two_waits_is_no_end(screen: Screen) -> None:
    assert screen.lines_at(0, workers=[beat("wait:disk", DISK)])
    assert not screen.lines_at(1, workers=[beat("save")])
    assert not screen.lines_at(2, workers=[beat("wait:disk", DISK)])
    assert not screen.lines_at(50, workers=[beat("save")])
    assert screen.lines_at(70, workers=[beat("train")]) == ["over after 2 s: trainer waits for the disk"]


def test_a_process_that_loads_for_long_is_named(screen: Screen) -> None:
    loads = {"workers": [beat("load", "model and data")]}
    times = [second for second in range(200) if screen.lines_at(second, **loads)]
    assert times == [30, 60, 120]


def test_until_the_first_step_it_is_said_what_the_processes_do(screen: Screen) -> None:
    assert not screen.lines_at(0, points=[])
    assert screen.lines_at(11, points=[]) == ["waiting: the first step; trainer: starts (for 11 s)"]
    said = "waiting: the first step; trainer: waits for trajectories (for 22 s)"
    assert screen.lines_at(22, workers=[beat("wait:trajectories")], points=[]) == [said]
    assert len(screen.lines_at(25, workers=[beat("train")])) == 1, "the step"
    times = [second for second in range(26, 200) if screen.lines_at(second, workers=[beat("train")])]
    assert times == []


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"memory": MemoryUse(100, 100)}, ["Redis is full", "maxmemory"]),
        ({"append_only_error": True}, ["Redis cannot write to its disk", "Free some space"]),
        ({"silent_s": 11.0}, ["Redis does not answer"]),
        ({"workers": [beat("train", age_s=12.0)]}, ["trainer has not reported for 12 s"]),
    ],
)
def test_what_stops_all_processes_is_said_at_once(screen: Screen, state: Any, words: list[str]) -> None:
    (line,) = screen.lines_at(0, **state)
    assert [word for word in words if word not in line] == []
    assert not screen.lines_at(5, **state)
    assert len(screen.lines_at(10, **state)) == 1


def test_a_process_that_has_been_replaced_is_not_missed(screen: Screen) -> None:
    old = Heartbeat("trainer", "trainer", pid=6, at=100.0, read_at=200.0)
    assert not screen.lines_at(0, workers=[old])

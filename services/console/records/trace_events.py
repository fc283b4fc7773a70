"""Chrome's trace event format, as Perfetto and chrome://tracing read it.

Guarantees: times are whole microseconds from the beginning of the trace; every slice is a complete event
(`X`); slices of one thread nest or do not overlap, because those that would are laid out in lanes, a thread
each; every process and thread has a name; a flow goes forward in time, each of its points within a slice.
"""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

Event = dict[str, Any]
CURVES = 0
"""The process of the counters: shown first."""


@dataclass(slots=True, eq=False)
class Slice:
    """Something that took time, in microseconds. `children` are parts of it, one after the other."""

    name: str
    begin_us: int
    end_us: int
    args: dict[str, Any] = field(default_factory=dict)
    children: list["Slice"] = field(default_factory=list)
    thread: int = 0
    """Given when the track is laid out."""


@dataclass(slots=True, eq=False)
class Track:
    """Slices that may overlap: as many threads as needed, the first free one for each."""

    name: str
    process: "Process"
    slices: list[Slice] = field(default_factory=list)
    instants: list[tuple[str, int, dict[str, Any]]] = field(default_factory=list)
    first_thread: int = 0
    num_lanes: int = 1

    def add(self, item: Slice) -> Slice:
        """Put a slice onto the track."""
        self.slices.append(item)
        return item

    def lay_out(self, first_thread: int) -> int:
        """Give each slice a thread from `first_thread` on; returns the next one that is free."""
        free: list[int] = []
        busy: list[tuple[int, int]] = []
        self.first_thread, self.num_lanes = first_thread, 1
        for item in sorted(self.slices, key=lambda s: (s.begin_us, s.end_us)):
            while busy and busy[0][0] <= item.begin_us:
                heapq.heappush(free, heapq.heappop(busy)[1])
            lane = heapq.heappop(free) if free else len(busy)
            self.num_lanes = max(self.num_lanes, lane + 1)
            item.thread = first_thread + lane
            heapq.heappush(busy, (item.end_us, lane))
        return first_thread + self.num_lanes


@dataclass(slots=True, eq=False)
class Process:
    """Tracks that belong together, folded into one line by the viewer."""

    name: str
    pid: int
    tracks: dict[str, Track] = field(default_factory=dict)

    def track(self, name: str) -> Track:
        """A track by its name, made when first asked for."""
        return self.tracks.setdefault(name, Track(name, self))


@dataclass(slots=True, eq=False)
class TraceEvents:
    """A trace under construction. Times are given in seconds since 1970."""

    begin_s: float
    processes: dict[str, Process] = field(default_factory=dict)
    flows: list[tuple[str, list[tuple[Process, Slice]]]] = field(default_factory=list)
    counters: list[tuple[str, int, dict[str, float]]] = field(default_factory=list)

    def process(self, name: str) -> Process:
        """A process by its name; they are shown in the order in which they were first asked for."""
        return self.processes.setdefault(name, Process(name, len(self.processes) + 1))

    def us(self, at_s: float) -> int:
        """A time as the trace has it."""
        return max(0, round((at_s - self.begin_s) * 1e6))

    def slice(self, track: Track, name: str, begin_s: float, end_s: float, **args: Any) -> Slice:
        """Add a slice; one that would end before it begins takes no time."""
        begin_us = self.us(begin_s)
        return track.add(Slice(name, begin_us, max(begin_us, self.us(end_s)), args))

    def child(self, parent: Slice, name: str, begin_s: float, end_s: float, **args: Any) -> None:
        """Add a part of a slice; it is cut to the parent, and to what follows the part before it."""
        least = parent.children[-1].end_us if parent.children else parent.begin_us
        begin_us = min(max(self.us(begin_s), least), parent.end_us)
        end_us = min(max(self.us(end_s), begin_us), parent.end_us)
        parent.children.append(Slice(name, begin_us, end_us, args))

    def instant(self, track: Track, name: str, at_s: float, **args: Any) -> None:
        """Add a moment."""
        track.instants.append((name, self.us(at_s), args))

    def flow(self, name: str, steps: Iterable[tuple[Process, Slice]]) -> None:
        """Link slices by arrows."""
        self.flows.append((name, list(steps)))

    def counter(self, name: str, at_s: float, values: dict[str, float]) -> None:
        """Add a point of a curve."""
        self.counters.append((name, self.us(at_s), values))

    def events(self) -> Iterator[Event]:
        """All events: names first, then the others."""
        for process in self.processes.values():
            next_thread = 1
            for track in process.tracks.values():
                next_thread = track.lay_out(next_thread)
            yield from _names(process)
        for process in self.processes.values():
            for track in process.tracks.values():
                for item in track.slices:
                    yield from _slice_events(process.pid, item, item.thread)
                for name, at_us, args in track.instants:
                    where = {"pid": process.pid, "tid": track.first_thread}
                    yield {"ph": "i", "s": "t", "name": name, "ts": at_us, "args": args} | where
        for number, (name, steps) in enumerate(self.flows, 1):
            yield from _flow_events(number, name, steps)
        if self.counters:
            yield _metadata("process_name", CURVES, 0, {"name": "curves"})
            yield _metadata("thread_name", CURVES, 0, {"name": "curves"})
        for name, at_us, values in sorted(self.counters, key=lambda point: point[1]):
            yield {"ph": "C", "name": name, "pid": CURVES, "tid": 0, "ts": at_us, "args": values}


def _names(process: Process) -> Iterator[Event]:
    yield _metadata("process_name", process.pid, 0, {"name": process.name})
    yield _metadata("process_sort_index", process.pid, 0, {"sort_index": process.pid})
    for track in process.tracks.values():
        for lane in range(track.num_lanes):
            thread = track.first_thread + lane
            name = track.name if track.num_lanes == 1 else f"{track.name}, lane {lane + 1}"
            yield _metadata("thread_name", process.pid, thread, {"name": name})
            yield _metadata("thread_sort_index", process.pid, thread, {"sort_index": thread})


def _metadata(name: str, pid: int, tid: int, args: dict[str, Any]) -> Event:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _slice_events(pid: int, item: Slice, thread: int) -> Iterator[Event]:
    yield {
        "ph": "X",
        "name": item.name,
        "cat": "tidemill",
        "pid": pid,
        "tid": thread,
        "ts": item.begin_us,
        "dur": item.end_us - item.begin_us,
        "args": item.args,
    }
    for child in item.children:
        yield from _slice_events(pid, child, thread)


def _flow_events(number: int, name: str, steps: Sequence[tuple[Process, Slice]]) -> Iterator[Event]:
    """Each point lies as early in its slice as the points before it allow; one that cannot is left out.

    Clocks of two machines differ: then a slice may seem to end before the one that it follows.
    """
    points, last_us = [], 0
    for process, item in steps:
        at_us = max(item.begin_us, last_us)
        if at_us <= item.end_us:
            points.append({"pid": process.pid, "tid": item.thread, "ts": at_us})
            last_us = at_us
    if len(points) < 2:
        return
    for place, point in enumerate(points):
        phase = "s" if not place else "f" if place == len(points) - 1 else "t"
        end = {"bp": "e"} if phase == "f" else {}
        yield {"ph": phase, "name": name, "cat": "ticket", "id": number} | point | end

"""The rules of Chrome's trace event format, as a viewer needs them to be kept."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

Event = dict[str, Any]
Place = tuple[int, int]

PHASES = {"M", "X", "i", "s", "t", "f"}


def problems_of(events: Iterable[Event]) -> list[str]:
    """What is wrong with a trace, in words; nothing where a viewer shows it as it is meant."""
    events = list(events)
    return [*_shape(events), *_names(events), *_nesting(events), *_flows(events)]


def slices_of(events: Iterable[Event]) -> dict[Place, list[Event]]:
    events_of: dict[Place, list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            events_of[event["pid"], event["tid"]].append(event)
    return events_of


def _shape(events: list[Event]) -> Iterator[str]:
    for event in events:
        if event.get("ph") not in PHASES or not event.get("name"):
            yield f"no known event: {event}"
        elif not all(type(event.get(name)) is int and event[name] >= 0 for name in ("pid", "tid", "ts")):
            yield f"pid, tid and ts must be whole numbers: {event}"
        elif event["ph"] == "X" and not (type(event.get("dur")) is int and event["dur"] >= 0):
            yield f"a slice needs a whole dur: {event}"
        elif event["ph"] == "i" and event.get("s") not in ("g", "p", "t"):
            yield f"an instant has a scope: {event}"


def _names(events: list[Event]) -> Iterator[str]:
    processes = {e["pid"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    for event in events:
        if event["ph"] != "M" and event["pid"] not in processes:
            yield f"a process without a name: {event}"
        elif event["ph"] != "M" and (event["pid"], event["tid"]) not in threads:
            yield f"a thread without a name: {event}"


def _nesting(events: list[Event]) -> Iterator[str]:
    for thread, slices in slices_of(events).items():
        open_until: list[int] = []
        for item in sorted(slices, key=lambda e: (e["ts"], -e["dur"])):
            while open_until and open_until[-1] <= item["ts"]:
                open_until.pop()
            end = item["ts"] + item["dur"]
            if open_until and end > open_until[-1]:
                yield f"slices of {thread} overlap at {item['ts']}: {item['name']}"
            open_until.append(end)


def _flows(events: list[Event]) -> Iterator[str]:
    slices = slices_of(events)
    flows = defaultdict(list)
    for event in events:
        if event["ph"] in "stf":
            flows[event["id"]].append(event)
    for number, points in flows.items():
        phases = "".join(point["ph"] for point in points)
        if phases[0] != "s" or phases[-1] != "f" or set(phases[1:-1]) - {"t"}:
            yield f"flow {number} goes {phases}"
        if [p["ts"] for p in points] != sorted(p["ts"] for p in points):
            yield f"flow {number} goes back in time"
        for point in points:
            around = slices[point["pid"], point["tid"]]
            if not any(s["ts"] <= point["ts"] <= s["ts"] + s["dur"] for s in around):
                yield f"a point of flow {number} lies in no slice: {point}"

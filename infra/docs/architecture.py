"""Draws docs/architecture.svg: `python -m infra.docs.architecture`; `--check` says whether it is current.

Streams come from `common/wire/keys.py`, rooms are the packages in a service's folder. `FLOWS` says which
services write and read a stream; each of them must use that stream in its code.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from infra.docs.made import keep
from infra.docs.pages import REPO
from tidemill.common.wire.keys import StreamName
from tidemill.common.wire.messages import Lane

DRAWING = REPO / "docs" / "architecture.svg"


@dataclass(frozen=True)
class Flow:
    """One stream: which services write and read it, and a note below its name."""

    stream: str
    writers: tuple[str, ...]
    readers: tuple[str, ...]
    note: str = ""


FLOWS = (
    Flow("prompts", ("trainer",), ("rollout",), "one ticket for each group"),
    Flow("trajectories", ("rollout",), ("trainer", "reward"), "one entry for each completion"),
    Flow("scores", ("reward",), ("trainer",), "refer to trajectories by key"),
    Flow("weights", ("trainer",), ("rollout",), "files lie in the run folder"),
    Flow("commits", ("trainer",), ("trainer",), "read after a restart"),
    Flow("dead", ("trainer", "rollout", "reward"), ("trainer",), "the trainer replaces the group"),
)
TASKS = {
    "trainer": "issues tickets, trains, commits",
    "rollout": "ticket → trajectories",
    "reward": "trajectory → score",
    "console": "the tidemill command: start, watch, look at, replay",
    "common": "shared by all services; imports neither torch nor vLLM",
}

WIDTH = 1040
MARGIN = 20
GAP = 20
COLUMN = {"trainer": (20, 400), "rollout": (440, 250), "reward": (710, 310)}
"""Left edge and width of each service's box."""
TOP = 20
CHIP = 26
LINE = 20
BUS_LINE = 44
STYLE = """
  text { font: 13px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1b1f24 }
  .title { font-size: 16px; font-weight: 600 } .small { font-size: 12px; fill: #57606a }
  .box { fill: #f6f8fa; stroke: #8c959f } .chip { fill: #ffffff; stroke: #d0d7de }
  .redis { fill: #fff8f3; stroke: #bc6b3a } .bus { stroke: #bc6b3a; stroke-width: 3 }
  .write { stroke: #0a60c4; fill: #0a60c4 } .read { stroke: #1a7f37; fill: #1a7f37 }
  .flow { stroke-width: 2 } .page { fill: #ffffff } .name { font-weight: 600 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .small { fill: #9da7b3 } .page { fill: #0d1117 }
    .box { fill: #161b22; stroke: #6e7681 } .chip { fill: #21262d; stroke: #444c56 }
    .redis { fill: #221a15; stroke: #d18b5f } .bus { stroke: #d18b5f }
    .write { stroke: #6cb0ff; fill: #6cb0ff } .read { stroke: #56d364; fill: #56d364 }
  }
"""


def rooms_of(folder: str) -> list[str]:
    """The packages in a folder, by name."""
    return sorted(room.parent.name for room in (REPO / folder).glob("*/__init__.py"))


def check_flows() -> None:
    """Raise SystemExit where `FLOWS` has other streams than the code, or a service that does not use one."""
    in_code = {str(stream) for stream in StreamName if stream.lane is Lane.TRAIN}
    listed = {flow.stream for flow in FLOWS}
    if in_code != listed:
        raise SystemExit(f"common/wire/keys.py has the streams {sorted(in_code)}, FLOWS has {sorted(listed)}")
    for flow in FLOWS:
        for service in {*flow.writers, *flow.readers}:
            files = [
                *(REPO / "services" / service).rglob("*.py"),
                *(REPO / "common" / "streams").rglob("*.py"),
            ]
            if not any(re.search(rf"keys\.{flow.stream}\b", file.read_text()) for file in files):
                raise SystemExit(
                    f"FLOWS says that {service} uses {flow.stream}, but nothing in its folder does"
                )


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, kind: str, radius: int = 6) -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="{radius}" class="{kind}"/>'


def chips(x: float, y: float, width: float, names: Sequence[str]) -> tuple[list[str], float]:
    """Rooms as small boxes, row by row; and the y at which they end."""
    drawn = []
    chip_x = x
    for name in names:
        size = 16 + 7.7 * len(name)
        if chip_x + size > x + width:
            chip_x = x
            y += CHIP + 6
        drawn += [box(chip_x, y, size, CHIP, "chip", 4), text(chip_x + 8, y + 18, name)]
        chip_x += size + 6
    return drawn, y + CHIP


def service(name: str, folder: str, x: float, y: float, width: float) -> tuple[list[str], float]:
    """The box of a service with its rooms, without its frame; and the y at which it ends."""
    drawn = [text(x + 14, y + 26, name, "title"), text(x + 14, y + 46, TASKS[name], "small")]
    rooms, end = chips(x + 14, y + 60, width - 28, rooms_of(folder))
    return drawn + rooms, end + 14


def arrow(x: float, start: float, end: float, kind: str) -> str:
    """A vertical arrow from `start` to `end`."""
    back = -9 if end > start else 9
    head = f'<path d="M{x} {end} l-5 {back} h10 z" class="{kind}"/>'
    return f'<path d="M{x} {start} V{end + back}" class="{kind} flow" fill="none"/>{head}'


def flows(top: float, bus: float) -> Iterator[str]:
    """The streams as lines, and an arrow for each service that writes or reads one."""
    uses: dict[str, list[tuple[int, str]]] = {name: [] for name in COLUMN}
    for number, flow in enumerate(FLOWS):
        for kind, services in (("write", flow.writers), ("read", flow.readers)):
            for name in services:
                uses[name].append((number, kind))
    for number, flow in enumerate(FLOWS):
        y = bus + number * BUS_LINE
        yield f'<path d="M{MARGIN + 220} {y} H{WIDTH - MARGIN - 14}" class="bus"/>'
        yield text(MARGIN + 14, y - 2, flow.stream, "name") + text(MARGIN + 14, y + 14, flow.note, "small")
    for name, used in uses.items():
        left_edge, width = COLUMN[name]
        first = max(left_edge, MARGIN + 220)
        for position, (number, kind) in enumerate(used, start=1):
            x = round(first + (left_edge + width - first) * position / (len(used) + 1))
            y = bus + number * BUS_LINE
            yield arrow(x, top, y - 2, kind) if kind == "write" else arrow(x, y - 2, top, kind)
            yield f'<circle cx="{x}" cy="{y}" r="4" class="{kind}"/>'


def draw() -> str:
    check_flows()
    parts: list[str] = []
    drawn = {name: service(name, f"services/{name}", *_place(name)) for name in COLUMN}
    end = max(bottom for _, bottom in drawn.values())
    for name, (content, _) in drawn.items():
        left_edge, width = COLUMN[name]
        parts += [box(left_edge, TOP, width, end - TOP, "box"), *content]
    redis = end + 64
    bus = redis + 48
    redis_end = bus + (len(FLOWS) - 1) * BUS_LINE + 30
    parts += [box(MARGIN, redis, WIDTH - 2 * MARGIN, redis_end - redis, "redis")]
    parts += [text(MARGIN + 14, redis + 22, "Redis Streams", "title"), *flows(end, bus), *_legend(end)]
    below = redis_end + GAP
    console, below_end = service("console", "services/console", MARGIN, below, WIDTH - 2 * MARGIN)
    parts += [box(MARGIN, below, WIDTH - 2 * MARGIN, below_end - below, "box"), *console]
    shared, shared_end = service("common", "common", MARGIN, below_end + GAP, WIDTH - 2 * MARGIN)
    parts += [box(MARGIN, below_end + GAP, WIDTH - 2 * MARGIN, shared_end - below_end - GAP, "box"), *shared]
    height = round(shared_end + MARGIN)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        'aria-label="Services, their rooms, and the streams between them">\n'
    )
    body = "\n".join([box(0, 0, WIDTH, height, "page", 0), *parts])
    return (
        f"{head}<!-- Made by python -m infra.docs.architecture -->\n<style>{STYLE}</style>\n{body}\n</svg>\n"
    )


def _place(name: str) -> tuple[float, float, float]:
    left_edge, width = COLUMN[name]
    return left_edge, TOP, width


def _legend(end: float) -> list[str]:
    y = end + 36
    return [
        arrow(MARGIN + 20, y - 14, y + 8, "write"),
        text(MARGIN + 32, y, "writes"),
        arrow(MARGIN + 96, y + 8, y - 14, "read"),
        text(MARGIN + 108, y, "reads"),
    ]


if __name__ == "__main__":
    sys.exit(keep({DRAWING: draw()}, "infra.docs.architecture", sys.argv[1:]))

"""Fits the live view into the lines of a terminal.

A view is a list of sections, in the order in which they are shown. Where they have more lines than the
terminal, lines are given out in the order of importance: first to each section its least number, then to each
as many as it can use. A section that cannot show all of its items says how many it leaves out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.text import Text


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the view: items that can be left out one by one, the least urgent first.

    Example: `name` "workers", eight `items`, on a screen with five lines for them: four are drawn, and a line
    says that four workers are left out.
    """

    name: str
    """What its items are, for the line that names how many are left out."""
    items: Sequence[Any]
    draw: Callable[[Sequence[Any]], RenderableType]
    importance: int = 0
    """Of the section among others: the greater, the sooner it gets lines."""
    least: int = 1
    """Lines that it gets in the first round, before any section gets more than its own `least`."""
    has_space: bool = False
    """Whether an empty line stands before it, where all sections are shown in full."""
    urgency: Callable[[Any], int] = lambda _: 0
    """Of an item among those of its section: where some are left out, those with the greatest number are
    shown, the most urgent first, and of equal ones the first."""

    def drawn(self, count: int) -> RenderableType:
        """The `count` most urgent items, and how many others are left out. Where none is, all are drawn in
        their order."""
        num_hidden = len(self.items) - count
        if not num_hidden:
            return self.draw(self.items)
        # Stable, also in reverse: equal items stay in their order.
        most_urgent = sorted(self.items, key=self.urgency, reverse=True)[:count]
        words = f"not shown: {num_hidden} of {len(self.items)} {self.name}"
        more = Text(words, "dim", no_wrap=True, overflow="ellipsis")
        return Group(self.draw(most_urgent), more) if count else more


def whole(sections: Sequence[Section]) -> RenderableType:
    """All sections in full."""
    parts: list[RenderableType] = []
    for section in sections:
        if section.items:
            if section.has_space:
                parts.append("")
            parts.append(section.draw(section.items))
    return Group(*parts)


def fitted(sections: Sequence[Section], console: Console, height: int) -> RenderableType:
    """The sections within `height` lines of the console's width: in full, or as far as they fit."""
    present = [section for section in sections if section.items]
    heights = [lines_of(console, section.drawn(len(section.items))) for section in present]
    num_spaces = sum(section.has_space for section in present)
    if sum(heights) + num_spaces <= height:
        return whole(present)
    # Sections by their numbers in `present`, the most important first.
    order = sorted(range(len(present)), key=lambda number: -present[number].importance)
    lines = [0] * len(present)
    """How many lines each section gets."""
    room = height
    for number in order:
        lines[number] = min(present[number].least, heights[number], room)
        room -= lines[number]
    for number in order:
        more = min(heights[number] - lines[number], room)
        lines[number] += more
        room -= more
    parts = [drawn_within(console, section, lines[number]) for number, section in enumerate(present)]
    return Group(*(picture for picture in parts if picture is not None))


def drawn_within(console: Console, section: Section, num_lines: int) -> RenderableType | None:
    """As many of the section's items as fit into so many lines; None where no line is left."""
    if not num_lines:
        return None
    for count in range(len(section.items), 0, -1):
        picture = section.drawn(count)
        if lines_of(console, picture) <= num_lines:
            return picture
    return section.drawn(0)


def lines_of(console: Console, picture: RenderableType) -> int:
    options = console.options.update(height=None)
    return len(console.render_lines(picture, options, pad=False))

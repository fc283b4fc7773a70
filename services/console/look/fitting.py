"""Fits the live view into a terminal: the most important first; what is left out is named, with its number.

A view is a list of sections, in the order in which they are shown. Each gets its least number of lines in the
order of importance, then as many as it can use.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.text import Text


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the view: items that can be left out one by one, the last of them first.

    Example: `name` "workers", eight `items`, on a screen with five lines for them: four are drawn, and a line
    says that four workers are left out.
    """

    name: str
    """What its items are, for the line that names how many are left out."""
    items: Sequence[Any]
    draw: Callable[[Sequence[Any]], RenderableType]
    importance: int = 0
    """The greater, the sooner it gets lines."""
    least: int = 1
    """Lines that it gets before more important sections get more than theirs."""
    has_space: bool = False
    """Whether an empty line stands before it, where there is room."""
    urgency: Callable[[Any], int] = lambda _: 0
    """Where items are left out, those with the lowest number stay."""

    def drawn(self, count: int) -> RenderableType:
        """The first `count` items, and how many are left out."""
        num_hidden = len(self.items) - count
        if not num_hidden:
            return self.draw(self.items)
        most_urgent = sorted(self.items, key=self.urgency)[:count]
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
    """The sections within `height` lines of the console's width."""
    present = [section for section in sections if section.items]
    heights = [lines_of(console, section.drawn(len(section.items))) for section in present]
    num_spaces = sum(section.has_space for section in present)
    if sum(heights) + num_spaces <= height:
        return whole(present)
    by_importance = sorted(range(len(present)), key=lambda index: -present[index].importance)
    lines = dict.fromkeys(by_importance, 0)
    room = height
    for index in by_importance:
        lines[index] = min(present[index].least, heights[index], room)
        room -= lines[index]
    for index in by_importance:
        more = min(heights[index] - lines[index], room)
        lines[index] += more
        room -= more
    parts = [drawn_within(console, section, lines[index]) for index, section in enumerate(present)]
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

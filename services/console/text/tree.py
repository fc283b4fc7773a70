"""A record as a tree of labelled values, and how the tree is printed.

One function for each kind of record makes its tree. How a value reads depends on its unit alone, and is
decided here for the terminal and for HTML (web/templates/tree.html); programs get the record itself, by
`jsonable`.

Guarantee: text has no effect but to be shown, whatever its source. Markup is never interpreted, and
characters that a terminal would act on, or that change the order of reading, are shown as escapes.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tidemill.common.digits import few_digits
from tidemill.services.console.text.formats import (
    NOTHING,
    printable,
    printable_block,
    share,
    size,
    took,
    when,
)

MAX_CHARACTERS = {"": 300, "text": 4000, "cell": 60}
"""Characters shown of a text in a line, in a block and in a cell of a table, unless all are asked for."""
MAX_ITEMS = 24
"""Elements of an array that are shown; JSON has all."""
PIPE_WIDTH = 200
"""Columns of a table that goes into a file or another program."""
FORMATS = {"s": took, "time": when, "bytes": size, "share": share}
NUMBERS = ("s", "share", "bytes")
"""Units whose columns are aligned to the right; so are those that hold only numbers."""


@dataclass(frozen=True, slots=True)
class Node:
    """A labelled value, or a labelled part with children.

    Units: `s`, `time` (seconds since 1970), `share`, `bytes`; `text` keeps its line breaks; `note` is a line
    of its own without a label; `table` has a child for each row, whose children are its cells. No unit: a
    number, an array, or text in one line.

    Example: `Node("latency", 2.5, "s")` is the line `latency  2.5 s`, and the field `2.5` of JSON.
    """

    label: str
    value: Any = None
    unit: str = ""
    children: tuple["Node", ...] = ()
    style: str = ""
    """Style of the value, as rich names it."""
    link: str = ""
    """Address of the page that it links to, relative to the run's own page."""

    @property
    def is_part(self) -> bool:
        """Whether it stands by itself; neighbours that do not are lines of one list."""
        is_free_text = self.unit == "text" and not self.label
        return bool(self.children) or self.unit in ("note", "table") or is_free_text


def part(label: str, *children: Node | Iterable[Node]) -> Node:
    """A node with the given children, or with those of the given iterables."""
    nodes: list[Node] = []
    for child in children:
        nodes += [child] if isinstance(child, Node) else child
    return Node(label, children=tuple(nodes))


def note(text: str, style: str = "") -> Node:
    return Node("", text, "note", style=style)


def table(rows: Iterable[Mapping[str, Any]], units: Mapping[str, str] | None = None) -> Node:
    """A table of mappings from titles to values or nodes; `units` by title. Columns without values are left
    out."""

    def cell(title: str, value: Any) -> Node:
        return value if isinstance(value, Node) else Node(title, value, (units or {}).get(title, ""))

    cells_by_row = []
    for row in rows:
        cells_by_row.append([cell(title, value) for title, value in row.items()])
    kept = {cell.label for cells in cells_by_row for cell in cells if cell.value not in (None, "")}
    lines = []
    for cells in cells_by_row:
        lines.append(Node("", children=tuple(cell for cell in cells if cell.label in kept)))
    return Node("", unit="table", children=tuple(lines))


def value_text(value: Any, unit: str = "", is_full: bool = False) -> str:
    """A value as text, which is not escaped yet."""
    if value is None or (isinstance(value, str) and not value):
        return NOTHING
    if unit in FORMATS:
        return FORMATS[unit](value)
    if isinstance(value, float):
        return few_digits(value, 4)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, np.ndarray):
        return _list_text(value.tolist(), is_full)
    if isinstance(value, bytes | bytearray):
        head = bytes(value if is_full else value[:MAX_ITEMS])
        more = " ..." if len(head) < len(value) else ""
        return f"{len(value):,} bytes: {head.hex(' ')}{more}"
    return value if isinstance(value, str) else repr(value)


def _list_text(items: list[Any], is_full: bool) -> str:
    """`[0.5, 1, 7]`, or the first items and how many there are."""
    head = items if is_full else items[:MAX_ITEMS]
    texts = [f"{item:.5g}" if isinstance(item, float) else str(item) for item in head]
    if len(head) < len(items):
        texts.append(f"... {len(items):,} in all")
    return f"[{', '.join(texts)}]"


def terminal() -> Console:
    """A console; without a terminal its tables have `PIPE_WIDTH` columns."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PIPE_WIDTH)


def print_tree(console: Console, tree: Node, is_full: bool = False) -> None:
    """The whole tree; `is_full` shows texts and arrays to their ends."""
    if tree.label:
        console.print(Text(tree.label, "bold"), soft_wrap=True)
    for item in lines_together(tree.children):
        if isinstance(item, list):
            console.print(lines_table(item, is_full))
        elif item.unit == "table":
            console.print(rows_table(item, is_full))
        elif item.children:
            console.print()
            print_tree(console, item, is_full)
        else:
            console.print(_text(item, is_full), soft_wrap=True)


def show(
    record: Any, tree: Node, as_json: bool, is_full: bool = False, json_indent: int | None = None
) -> None:
    """Print a command's result: the record as JSON, or its tree for people."""
    if as_json:
        print(json.dumps(jsonable(record), indent=json_indent))
    else:
        print_tree(terminal(), tree, is_full)


def lines_together(nodes: Iterable[Node]) -> Iterator[Node | list[Node]]:
    """Parts one by one, and lines that follow each other as one list."""
    lines: list[Node] = []
    for node in nodes:
        if not node.is_part:
            lines.append(node)
            continue
        if lines:
            yield lines
            lines = []
        yield node
    if lines:
        yield lines


def _text(node: Node, is_full: bool, kind: str = "") -> Text:
    text = value_text(node.value, node.unit, is_full)
    is_block = node.unit == "text"
    limit = 0
    if not is_full and node.unit != "note":
        limit = MAX_CHARACTERS["text" if is_block else kind]
    words = printable_block(text, limit) if is_block else printable(text, limit)
    return Text(words, node.style)


def name_table(style: str = "dim", indent: int = 2) -> Table:
    """A table of names and their values, without a header."""
    lines = Table(box=None, show_header=False, padding=(0, 2, 0, indent))
    lines.add_column(style=style, no_wrap=True)
    lines.add_column(overflow="fold")
    return lines


def lines_table(
    nodes: Iterable[Node], is_full: bool = False, grid: Literal["", "left", "right"] = ""
) -> Table:
    """Names and values, one a line; in a `grid` no line is broken, and values are aligned to that side."""
    lines = name_table(indent=0 if grid else 2)
    if grid:
        lines.pad_edge = False
        lines.columns[1].justify = grid
        lines.columns[1].no_wrap = True
        lines.columns[1].overflow = "ellipsis"  # a number that lost its last digits is another number
    for node in nodes:
        lines.add_row(Text(printable(node.label, 32)), _text(node, is_full))
    return lines


def rows_table(node: Node, is_full: bool = False, has_edges: bool = True) -> Table:
    """A table whose cells have one line each, except in the last column; a missing cell is empty. `has_edges`
    puts an empty line before and after it."""
    rows = []
    for line in node.children:
        rows.append({cell.label: cell for cell in line.children})
    titles = list(dict.fromkeys(title for row in rows for title in row))
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_header=any(titles))
    grid.show_edge = has_edges
    for title in titles:
        cells = [row[title] for row in rows if title in row]
        is_number = all(cell.unit in NUMBERS or isinstance(cell.value, int | float | None) for cell in cells)
        is_last = title == titles[-1]
        grid.add_column(
            title,
            justify="right" if is_number else "left",
            no_wrap=not is_last,
            overflow="fold" if is_last else "ellipsis",
        )
    for row in rows:
        grid.add_row(*(_text(row[title], is_full, "cell") if title in row else "" for title in titles))
    return grid


def jsonable(value: Any) -> Any:
    """The value as JSON has it: records as their fields, arrays as lists, bytes in hex, null for numbers that
    are not finite."""
    if isinstance(value, np.ndarray):
        return jsonable(value.tolist())
    if isinstance(value, BaseModel):
        return jsonable(value.model_dump())
    if is_dataclass(value):
        return {item.name: jsonable(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, bytes | bytearray):
        return bytes(value).hex()
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, int | float | str | bool | None) else str(value)

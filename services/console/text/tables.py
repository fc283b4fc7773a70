"""The tables of the command line: lists with a header, and names with their values."""

import math
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

import numpy as np
from pydantic import BaseModel
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tidemill.common.streams.selection import Range

PIPE_WIDTH = 200
"""Columns of a table that goes into a file or another program."""
Line = tuple[str, str]
"""A name and its value."""


def terminal() -> Console:
    """A console whose tables are not squeezed where nobody looks at them."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PIPE_WIDTH)


def print_lines(console: Console, lines: Iterable[Line]) -> None:
    """Names and values, one a line."""
    table = name_table()
    for name, value in lines:
        table.add_row(name, Text(value))
    console.print(table)


def listing(titles: Iterable[str], right: Container[str] = (), folds: Container[str] = ()) -> Table:
    """A table with a header; columns in `right` are numbers, those in `folds` break their lines."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for title in titles:
        table.add_column(
            title,
            justify="right" if title in right else "left",
            no_wrap=title not in folds,
            overflow="fold" if title in folds else "ellipsis",
        )
    return table


def name_table(style: str = "dim", indent: int = 2, max_width: int | None = None) -> Table:
    """A table of names and their values, without a header."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, indent))
    table.add_column(style=style, no_wrap=True, max_width=max_width)
    table.add_column(overflow="fold")
    return table


def plain_fields(message: BaseModel) -> dict[str, Any]:
    """The fields of a message; inner models become mappings, arrays stay."""
    return {
        name: value.model_dump() if isinstance(value, BaseModel) else value
        for name, value in message.__dict__.items()
        if name in type(message).model_fields
    }


def jsonable(value: Any) -> Any:
    """The value as JSON has it: arrays as lists, bytes in hex, null for numbers that are not finite."""
    if isinstance(value, np.ndarray):
        return jsonable(value.tolist())
    if isinstance(value, BaseModel):
        return jsonable(value.model_dump())
    if isinstance(value, bytes | bytearray):
        return bytes(value).hex()
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, int | float | str | bool | None) else str(value)


def parse_range(text: str, parse: Callable[[str], float] = float) -> Range | None:
    """`A..B`, `A..`, `..B` or `A`; None where neither end is given.

    Raises:
        ValueError: an end cannot be parsed.
    """
    first, dots, last = text.partition("..")
    low = parse(first.strip()) if first.strip() else None
    high = (parse(last.strip()) if last.strip() else None) if dots else low
    return None if low is None and high is None else (low, high)

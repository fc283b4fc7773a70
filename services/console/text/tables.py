"""The tables of the command line: lists with a header, and names with their values."""

from collections.abc import Container, Iterable

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

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

"""Named values on a terminal, one a line: text with its control characters visible, long ones cut short."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from services.console.shown_text import printable, printable_block

MAX_SHOWN_ITEMS = 24
"""Elements of an array that are shown; JSON has all."""
MAX_SHOWN_CHARACTERS = 600


def print_values(console: Console, title: str, values: Mapping[str, Any], is_full: bool = False) -> None:
    """A title, and the values under it."""
    console.print(Text(f"\n{title}", "bold"))
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 2))
    table.add_column(style="dim", no_wrap=True, max_width=24)
    table.add_column(overflow="fold")
    for name, value in values.items():
        table.add_row(Text(printable(name, 24)), Text(brief(value, is_full)))
    console.print(table)


def brief(value: Any, is_full: bool = False) -> str:
    """A value as text; unless it shall be full, with its first elements only."""
    if isinstance(value, np.ndarray):
        return _items(value.tolist(), len(value) if is_full else MAX_SHOWN_ITEMS)
    if isinstance(value, bytes | bytearray):
        head = bytes(value if is_full else value[:MAX_SHOWN_ITEMS])
        return f"{len(value):,} bytes: {head.hex(' ')}{' ...' if len(head) < len(value) else ''}"
    if is_full:
        return printable_block(value if isinstance(value, str) else repr(value))
    return printable(value if isinstance(value, str) else repr(value), MAX_SHOWN_CHARACTERS)


def _items(values: list[Any], limit: int) -> str:
    items = [f"{item:.5g}" if isinstance(item, float) else str(item) for item in values[:limit]]
    more = [f"... {len(values):,} in all"] if len(values) > limit else []
    return f"[{', '.join([*items, *more])}]"

"""How a benchmark reports: a table for people, then one line of JSON for machines, always the last line."""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

CPU_INFO = Path("/proc/cpuinfo")


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], note: str = "") -> None:
    """Print a table whose first column names the row and whose other columns hold numbers."""
    table = Table(title=title, caption=note, caption_justify="left", title_justify="left")
    for position, column in enumerate(columns):
        table.add_column(column, justify="right" if position else "left")
    for row in rows:
        table.add_row(*row)
    console = Console()
    if not console.is_terminal:
        console = Console(width=110)  # a log file has no width of its own
    console.print(table)


def print_result(result: Mapping[str, Any]) -> None:
    """Print the result as the last line of stdout."""
    print(json.dumps(dict(result)), flush=True)


def print_figures(title: str, figures: Mapping[str, Any], shown: Mapping[str, Any] | None = None) -> None:
    """A table of names and values, of all figures or of those `shown`; then all of them as the result."""
    rows = [(name, str(value)) for name, value in (figures if shown is None else shown).items()]
    print_table(title, ("figure", "value"), rows, machine())
    print_result(figures)


def machine() -> str:
    """The machine in a few words: cores this process may use, processor, Python."""
    cores = len(os.sched_getaffinity(0))
    return f"{cores} cores, {_processor()}, Python {platform.python_version()}"


def _processor() -> str:
    if CPU_INFO.exists():
        for line in CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()

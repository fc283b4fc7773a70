"""What benchmarks share: sides measured in turns, tables for people, and one line of JSON at the end."""

import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

CPU_INFO = Path("/proc/cpuinfo")
Side = TypeVar("Side")
Result = TypeVar("Result")


def in_turns(sides: Mapping[Side, Callable[[], Result]], rounds: int) -> dict[Side, list[Result]]:
    """What each side returns in each round. The order of sides is reversed in every second round, so that
    what else the machine does slows all of them alike."""
    results: dict[Side, list[Result]] = {side: [] for side in sides}
    for number in range(rounds):
        for side in list(sides)[:: -1 if number % 2 else 1]:
            results[side].append(sides[side]())
    return results


def paired_ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """Median over rounds of one side's figure over another's."""
    return round(median(first / second for first, second in zip(over, under, strict=True)), 3)


def print_table(title: str, columns: str, rows: Sequence[Sequence[object]], note: str = "") -> None:
    """Print a table whose first column names the row and whose other columns hold numbers; the names of
    columns have commas between them."""
    table = Table(title=title, caption=note, caption_justify="left", title_justify="left")
    for position, column in enumerate(columns.split(",")):
        table.add_column(column, justify="right" if position else "left")
    for row in rows:
        table.add_row(*map(str, row))
    console = Console()
    if not console.is_terminal:
        console = Console(width=110)  # a log file has no width of its own
    console.print(table)


def print_result(result: Mapping[str, Any]) -> None:
    """Print the result as the last line of stdout."""
    print(json.dumps(dict(result)), flush=True)


def print_figures(title: str, figures: Mapping[str, Any]) -> None:
    """A table of names and values, without those that have a table of their own, and the result."""
    rows = [(name, value) for name, value in figures.items() if not isinstance(value, dict)]
    print_table(title, "figure,value", rows, machine())
    print_result(figures)


def machine() -> str:
    """The machine in a few words: cores this process may use, processor, Python."""
    cores = len(os.sched_getaffinity(0))
    info = CPU_INFO.read_text(errors="replace") if CPU_INFO.exists() else ""
    named = [line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name")]
    return f"{cores} cores, {(named or [platform.machine()])[0]}, Python {platform.python_version()}"

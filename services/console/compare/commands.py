"""`tidemill diff RUN_A RUN_B`: opens two runs, compares them, and says where they part and why."""

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tidemill.common.errors import ConfigError
from tidemill.common.process.programs import run_main
from tidemill.services.console.compare.differences import Aspect, Difference
from tidemill.services.console.compare.run_diff import DiffedRun, RunDiff, diff_runs
from tidemill.services.console.options import DiffOptions
from tidemill.services.console.run.folder import find_run, folder_of_runs
from tidemill.services.console.run.history import RunAccess, open_history
from tidemill.services.console.text.tree import jsonable

MAX_WIDTH = 60
"""Characters of a value in the table; --json has all of it."""
MAX_CONFIG_LINES = 12
MEANINGS = {
    Aspect.PROMPTS: "the same ticket asks for something else: the data, its order or the sampling differs",
    Aspect.VERSIONS: "the same prompt was answered by other versions: timing, or max_staleness",
    Aspect.TOKENS: "the same version answered the same prompt with other tokens: sampling, or weights that "
    "have drifted apart by rounding",
    Aspect.LOGPROBS: "the same tokens have other logprobs: weights or numerics differ",
    Aspect.REWARDS: "the same completion was scored differently: the reward has changed, or is not "
    "reproducible",
    Aspect.GROUPS: "other groups were trained, or others left out",
    Aspect.COMPOSITION: "the same groups were trained in other optimizer updates",
    Aspect.ADVANTAGES: "the same rewards gave other advantages: the algorithm differs",
    Aspect.METRICS: "the same batch gave other numbers: the loss, the optimizer or the hardware differs",
    Aspect.WEIGHTS: "the same batch gave other weights",
}


def show_diff(options: DiffOptions) -> int:
    """Compare and print; returns 0 where nothing differs by more than rounding, else 1.

    Raises:
        ConfigError: one of the runs is not there, or nothing tells its config.
    """
    names, result = run_main(_diff(options))
    if options.as_json:
        tree = {"run_a": names[0], "run_b": names[1], **result.as_dict()}
        print(json.dumps(jsonable(tree), indent=2, allow_nan=False))
    else:
        print_diff(Console(highlight=False), names, result)
    return 1 if result.differences else 0


async def _diff(options: DiffOptions) -> tuple[tuple[str, str], RunDiff]:
    a, b = (options.run_a, options.runs_dir), (options.run_b, options.runs_dir_b or options.runs_dir)
    if _folder(a) == _folder(b):
        raise ConfigError(f"{a[0]} and {b[0]} are the same run; give two.")
    async with open_history(*a) as access_a, open_history(*b) as access_b:
        result = await diff_runs(_opened(access_a), _opened(access_b), options.tolerance)
        return (access_a.run_id, access_b.run_id), result


def _folder(run: tuple[str, Path | None]) -> Path:
    return find_run(run[0], folder_of_runs(run[1])).path.resolve()


def _opened(access: RunAccess) -> DiffedRun:
    if access.config is None:
        raise ConfigError(f"run {access.run_id} has no config.yaml in {access.folder.path}; it needs one.")
    return DiffedRun(access.history, access.config)


def print_diff(console: Console, names: tuple[str, str], result: RunDiff) -> None:
    """The verdict, then what differs at the first step, then what differed before by rounding."""
    _print_config(console, result)
    cause = result.cause
    if cause is None:
        console.print(_agreement(result), soft_wrap=True)
    else:
        where = _where(cause)
        head = Text(f"first difference: step {cause.step}, {cause.aspect}", style="bold red")
        console.print(head.append(f" {where}" if where else "", style="bold"), soft_wrap=True)
        console.print(f"  {MEANINGS[cause.aspect]}", soft_wrap=True)
        console.print(_table(names, result.differences))
    if result.earlier:
        words = [f"{item.aspect} since step {item.step}" for item in result.earlier]
        console.print(f"[dim]by rounding or in order alone: {', '.join(words)}[/]", soft_wrap=True)
    if result.unread_steps:
        first, last = result.unread_steps[0], result.unread_steps[-1]
        console.print(
            f"[yellow]steps {first} to {last}: not both runs have their records any more; their commits were "
            "compared[/]",
            soft_wrap=True,
        )
    if cause is not None:
        _print_next(console, names, cause)


def _print_config(console: Console, result: RunDiff) -> None:
    for change in result.config[:MAX_CONFIG_LINES]:
        line = Text("config  ", style="dim").append(change["field"], style="bold")
        console.print(line.append(f": {_short(change['a'])} | {_short(change['b'])}"), soft_wrap=True)
    if len(result.config) > MAX_CONFIG_LINES:
        console.print(f"[dim]config  ... and {len(result.config) - MAX_CONFIG_LINES} more fields; --json[/]")


def _agreement(result: RunDiff) -> Text:
    how = "bit for bit" if result.is_equal else "up to rounding"
    text = Text(f"the same {how} in all {result.num_steps} steps that both have", style="bold green")
    return text.append(f"; run {result.longer} has more" if result.longer else "", style="")


def _table(names: tuple[str, str], differences: list[Difference]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("differs", "first at", "", *names):
        table.add_column(name, overflow="fold")
    for item in differences:
        style = "dim" if item.is_rounding else ""
        more = f" (+{item.num_places - 1})" if item.num_places > 1 else ""
        name = f"{item.aspect}{more}{', rounding' if item.is_rounding else ''}"
        table.add_row(name, _where(item), item.what, *_values(item), style=style)
    return table


def _where(item: Difference) -> str:
    if item.ticket < 0:
        return ""
    return f"{item.ticket}.{item.index}" if item.index >= 0 else str(item.ticket)


def _print_next(console: Console, names: tuple[str, str], cause: Difference) -> None:
    lines = [f"tidemill step {cause.step} {names[1]}"]
    if where := _where(cause):
        lines.append(f"tidemill trace {where} {names[1]}")
    lines.append(f"tidemill replay {cause.step} {names[1]}")
    console.print("look closer:", style="dim")
    for line in lines:
        console.print(f"  {line}", soft_wrap=True)


def _values(item: Difference) -> tuple[str, str]:
    if item.aspect is Aspect.WEIGHTS:
        return str(item.a)[:12], str(item.b)[:12]
    if isinstance(item.a, float) and isinstance(item.b, float):
        short = f"{item.a:.7g}", f"{item.b:.7g}"
        return short if short[0] != short[1] else (repr(item.a), repr(item.b))
    return _short(item.a), _short(item.b)


def _short(value: Any) -> str:
    if isinstance(value, dict) and "ids" in value:
        value = f"{value['ids']} {value['text']!r}"
    text = repr(value) if isinstance(value, float) else str(value)
    return text if len(text) <= MAX_WIDTH else text[: MAX_WIDTH - 3] + "..."

"""`tidemill diff RUN_A RUN_B`: opens two runs, compares them, and says where they part and why."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tidemill.common.errors import ConfigError
from tidemill.common.process.programs import run_main
from tidemill.services.console.compare.differences import Aspect, Difference
from tidemill.services.console.compare.run_diff import DiffedRun, RunDiff, diff_runs
from tidemill.services.console.options import DiffOptions
from tidemill.services.console.run.folder import find_run, folder_of_runs
from tidemill.services.console.run.history import RunAccess, open_history
from tidemill.services.console.text.tree import Node, jsonable, note, part, print_tree, table, terminal

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
        print_tree(terminal(), diff_tree(names, result))
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


def diff_tree(names: tuple[str, str], result: RunDiff) -> Node:
    """The verdict, then what differs at the first step, then what differed before by rounding."""
    return part(
        "", _config_notes(result), _verdict(names, result), _remarks(result), _next(names, result.cause)
    )


def _config_notes(result: RunDiff) -> Iterator[Node]:
    for change in result.config[:MAX_CONFIG_LINES]:
        yield note(f"config  {change['field']}: {_short(change['a'])} | {_short(change['b'])}")
    if len(result.config) > MAX_CONFIG_LINES:
        yield note(f"config  ... and {len(result.config) - MAX_CONFIG_LINES} more fields; --json", "dim")


def _verdict(names: tuple[str, str], result: RunDiff) -> Iterator[Node]:
    if (cause := result.cause) is None:
        how = "bit for bit" if result.is_equal else "up to rounding"
        more = f"; run {result.longer} has more" if result.longer else ""
        yield note(f"the same {how} in all {result.num_steps} steps that both have{more}", "bold green")
        return
    where = f" {cause.sample}" if cause.ticket >= 0 else ""
    yield note(f"first difference: step {cause.step}, {cause.aspect}{where}", "bold red")
    yield note(f"  {MEANINGS[cause.aspect]}")
    yield table(_difference_row(names, item) for item in result.differences)


def _difference_row(names: tuple[str, str], item: Difference) -> dict[str, Any]:
    more = f" (+{item.num_places - 1})" if item.num_places > 1 else ""
    a, b = _values(item)
    return {
        "differs": f"{item.aspect}{more}{', rounding' if item.is_rounding else ''}",
        "first at": item.sample if item.ticket >= 0 else "",
        "what": item.what,
        f"a: {names[0]}": a,
        f"b: {names[1]}": b,
    }


def _remarks(result: RunDiff) -> Iterator[Node]:
    if result.earlier:
        words = ", ".join(f"{item.aspect} since step {item.step}" for item in result.earlier)
        yield note(f"by rounding or in order alone: {words}", "dim")
    if result.unread_steps:
        first, last = result.unread_steps[0], result.unread_steps[-1]
        words = "not both runs have their records any more; their commits were compared"
        yield note(f"steps {first} to {last}: {words}", "yellow")


def _next(names: tuple[str, str], cause: Difference | None) -> Iterator[Node]:
    if cause is not None:
        yield note("look closer:", "dim")
        commands = [f"step {cause.step}", f"replay {cause.step}"]
        commands += [f"trace {cause.sample}"] if cause.ticket >= 0 else []
        yield from (note(f"  tidemill {command} {names[1]}") for command in commands)


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

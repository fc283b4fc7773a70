"""`tidemill replay`: opens the run's history, starts the replay as a process, shows its results.

The process is `python -m tidemill.services.trainer.replay`: torch is imported there, and not by the console.
"""

import asyncio
import contextlib
import json
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tidemill.common.errors import ConfigError, TidemillError
from tidemill.common.process.programs import Program, run_own
from tidemill.common.redis.client import URL_VARIABLE
from tidemill.services.console.commands import ReplayOptions
from tidemill.services.console.look.selection import parse_steps
from tidemill.services.console.run.history import RunAccess, read_run
from tidemill.services.console.text import tree
from tidemill.services.console.text.tree import Node, note, part, show, table

HEADLINES = ("loss", "grad_norm", "reward", "entropy", "learning_rate")
"""Metrics that are shown in any case, in this order."""
FEW_DIGITS = 9
FAR_STEPS = 10
"""From this number of steps replayed before the wanted one, a hint at keeping more checkpoints is shown."""


def _start_progress(steps: list[int], is_quiet: bool) -> tuple[Progress, Callable[[dict[str, Any]], None]]:
    """A progress bar on stderr, hidden without a terminal, and the function that moves it with each event of
    the process."""
    console = Console(stderr=True, highlight=False)
    columns = (TextColumn("[progress.description]{task.description}"), BarColumn(), MofNCompleteColumn())
    is_hidden = is_quiet or not console.is_terminal
    bar = Progress(*columns, TimeElapsedColumn(), console=console, transient=True, disable=is_hidden)
    task = bar.add_task("loading the model", total=None)

    def take(event: dict[str, Any]) -> None:
        if event["kind"] == "start":
            version = event["version"]
            label = f"replaying from {_start_name(version)}"
            bar.reset(task, total=steps[-1] + 1 - version, description=label)
        elif event["kind"] == "step":
            bar.advance(task)

    return bar, take


def _start_name(version: int) -> str:
    return f"version {version}" if version else "the starting model"


def result_tree(result: dict[str, Any], shows_all: bool = False) -> Node:
    num_different = sum(not row["equal"] for row in result["metrics"])
    difference = f"{num_different} metrics differ" if num_different else "the advantages differ"
    words = f"the same weights, but {difference}"
    style = "yellow"
    if result["equal"]:
        words = "bit-identical"
        style = "bold green"
    elif not result["digest"]["equal"]:
        words = "differs from what was recorded"
        style = "bold red"
    verdict = note(f"step {result['step']}, which made version {result['version']}: {words}", style)
    remarks = (note(line, "dim") for line in _remarks(result, shows_all))
    return part("", verdict, table(_number_rows(result, shows_all)), remarks)


def _number_rows(result: dict[str, Any], shows_all: bool) -> Iterator[dict[str, Any]]:
    """The headlines and what differs, with all digits where it does; the digest comes last."""
    rows = {row["name"]: row for row in result["metrics"]}
    for name in dict.fromkeys((*HEADLINES, *rows)):
        row = rows.get(name)
        if row and (shows_all or name in HEADLINES or not row["equal"]):
            in_words = _in_few_digits if row["equal"] else repr
            recorded = in_words(row["recorded"])
            replayed = in_words(row["replayed"])
            outcome = _outcome(row["equal"], f" by {row['difference']:.3g}")
            yield {"metric": name, "recorded": recorded, "replayed": replayed, "outcome": outcome}
    digest = result["digest"]
    short = {name: digest[name][:12] for name in ("recorded", "replayed")}
    yield {"metric": "digest", **short, "outcome": _outcome(digest["equal"])}


def _in_few_digits(number: float) -> str:
    return f"{number:.{FEW_DIGITS}g}"


def _outcome(is_equal: bool, by: str = "") -> Node:
    return Node("outcome", "same" if is_equal else f"differs{by}", style="green" if is_equal else "red")


def _remarks(result: dict[str, Any], shows_all: bool) -> Iterator[str]:
    if not shows_all:
        same = sum(row["equal"] for row in result["metrics"])
        yield f"{same} of {len(result['metrics'])} metrics are the same; --all shows them all"
    first = result["advantages"]["first"]
    if first:
        yield (
            f"{result['advantages']['num_different']} advantages differ, the first is that of "
            f"{first['ticket']}.{first['index']}: {first['recorded']} recorded, {first['replayed']} replayed"
        )
    if not result["left_out"]["equal"]:
        yield "other samples are left out of their groups than were then; --json lists both"
    first_step = result["first_difference"]
    if first_step is not None and first_step < result["step"]:
        yield f"the weights differ since step {first_step}: look at that step first"
    num_steps = result["step"] - result["from_version"]
    if num_steps >= FAR_STEPS:
        start = _start_name(result["from_version"])
        yield (
            f"{num_steps} steps before it were trained again, from {start}: the nearest checkpoint; "
            "trainer.keep_checkpoints keeps more of them (docs/debugging.md says what they cost)"
        )
    weights = result.get("weights")
    if weights:
        numbers = (f"{name.replace('_', ' ')} {tree.value_text(value)}" for name, value in weights.items())
        yield f"weights, against those on the disk: {', '.join(numbers)}"


MAX_STEPS = 10_000
LINE_BYTES = 64 << 20
"""Longest line that is read from the process."""


def replay_steps(options: ReplayOptions) -> int:
    steps = listed_steps(options.steps)
    results = read_run(options, lambda access: _replay(access, options, steps))
    trees = [child for result in results for child in result_tree(result, options.shows_all).children]
    show(results, part("", trees), options.as_json, json_indent=2)
    return 0 if all(result["equal"] for result in results) else 1


def listed_steps(text: str) -> list[int]:
    """`7`, `3,17` or `10..14`, ascending and without repeats."""
    numbers: set[int] = set()
    for item in text.split(","):
        first, last = parse_steps(item)
        if last - first >= MAX_STEPS:
            raise ConfigError(f"{item.strip()!r} are more than {MAX_STEPS:,} steps.")
        numbers.update(range(first, last + 1))
    return sorted(numbers)


async def _replay(access: RunAccess, options: ReplayOptions, steps: list[int]) -> list[dict[str, Any]]:
    results = []
    bar, take = _start_progress(steps, options.as_json)
    with bar, tempfile.TemporaryFile() as messages:
        command = run_own(Program.REPLAY, "--run", access.run_id, "--run-dir", str(access.folder.path))
        command += ["--steps", ",".join(map(str, steps))]
        async for event in _events(command, access.address, messages):
            if event["kind"] == "result":
                results.append(event)
            elif event["kind"] == "error":
                kind = ConfigError if event["exit_code"] == ConfigError.exit_code else TidemillError
                raise kind(event["message"])
            take(event)
        if len(results) < len(steps):
            messages.seek(0)
            lines = messages.read().decode(errors="replace").strip().splitlines()
            last = lines[-1] if lines else "it said nothing"
            raise TidemillError(f"the replay ended before its last step: {last}")
    return results


async def _events(command: list[str], address: str, messages: IO[bytes]) -> AsyncIterator[dict[str, Any]]:
    """The events that the process prints, one a line; it is killed when the caller stops reading."""
    variables = os.environ | {URL_VARIABLE: address}
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=messages, env=variables, limit=LINE_BYTES
    )
    assert process.stdout is not None
    try:
        async for line in process.stdout:
            yield json.loads(line)
        await process.wait()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

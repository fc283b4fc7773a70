"""`tidemill replay`: opens the run's history, starts the replay as a process, shows what it says.

The process is `python -m tidemill.services.trainer.replay`: torch is imported there, and not by the console.
"""

import asyncio
import contextlib
import json
import os
import tempfile
from collections.abc import AsyncIterator
from types import TracebackType
from typing import IO, Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from tidemill.common.errors import ConfigError, TidemillError
from tidemill.common.process.programs import Program, run_main, run_own
from tidemill.common.redis.client import URL_VARIABLE
from tidemill.services.console.options import ReplayOptions
from tidemill.services.console.run.history import RunAccess, open_history
from tidemill.services.console.text.tree import jsonable

HEADLINES = ("loss", "grad_norm", "reward", "entropy", "learning_rate")
"""Metrics that are shown in any case, in this order."""
FEW_DIGITS = 9
FAR_STEPS = 10
"""Replayed on the way to a step: from here on a hint at closer checkpoints is worth its line."""


class ReplayProgress:
    """A bar on stderr over the steps that are trained again; nothing where nobody would see it."""

    def __init__(self, steps: list[int], is_quiet: bool) -> None:
        self.last = steps[-1]
        self.console = Console(stderr=True, highlight=False)
        self._bar = Progress(
            TextColumn("[progress.description]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self.console,
            transient=True,
            disable=is_quiet or not self.console.is_terminal,
        )
        self._task = self._bar.add_task("loading the model", total=None)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def take(self, event: dict[str, Any]) -> None:
        """Follow one event of the process."""
        if event["kind"] == "start":
            version = event["version"]
            what = f"replaying from version {version}" if version else "replaying from the starting model"
            self._bar.reset(self._task, total=self.last + 1 - version, description=what)
        elif event["kind"] == "step":
            self._bar.advance(self._task)


def print_result(console: Console, result: dict[str, Any], shows_all: bool) -> None:
    """The verdict on one step, and its numbers."""
    console.print(_verdict(result), soft_wrap=True)
    console.print(_numbers(result, shows_all))
    for line in _remarks(result, shows_all):
        console.print(line, soft_wrap=True)
    console.print()


def _verdict(result: dict[str, Any]) -> Text:
    step, version = result["step"], result["version"]
    head = Text(f"step {step}, which made version {version}: ", style="bold")
    if result["equal"]:
        return head.append("bit-identical", style="bold green")
    different = [row["name"] for row in result["metrics"] if not row["equal"]]
    if result["digest"]["equal"]:
        text = f"the same weights, but {len(different)} metrics differ"
        return head.append(
            text if different else "the same weights, but the advantages differ", style="yellow"
        )
    return head.append("differs from what was recorded", style="bold red")


def _numbers(result: dict[str, Any], shows_all: bool) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("")
    for name in ("recorded", "replayed"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    rows = {row["name"]: row for row in result["metrics"]}
    for name in [*(n for n in HEADLINES if n in rows), *(n for n in rows if n not in HEADLINES)]:
        row = rows[name]
        if shows_all or name in HEADLINES or not row["equal"]:
            numbers = (row["recorded"], row["replayed"])
            shown = [f"{n:.{FEW_DIGITS}g}" if row["equal"] else repr(n) for n in numbers]
            table.add_row(name, *shown, _difference(row))
    digest = result["digest"]
    table.add_row("digest", digest["recorded"][:12], digest["replayed"][:12], _mark(digest["equal"]))
    return table


def _difference(row: dict[str, Any]) -> Text:
    if row["equal"]:
        return _mark(True)
    return Text(f"differs by {row['difference']:.3g}", style="red")


def _mark(is_equal: bool) -> Text:
    return Text("same", style="green") if is_equal else Text("differs", style="red")


def _remarks(result: dict[str, Any], shows_all: bool) -> list[str]:
    lines = []
    if not shows_all:
        same = sum(row["equal"] for row in result["metrics"])
        lines.append(f"[dim]{same} of {len(result['metrics'])} metrics are the same; --all shows them all[/]")
    if first := result["advantages"]["first"]:
        lines.append(
            f"{result['advantages']['num_different']} advantages differ, the first is that of "
            f"{first['ticket']}.{first['index']}: {first['recorded']} recorded, {first['replayed']} replayed"
        )
    if not result["left_out"]["equal"]:
        lines.append("other samples are left out of their groups than were then; --json lists both")
    if (first_step := result["first_difference"]) is not None and first_step < result["step"]:
        lines.append(f"the weights differ since step {first_step}: look at that step first")
    if (num_steps := result["step"] - result["from_version"]) >= FAR_STEPS:
        start = f"version {result['from_version']}" if result["from_version"] else "the starting model"
        lines.append(
            f"[dim]{num_steps} steps before it were trained again, from {start}: the nearest checkpoint; "
            "trainer.keep_checkpoints keeps more of them (docs/debugging.md says what they cost)[/]"
        )
    if weights := result.get("weights"):
        lines.append("weights, against those on the disk: " + _words(weights))
    return lines


def _words(numbers: dict[str, Any]) -> str:
    return ", ".join(
        f"{name.replace('_', ' ')} {value:.3g}" if isinstance(value, float) else str(value)
        for name, value in numbers.items()
    )


MAX_STEPS = 10_000
LINE_BYTES = 64 << 20
"""Longest line that is read from the process."""


def replay_steps(options: ReplayOptions) -> int:
    """Replay and print; returns the exit code.

    Raises:
        ConfigError: there is no such run or step.
        TidemillError: the records of the steps are not there any more.
    """
    steps = parse_steps(options.steps)
    results = run_main(_replay(options, steps))
    if options.as_json:
        print(json.dumps(jsonable(results), indent=2, allow_nan=False))
    else:
        console = Console(highlight=False)
        for result in results:
            print_result(console, result, options.shows_all)
    return 0 if all(result["equal"] for result in results) else 1


def parse_steps(text: str) -> list[int]:
    """`7`, `3,17` or `10..14`, ascending and without repeats.

    Raises:
        ConfigError: it is none of these.
    """
    found: set[int] = set()
    for part in text.split(","):
        first, dots, last = part.strip().partition("..")
        if not first.isdecimal() or (dots and not last.isdecimal()):
            raise ConfigError(f"{text!r} names no steps: write a number, 3,17 or 10..14.")
        numbers = range(int(first), int(last or first) + 1)
        if not numbers or len(numbers) > MAX_STEPS:
            raise ConfigError(f"{part.strip()!r} must be an ascending range of at most {MAX_STEPS:,} steps.")
        found.update(numbers)
    return sorted(found)


async def _replay(options: ReplayOptions, steps: list[int]) -> list[dict[str, Any]]:
    async with open_history(options.run_id, options.runs_dir) as access:
        results = []
        with ReplayProgress(steps, options.as_json) as progress, tempfile.TemporaryFile() as messages:
            async for event in _events(_command(access, steps), access.address, messages):
                if event["kind"] == "result":
                    results.append(event)
                elif event["kind"] == "error":
                    kind = ConfigError if event["exit_code"] == ConfigError.exit_code else TidemillError
                    raise kind(event["message"])
                progress.take(event)
            if len(results) < len(steps):
                raise TidemillError(f"the replay ended before its last step: {_last_line(messages)}")
        return results


def _command(access: RunAccess, steps: list[int]) -> list[str]:
    command = run_own(Program.REPLAY, "--run", access.run_id, "--run-dir", str(access.folder.path))
    return [*command, "--steps", ",".join(map(str, steps))]


async def _events(command: list[str], address: str, messages: IO[bytes]) -> AsyncIterator[dict[str, Any]]:
    """What the process says, line by line; it ends with us."""
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


def _last_line(messages: IO[bytes]) -> str:
    messages.seek(0)
    lines = messages.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"

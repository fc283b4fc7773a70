"""`tidemill replay step`: opens the run's history, starts the replay as a process, shows what it says.

The process is `python -m services.trainer.replay`: torch is imported there, and not by the console.
"""

import asyncio
import contextlib
import json
import os
import tempfile
from collections.abc import AsyncIterator
from typing import IO, Any

from rich.console import Console

from common.errors import ConfigError, TidemillError
from common.process.programs import Program, run_main, run_own
from common.redis.client import URL_VARIABLE
from services.console.compare.replay_view import ReplayProgress, print_result
from services.console.options import ReplayOptions
from services.console.run.history import RunAccess, open_history
from services.console.text.values import jsonable

MAX_STEPS = 10_000
LINE_BYTES = 64 << 20
"""Longest line that is read from the process."""


def replay_steps(options: ReplayOptions) -> int:
    """Replay and print; returns the exit code.

    Raises:
        ConfigError: there is no such run or step, or a change that cannot be replayed.
        TidemillError: the records of the steps are not there any more.
    """
    steps = parse_steps(options.steps)
    if options.to_torch and len(steps) > 1:
        raise ConfigError("--to-torch writes the batch of one step; name one.")
    if options.with_weights and not options.to_torch:
        raise ConfigError("--with-weights goes with --to-torch FILE.")
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
            async for event in _events(_command(options, access, steps), access.address, messages):
                if event["kind"] == "result":
                    results.append(event)
                elif event["kind"] == "error":
                    kind = ConfigError if event["exit_code"] == ConfigError.exit_code else TidemillError
                    raise kind(event["message"])
                progress.take(event)
            if len(results) < len(steps):
                raise TidemillError(f"the replay ended before its last step: {_last_line(messages)}")
        return results


def _command(options: ReplayOptions, access: RunAccess, steps: list[int]) -> list[str]:
    command = run_own(Program.REPLAY, "--run", access.run_id, "--run-dir", str(access.folder.path))
    command += ["--steps", ",".join(map(str, steps))]
    command += [part for override in options.overrides for part in ("--set", override)]
    if options.to_torch:
        command += ["--to-torch", str(options.to_torch)]
    return [*command, "--with-weights"] if options.with_weights else command


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

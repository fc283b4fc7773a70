"""How a process of this project starts another one: by the module that this project has, and no other.

`python -m NAME` looks into the working directory first, where the user's folders are: one that is called
`services` or `common` would take the place of ours.
"""

import asyncio
import signal
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parents[2]
"""The folder that holds `common` and `services`."""


def run_own(module: str, *arguments: str) -> list[str]:
    """The command line that runs one of our modules."""
    # From our own folder nothing else can be meant, and it may be what makes the modules importable.
    safe = [] if _is_own_folder() else ["-P"]
    return [sys.executable, *safe, "-m", module, *arguments]


def import_from_here() -> None:
    """Let the user's modules in the working directory be imported, after all others and our own."""
    if (folder := str(Path.cwd())) not in sys.path and "" not in sys.path:
        sys.path.append(folder)


def _is_own_folder() -> bool:
    try:
        return Path.cwd() == ROOT
    except OSError:  # the folder has been removed
        return False


T = TypeVar("T")


def run_main(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` on an event loop of its own to its end, and return its result.

    `asyncio.run` gives its main task to the handler of Ctrl-C. When it takes that handler away again,
    Python's signal module puts it into words, and with it the task's whole result: for the records of a run
    these are gigabytes. Here the main task has no result.
    """
    results: list[T] = []

    async def keep_result() -> None:
        results.append(await work)

    asyncio.run(keep_result())  # noqa: TID251
    (result,) = results
    return result


SHELL_OFFSET = 128
"""A shell whose command ended by a signal ends with the signal's number and this."""


def ending_in_words(code: int) -> str:
    """An exit code in words; negative ones are signals, as Python has them: `exit code 3`, `SIGKILL`."""
    if is_illegal_instruction(code):
        return "SIGILL, an illegal instruction"
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def is_illegal_instruction(code: int) -> bool:
    """Whether it ended on an instruction that its CPU lacks or may not use, as it will every time."""
    return code in (-signal.SIGILL, SHELL_OFFSET + signal.SIGILL)

"""`python -m tests.simulation.mutants`: plants bugs, one at a time, and counts schedules until one is seen.

Every bug of `planted.py` is put into a copy of the tree. Schedules run there until one of them fails: first
the one that has seen this bug before, from `known.py` or of a seed, then those from seed 0 on. The last line
is JSON, `{"planted": ..., "caught": ...}`; the exit code is 1 where fewer than 90% of the bugs are caught.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, count, islice
from multiprocessing.connection import Connection
from pathlib import Path

ROOT = Path(__file__).parents[2]
COPIED = ("common", "services", "tidemill", "tests")
BAR = 0.9
HEAVY = (
    "torch",
    "transformers",
    "pyarrow.parquet",
    "pydantic",
    "redis.asyncio",
    "prometheus_client",
    "uvicorn",
)
"""Imported once, for all processes."""


@dataclass(frozen=True)
class Mutant:
    """One edit: `old` stands once in `file`, below the repository, and becomes `new`."""

    name: str
    file: str
    old: str
    new: str
    kept: str = ""
    """The schedule of `known.py` that this bug once made fail. It is the first to run."""
    seed: int = 0
    """In place of a kept schedule: the seed of a drawn one that has seen this bug, and runs first."""


class PlantError(Exception):
    """The edit does not fit the source."""


@dataclass(frozen=True)
class Outcome:
    """What the simulation said of a bug."""

    mutant: Mutant
    problem: str
    num_schedules: int


def edited(mutant: Mutant, root: Path) -> str:
    """The text of the file with the bug in it.

    Raises:
        PlantError: what is to be replaced is not there, or more than once.
    """
    path = root / mutant.file
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    if text.count(mutant.old) != 1:
        raise PlantError(
            f"{mutant.name!r}: {mutant.file} has the text {text.count(mutant.old)} times, expected once: "
            f"{mutant.old!r}. Bring planted.py up to date with the source."
        )
    return text.replace(mutant.old, mutant.new)


@contextmanager
def copied_tree(root: Path) -> Iterator[Path]:
    """A copy of what the simulation imports, on a disk in memory where there is one."""
    memory = Path("/dev/shm")
    parent = str(memory) if memory.is_dir() else None
    folder = Path(tempfile.mkdtemp(prefix="tidemill-mutant-", dir=parent))
    try:
        for name in COPIED:
            # With the compiled files: their sources keep their times, but for the one that is edited.
            shutil.copytree(root / name, folder / name, symlinks=True)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def examine(mutant: Mutant, root: Path, num_schedules: int) -> Outcome:
    """Plant the bug in a copy of the tree at `root`, and run schedules until one fails."""
    context = multiprocessing.get_context("forkserver")
    answer, answering = context.Pipe(duplex=False)
    with copied_tree(root) as tree:
        (tree / mutant.file).write_text(edited(mutant, tree), encoding="utf-8")
        arguments = (tree, mutant.kept, mutant.seed, num_schedules, answering)
        process = context.Process(target=_run_in, args=arguments)
        process.start()
        answering.close()
        try:
            problem, num_run = answer.recv()
        except EOFError:
            # Its traceback is on stderr. A simulation that cannot run has seen nothing.
            problem = ""
            num_run = 0
        process.join()
    return Outcome(mutant, problem, num_run)


def _run_in(tree: Path, kept: str, seed: int, num_schedules: int, answering: Connection) -> None:
    """In a process of its own: run schedules with the code of `tree`."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "tidemill")]:
        del sys.modules[name]
    os.chdir(tree)
    sys.path[:] = [str(tree), *(path for path in sys.path if path not in ("", str(ROOT)))]
    sys.dont_write_bytecode = True
    from tests.simulation.generate import schedule_of
    from tests.simulation.known import KNOWN
    from tests.simulation.run import run

    problem = ""
    num_run = 0
    first = KNOWN[kept] if kept else schedule_of(seed)
    others = (schedule_of(number) for number in count() if kept or number != seed)
    for schedule in islice(chain([first], others), num_schedules):
        num_run += 1
        if problem := run(schedule).problem:
            break
    answering.send((problem, num_run))
    answering.close()
    os._exit(0)  # without warnings about coroutines that never ended


def main() -> int:
    """Examine all planted bugs; returns the exit code."""
    from tests.simulation.planted import PLANTED
    from tests.simulation.reverted import REVERTED

    options = _parser().parse_args()
    wanted = options.only or [""]
    mutants = []
    for mutant in (*PLANTED, *REVERTED):
        if any(text in f"{mutant.name} {mutant.kept}" for text in wanted):
            mutants.append(mutant)
    try:
        for mutant in mutants:
            edited(mutant, ROOT)
    except PlantError as error:
        print(error, file=sys.stderr)
        return 2
    multiprocessing.set_forkserver_preload(list(HEAVY))
    num_caught = 0
    # A copy of the tree as it is now: it may be edited before the last bug is examined.
    with copied_tree(ROOT) as tree, ThreadPoolExecutor(options.jobs) as pool:
        for outcome in pool.map(lambda mutant: examine(mutant, tree, options.schedules), mutants):
            num_caught += bool(outcome.problem)
            schedules = f"{outcome.num_schedules:4}" if outcome.problem else "   -"
            print(f"{schedules}  {outcome.mutant.name}: {outcome.problem[:110] or 'not seen'}", flush=True)
    print(json.dumps({"planted": len(mutants), "caught": num_caught}), flush=True)
    return int(num_caught < BAR * len(mutants))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation.mutants", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--schedules", type=int, default=300, help="most for each (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument(
        "--only", action="append", metavar="TEXT", help="those with this in their name; again for more"
    )
    return parser


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":
        # Sets of text have one order then, in every process.
        command = [sys.executable, "-m", "tests.simulation.mutants", *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | {"PYTHONHASHSEED": "0"})
    sys.exit(main())

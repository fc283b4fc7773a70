"""`python -m tests.simulation --schedules 10000 --seed 0 --jobs 2`: schedules from consecutive seeds.

Ends with one line of JSON; the exit code is 1 where an invariant was violated or a run stalled. Each such
schedule is shrunk, and printed in a form that a regression test can hold.
"""

import argparse
import json
import os
import sys
import time
from collections import Counter
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tests.simulation.generate import schedule_of
from tests.simulation.many import verdicts
from tests.simulation.run import Verdict, run
from tests.simulation.shrink import shrink

MOST_SHRUNK = 8
MOST_WORDS = 2000

console = Console(stderr=True)


def main() -> int:
    """Run the schedules; returns the exit code."""
    options = _parser().parse_args()
    if options.trace:
        return _trace(options.seed, options.tight)
    seeds = range(options.seed, options.seed + options.schedules)
    began = time.monotonic()
    faults = Counter[str]()
    bad = list[Verdict]()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("schedules", total=len(seeds))
        for verdict in verdicts(seeds, options.jobs, options.tight):
            progress.advance(bar)
            faults += verdict.faults
            if verdict.problem:
                bad.append(verdict)
                progress.console.print(f"seed {verdict.schedule.seed}: {verdict.problem[:200]}", markup=False)
    for verdict in sorted(bad, key=lambda verdict: verdict.schedule.seed)[
        : 0 if options.no_shrink else MOST_SHRUNK
    ]:
        _tell(verdict)
    console.print(f"{len(seeds)} schedules in {time.monotonic() - began:.0f} s")
    summary: dict[str, Any] = {
        "schedules": len(seeds),
        "violations": sum(bool(verdict.violations) for verdict in bad),
        "stalls": sum(not verdict.violations for verdict in bad),
        "faults": dict(sorted(faults.items())),
    }
    if bad:
        summary["seeds"] = sorted(verdict.schedule.seed for verdict in bad)[:50]
    print(json.dumps(summary), flush=True)
    return 1 if bad else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--schedules", type=int, default=200, help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="the first one (default: %(default)s)")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: %(default)s)"
    )
    parser.add_argument("--trace", action="store_true", help="run one seed, and print all that happens")
    parser.add_argument("--tight", action="store_true", help="trim at once, and recover from the archive")
    parser.add_argument("--no-shrink", action="store_true", help="leave failing schedules as they are")
    return parser


def _tell(verdict: Verdict) -> None:
    """Print the shortest schedule that fails like this one."""
    with console.status(f"shrinking seed {verdict.schedule.seed}"):
        smallest = shrink(verdict)
    console.rule(f"seed {verdict.schedule.seed}")
    console.print(f"{smallest.schedule!r}", markup=False, highlight=False)
    console.print(smallest.problem[-MOST_WORDS:], markup=False, highlight=False)


def _trace(seed: int, is_tight: bool) -> int:
    verdict = run(schedule_of(seed, is_tight), is_traced=True)
    print(repr(verdict.schedule), *verdict.trace, verdict.problem or verdict.outcome, sep="\n")
    return 1 if verdict.problem else 0


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":
        # Sets of text have one order then, in every process.
        os.execve(
            sys.executable,
            [sys.executable, "-m", "tests.simulation", *sys.argv[1:]],
            os.environ | {"PYTHONHASHSEED": "0"},
        )
    code = main()
    sys.stdout.flush()
    os._exit(code)  # without warnings about coroutines that never ended

"""A thousand rollout workers, two hundred reward workers and a trainer on one Redis.

    python -m benchmarks.scale                    # 10, 100 and 1,000 workers
    python -m benchmarks.scale --workers 10 --mean-s 0.3 --steps 100 --trim

Workers are the services' real code on a real Redis; engines, rewards and the policy are delays (see
`scale_cluster`). `efficiency` is the share of the engines' slots that was filled with work, counted by its
nominal time: the throughput over that of the slowest stage, which is generation here.

Time is scaled: all work and all pauses of loops take `stretch` times as long, so that the cores of this
machine, which stand for those of hundreds, are not what limits. Without --stretch it follows from what the
size before took of the cores, and from what the cores have left; Redis's figures are for unscaled time.
"""

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.report import machine, print_result, print_table
from benchmarks.scale_cluster import STEPS, Outcome, Size, measure
from tidemill.common.process.programs import run_main

MEAN_S, MOST_STRETCH = 1.5, 12.0
FIRST_CORES_PER_WORKER = 0.008
"""What is assumed before anything was measured."""
CORES_USED = 0.4
"""Of what the cores have left; the rest is for what comes at once."""


def cores_left() -> float:
    """Cores that a busy process would get on this machine now."""
    begun, used = time.perf_counter(), time.process_time()
    while time.perf_counter() - begun < 1.0:
        pass
    return len(os.sched_getaffinity(0)) * (time.process_time() - used) / (time.perf_counter() - begun)


def stretch_for(workers: int, cores_per_worker: float) -> float:
    """So that all processes together take `CORES_USED` of what is left."""
    wanted = workers * cores_per_worker / (CORES_USED * cores_left())
    return round(min(max(1.0, wanted), MOST_STRETCH), 1)


async def measure_all(
    sizes: list[int], mean_s: float, stretch: float, steps: int, trims: bool
) -> list[Outcome]:
    """One size after the other; each tells what the next one will take."""
    outcomes: list[Outcome] = []
    for workers in sizes:
        per_worker = outcomes[-1].cores_per_worker if outcomes else FIRST_CORES_PER_WORKER
        size = Size(workers, mean_s, stretch or stretch_for(workers, per_worker), trims)
        with tempfile.TemporaryDirectory() as folder:
            outcomes.append(await measure(Path(folder), size, steps))
        print(f"{workers} workers: {outcomes[-1].efficiency:.3f}", file=sys.stderr)
    return outcomes


def print_outcomes(outcomes: list[Outcome]) -> None:
    """For people."""
    rows = [
        (
            f"{o.size.workers:,} + {o.size.reward_workers:,}",
            f"{o.size.stretch:g}",
            f"{o.efficiency:.3f}",
            f"{o.samples_per_s:,.1f}",
            f"{o.step_s:.2f}",
            f"{o.trainer_share:.2f}",
            f"{o.commands_per_s:,.0f}",
            f"{o.redis_share:.3f}",
            f"{o.cpu_shares['rollout']:.2f}",
            f"{o.mb_per_step:.2f}",
            f"{o.memory_growth:.2f}",
            f"{len(o.books.lost)}",
            f"{o.books.duplicated}",
        )
        for o in outcomes
    ]
    titles = ("workers", "stretch", "efficiency", "samples/s", "step s", "trainer", "commands/s", "Redis")
    print_table(
        "Workers on one Redis",
        (*titles, "loop", "MB a step", "growth", "lost", "twice"),
        rows,
        "efficiency: slots filled with work, of all. trainer: share of time that it works. Redis: CPU, of\n"
        "a core, in unscaled time, like samples, steps and commands. loop: CPU of all rollout workers, of a\n"
        "core, in wall time: below 0.9 the loop that they share does not limit. MB a step: what streams\n"
        "take in Redis; growth: the most of it in the second half of the steps, over the first.\n"
        f"{machine()}",
    )


def main(
    workers: Annotated[str, typer.Option(help="numbers of rollout workers")] = "10,100,1000",
    mean_s: Annotated[float, typer.Option(help="what a completion takes, on average")] = MEAN_S,
    stretch: Annotated[float, typer.Option(help="wall seconds of a second; 0: as the machine needs")] = 0.0,
    steps: Annotated[int, typer.Option(min=2, help="of each run")] = STEPS,
    trim: Annotated[
        bool, typer.Option("--trim", help="streams, as a run does: is Redis's memory flat?")
    ] = False,
) -> None:
    """Measure, and print one line of JSON."""
    sizes = [int(number) for number in workers.split(",") if number]
    outcomes = run_main(measure_all(sizes, mean_s, stretch, steps, trim))
    print_outcomes(outcomes)
    largest = outcomes[-1]
    print_result(
        {
            "efficiency": {str(o.size.workers): round(o.efficiency, 3) for o in outcomes},
            "redis_mb_per_step": round(largest.mb_per_step, 2),
            "redis_memory_growth": round(largest.memory_growth, 2),
            f"redis_cpu_share_{sizes[-1]}": round(largest.redis_share, 3),
            "lost": sum(len(o.books.lost) for o in outcomes),
            "duplicated": sum(o.books.duplicated for o in outcomes),
        }
    )


if __name__ == "__main__":
    typer.run(main)

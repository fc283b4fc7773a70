"""Many schedules, on all cores."""

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed

from tests.simulation.generate import schedule_of
from tests.simulation.run import Verdict, run

BATCH = 20
"""Schedules that a worker process is given at once."""


def verdicts(seeds: range, jobs: int, is_tight: bool = False) -> Iterator[Verdict]:
    """The verdict of each seed, as they come."""
    if jobs <= 1 or len(seeds) <= BATCH:
        yield from (_run_seed(seed, is_tight) for seed in seeds)
        return
    batches = [seeds[start : start + BATCH] for start in range(0, len(seeds), BATCH)]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        for done in as_completed([pool.submit(_run_batch, batch, is_tight) for batch in batches]):
            yield from done.result()


def _run_batch(seeds: range, is_tight: bool) -> list[Verdict]:
    return [_run_seed(seed, is_tight) for seed in seeds]


def _run_seed(seed: int, is_tight: bool) -> Verdict:
    schedule = schedule_of(seed, is_tight)
    try:
        return run(schedule)
    except Exception as error:
        raise RuntimeError(f"the simulation itself failed at seed {seed}: {schedule!r}") from error

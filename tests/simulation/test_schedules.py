"""Whole runs under faults from seeds end as they should; a long row of seeds is `make simulate`."""

import pytest

from tests.simulation.generate import schedule_of
from tests.simulation.known import KNOWN
from tests.simulation.run import run
from tests.simulation.schedule import Schedule

FIRST_SEED = 0
NUM_SEEDS = 200
BATCH = 10


@pytest.mark.parametrize("first", range(FIRST_SEED, FIRST_SEED + NUM_SEEDS, BATCH))
def test_a_run_keeps_its_guarantees_and_ends(first: int) -> None:
    for seed in range(first, first + BATCH):
        verdict = run(schedule_of(seed))
        assert not verdict.problem, (
            f"make simulate ARGS='--seed {seed} --trace': {verdict.problem}\n{verdict.schedule!r}"
        )


def test_what_is_trimmed_at_once_is_recovered_from_the_archive() -> None:
    for seed in range(FIRST_SEED, FIRST_SEED + BATCH):
        verdict = run(schedule_of(seed, is_tight=True))
        assert not verdict.problem, (
            f"make simulate ARGS='--seed {seed} --tight --trace': {verdict.problem}\n{verdict.schedule!r}"
        )


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_what_was_found_once_is_found_no_more(name: str) -> None:
    verdict = run(KNOWN[name])
    assert not verdict.problem, f"{verdict.problem}\n{verdict.schedule!r}"
    # One that names commands in place of seconds comes to its moments, whatever the services' pace.
    if all(fault.at_s == 0.0 or "follows" in fault.how for fault in KNOWN[name].faults):
        assert verdict.faults.total() - verdict.faults["resumed"] == len(KNOWN[name].faults)


@pytest.mark.parametrize("seed", [1, 2])
def test_without_faults_a_run_is_finished_in_its_time(seed: int) -> None:
    verdict = run(Schedule(seed, schedule_of(seed).setup))
    assert (verdict.outcome, verdict.problem) == ("finished", "")
    assert verdict.virtual_s < 60

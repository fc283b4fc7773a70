"""How many groups a worker holds, by what the engine reports."""

import pytest

from tidemill.services.rollout.engines.engine import EngineReport
from tidemill.services.rollout.slots import START, UNSETTLED_REPORTS, Slots


def report(usage: float, waiting: int = 0, preempted: int = 0) -> EngineReport:
    return EngineReport(usage, waiting, preempted)


def test_an_engine_that_reports_nothing_keeps_a_fixed_number() -> None:
    slots = Slots()
    for _ in range(1000):
        slots.end(START - 1)
    assert slots.num_free(10) == START - 10


@pytest.mark.parametrize(("usage", "after"), [(0.0, 12.0), (0.4, 11.0), (0.8, 10.0), (0.85, 10.0)])
def test_slots_grow_in_a_turnover_by_a_share_that_tapers_with_the_caches_use(
    usage: float, after: float
) -> None:
    """1.2 of the slots with an empty cache, 1.1 at 40 %, 1.0 from 80 % on."""
    slots = Slots(limit=10)
    slots.report(report(usage), held=10)
    for _ in range(10):
        slots.end(int(slots.limit) - 1)
    assert slots.limit == pytest.approx(after)


def test_slots_that_are_not_all_used_do_not_grow() -> None:
    slots = Slots(limit=10)
    slots.report(report(0.1), held=4)
    for _ in range(100):
        slots.end(4)
    assert slots.limit == 10


def test_above_80_percent_no_ticket_is_taken_but_the_only_one() -> None:
    slots = Slots(limit=10)
    slots.report(report(0.81), held=3)
    assert (slots.num_free(3), slots.num_free(0)) == (0, 10)
    slots.report(report(0.79), held=3)
    assert slots.num_free(3) == 7


def test_above_90_percent_one_group_goes_back_and_the_engine_has_time_to_show_it() -> None:
    slots = Slots(limit=10)
    found = [slots.report(report(0.95), held=8) for _ in range(2 + UNSETTLED_REPORTS)]
    assert found == [True, *[False] * UNSETTLED_REPORTS, True]
    assert slots.limit == 7
    assert not Slots().report(report(0.99), held=1), "the last one stays"


def test_preemptions_halve_the_slots_once_until_that_has_taken_effect() -> None:
    slots = Slots(limit=10)
    for held in (10, 10, 7):
        slots.report(report(0.7, preempted=3), held)
        assert slots.limit == 5
    slots.report(report(0.7, preempted=1), held=5)
    assert slots.limit == 2.5
    for _ in range(9):
        slots.report(report(0.7, preempted=1), held=1)
    assert slots.num_free(0) == 1


def test_only_a_queue_that_stays_halves_the_slots() -> None:
    slots = Slots(limit=10)
    for waiting in (5, 0, 5):
        slots.report(report(0.8, waiting), held=10)
    slots.end(held=9)
    assert slots.limit == 10
    for waiting in (5, 3, 5):
        slots.report(report(0.8, waiting), held=10)
    slots.end(held=9)
    assert slots.limit == 4.5

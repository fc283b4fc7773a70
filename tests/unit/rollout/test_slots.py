"""How many groups a worker holds, by what the engine reports, and what it says it waits for."""

from types import SimpleNamespace
from typing import Any

import pytest

from tidemill.services.rollout.engines.engine import EngineReport
from tidemill.services.rollout.service import _state_of
from tidemill.services.rollout.slots import CachedHistory, Slots


def test_without_reports_the_number_stays() -> None:
    slots = Slots(64)
    for _ in range(1000):
        slots.end(63)
    assert slots.num_free(10) == 54


@pytest.mark.parametrize(("num_tokens", "begins_with"), [(0, 16), (9_000, 18), (1 << 20, 64)])
def test_slots_begin_with_what_fits_once_the_engine_says_how_much_that_is(num_tokens, begins_with):
    """Twice as many as would fit at their largest: they are half as large on average."""
    slots = Slots(16, group_tokens=1000)
    slots.report(EngineReport(0.0, 3, num_tokens))
    assert slots.limit == begins_with
    slots.end(5)
    slots.report(EngineReport(0.0, 0, num_tokens))
    assert slots.limit == 5, "what the engine bears counts from then on"


@pytest.mark.parametrize(("usage", "after"), [(0.0, 20.0), (0.4, 12.5), (0.8, 10.0), (0.85, 10.0)])
def test_slots_grow_in_a_turnover_by_a_share_that_tapers_with_the_caches_use(usage, after):
    """Twice the slots with an empty cache, 1.25 at 40 %, as many from 80 % on."""
    slots = Slots(10)
    for _ in range(10):
        slots.report(EngineReport(usage, 0))
        slots.end(int(slots.limit) - 1)
    assert slots.limit == pytest.approx(after)


def test_slots_that_are_not_all_used_do_not_grow() -> None:
    slots = Slots(10)
    for _ in range(100):
        slots.report(EngineReport(0.1, 0))
        slots.end(4)
    assert slots.limit == 10


def test_a_group_that_ends_is_replaced_unless_requests_have_waited_all_the_time_since_the_last_end() -> None:
    slots = Slots(10)
    for waiting, free in ([5, 0, 5], 1), ([5, 3, 5], 0), ([2], 0), ([2, 0], 1):
        for each in waiting:
            slots.report(EngineReport(0.9, each))
        held = int(slots.limit) - 1
        slots.end(held)
        assert slots.num_free(held) == free
    assert slots.limit == 8


@pytest.mark.parametrize(
    ("usage", "turns", "is_replaced"),
    [
        (0.5, [(100, 100), (100, 50)], False),
        (0.5, [(100, 120), (100, 60)], True),  # 40 of 200 are not more than a fifth
        (0.5, [], True),
        (0.3, [(100, 0)], True),  # the engine has little to do
    ],
)
def test_a_group_that_ends_is_not_replaced_where_histories_have_left_the_cache(usage, turns, is_replaced):
    slots = Slots(10)
    for turn in turns:
        slots.turn(*turn)
    slots.report(EngineReport(usage, 0))
    slots.end(9)
    assert slots.num_free(9) == is_replaced
    # What was lost before the last end does not count again.
    slots.report(EngineReport(usage, 0))
    slots.end(8)
    assert slots.num_free(8) >= 1


def test_one_group_is_always_held() -> None:
    slots = Slots(1)
    for _ in range(3):
        slots.report(EngineReport(0.95, 7))
        slots.end(0)
        assert slots.num_free(0) == 1


def state(running: int = 0, waiting: int = 0, wanted: int = 0, held: int = 0, playing: int = 0) -> str:
    engine: Any = SimpleNamespace(num_running=running)
    follower: Any = SimpleNamespace(num_waiting=waiting)
    workers: Any = [
        SimpleNamespace(running=set(), num_wanted=0, num_playing=0),
        SimpleNamespace(running=set(range(held)), num_wanted=wanted, num_playing=playing),
    ]
    return _state_of(engine, follower, workers)[0]


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ({}, "wait:tickets"),
        ({"held": 2, "running": 1, "waiting": 1, "wanted": 1}, "generate"),
        ({"held": 2, "waiting": 1}, "wait:weights"),
        ({"held": 2, "wanted": 8}, "wait:device"),
        ({"held": 2, "playing": 1}, "wait:environment"),
        ({"held": 2}, "wait:redis"),
    ],
)
def test_the_cause_is_what_all_held_groups_lack(counts: dict[str, int], expected: str) -> None:
    assert state(**counts) == expected


def test_what_a_history_loses_from_turn_to_turn_counts_in_its_slots():
    slots = Slots(10)
    history = CachedHistory(slots)
    history.add_turn([1, 2], 0, 0)
    assert slots._had == 0, "nothing had been cached"
    history.add_turn([1, 2, 3, 4], 0, 96)
    history.add_turn([1, 2, 3, 4, 5], 0, 32)
    assert (slots._had, slots._lost) == (0 + 96, 64)
    # Once more as long as the longest that was cached.
    history.add_turn([1, 2, 3, 4, 5, 6], 0, 96)
    assert (slots._had, slots._lost) == (192, 64)
    for prompt_ids, version in (([1, 2, 3], 1), ([9, 2, 3, 4], 1)):  # other weights, another history
        history.add_turn(prompt_ids, version, 0)
    assert (slots._had, slots._lost) == (192, 64)


def test_what_an_engines_sleep_drops_does_not_count_as_lost():
    slots = Slots(10)
    history = CachedHistory(slots)
    history.add_turn([1, 2], 0, 96, num_sleeps=0)
    history.add_turn([1, 2, 3], 0, 0, num_sleeps=1)
    history.add_turn([1, 2, 3, 4], 0, 128, num_sleeps=1)
    assert (slots._had, slots._lost) == (0, 0)
    history.add_turn([1, 2, 3, 4, 5], 0, 32, num_sleeps=1)
    assert (slots._had, slots._lost) == (128, 96)

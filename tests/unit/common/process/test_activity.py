"""Time is booked on exactly one state, and idle is what waited; what counts as waiting for Redis."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.clocks import Clock
from tidemill.common.process import activity
from tidemill.common.process.activity import BOOKKEEPING, WAIT_REDIS, WINDOW_S, Activity
from tidemill.common.redis import client
from tidemill.common.redis.client import RoundTrips
from tidemill.common.telemetry import metrics


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(client, "time", clock)
    monkeypatch.setattr(activity, "time", clock)
    return clock


@contextmanager
def a_command(trips: RoundTrips) -> Iterator[None]:
    begun = trips.begin()
    try:
        yield
    finally:
        trips.end(begun)


def test_commands_that_overlap_are_counted_once(clock):
    trips = RoundTrips()
    with a_command(trips):
        clock.now += 1
        with a_command(trips):
            clock.now += 2
        assert trips.total_s() == 3
        clock.now += 1
    clock.now += 10
    assert trips.total_s() == 4


def test_a_command_that_failed_took_its_time_all_the_same(clock):
    trips = RoundTrips()
    with pytest.raises(OSError), a_command(trips):
        clock.now += 3
        raise OSError
    assert trips.total_s() == 3


def test_a_command_that_blocks_counts_as_much_as_one_that_does_not(clock):
    trips = RoundTrips()
    with a_command(trips):
        clock.now += 0.25
    begun = clock.now
    clock.now += 20
    trips.brought_news(begun)
    assert trips.total_s() == 0.5
    clock.now += 0.125
    trips.brought_news(begun)  # another one that ends just after it
    assert trips.total_s() == 0.625


def test_one_outage_is_not_what_a_command_takes_at_present(clock):
    trips = RoundTrips()
    for seconds in (0.001, 30, 0.003):
        with a_command(trips):
            clock.now += seconds
    assert trips.present_s == pytest.approx(0.003)


@pytest.mark.parametrize("state", ["wait:scores", BOOKKEEPING])
def test_who_has_nothing_to_do_while_a_command_is_under_way_waits_for_redis(clock, state):
    trips = RoundTrips()
    service = Activity("trainer", state, trips.total_s)
    clock.now += 4
    with a_command(trips):
        clock.now += 6
    assert service.totals() == {WAIT_REDIS: 6, state: 4}


def test_who_works_while_a_command_is_under_way_does_not_wait(clock):
    trips = RoundTrips()
    service = Activity("trainer", "train", trips.total_s)
    with a_command(trips):
        clock.now += 5
        service.enter("wait:scores")
        clock.now += 2
    assert service.totals() == {"train": 5, WAIT_REDIS: 2, "wait:scores": 0}


def test_seconds_are_booked_on_the_state_they_were_spent_in(clock):
    service = Activity("trainer")
    clock.now += 2
    assert service.enter("forward") == "wait:start"
    clock.now += 5
    service.enter("wait:scores")
    clock.now += 3
    assert service.totals() == {"wait:start": 2, "forward": 5, "wait:scores": 3}
    assert service.idle_share() == pytest.approx(0.5)


def test_a_block_returns_to_the_state_before_even_when_it_fails(clock):
    service = Activity("trainer", "forward")
    with pytest.raises(ZeroDivisionError), service.during("checkpoint", "v12"):
        assert (service.state, service.detail) == ("checkpoint", "v12")
        clock.now += 4
        raise ZeroDivisionError
    clock.now += 1
    assert service.state == "forward"
    assert service.totals() == {"forward": 1, "checkpoint": 4}


def test_shares_are_of_the_last_minute_only(clock):
    service = Activity("trainer", "forward")
    clock.now += 500
    service.enter("wait:scores")
    clock.now += WINDOW_S + 1
    service.enter("forward")
    clock.now += 20
    assert service.shares() == pytest.approx({"wait:scores": 61 / 81, "forward": 20 / 81})
    clock.now += WINDOW_S
    assert service.shares() == {"forward": 1.0}


def test_warm_up_can_be_forgotten(clock):
    service = Activity("trainer")
    clock.now += 100
    service.reset()
    service.enter("forward")
    clock.now += 10
    assert service.totals() == {"wait:start": 0, "forward": 10}
    assert service.idle_share() == 0


def test_no_time_at_all_is_not_idle(clock):
    assert Activity("trainer").idle_share() == 0


def test_every_second_reaches_the_metric_once(clock):
    service = Activity("test-activity", "forward")
    clock.now += 2
    service.totals()
    service.totals()
    clock.now += 3
    service.enter("wait:scores")
    assert metrics.ACTIVITY_SECONDS.labels("test-activity", "forward")._value.get() == 5

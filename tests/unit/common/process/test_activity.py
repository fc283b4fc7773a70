"""Time is booked on exactly one state, and idle is what waited."""

import pytest

from tests.support.clocks import Clock
from tidemill.common.process import activity
from tidemill.common.process.activity import WINDOW_S, Activity
from tidemill.common.telemetry import metrics


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(activity, "time", clock)
    return clock


def test_seconds_are_booked_on_the_state_they_were_spent_in(clock: Clock) -> None:
    service = Activity("trainer")
    clock.now += 2
    assert service.enter("forward") == "wait:start"
    clock.now += 5
    service.enter("wait:scores")
    clock.now += 3
    assert service.totals() == {"wait:start": 2, "forward": 5, "wait:scores": 3}
    assert service.idle_share() == pytest.approx(0.5)


def test_a_block_returns_to_the_state_before_even_when_it_fails(clock: Clock) -> None:
    service = Activity("trainer", "forward")
    with pytest.raises(ZeroDivisionError), service.during("checkpoint", "v12"):
        assert (service.state, service.detail) == ("checkpoint", "v12")
        clock.now += 4
        raise ZeroDivisionError
    clock.now += 1
    assert service.state == "forward"
    assert service.totals() == {"forward": 1, "checkpoint": 4}


def test_shares_are_of_the_last_minute_only(clock: Clock) -> None:
    service = Activity("trainer", "forward")
    clock.now += 500
    service.enter("wait:scores")
    clock.now += WINDOW_S + 1
    service.enter("forward")
    clock.now += 20
    assert service.shares() == pytest.approx({"wait:scores": 61 / 81, "forward": 20 / 81})
    clock.now += WINDOW_S
    assert service.shares() == {"forward": 1.0}


def test_warm_up_can_be_forgotten(clock: Clock) -> None:
    service = Activity("trainer")
    clock.now += 100
    service.reset()
    service.enter("forward")
    clock.now += 10
    assert service.totals() == {"wait:start": 0, "forward": 10}
    assert service.idle_share() == 0


def test_no_time_at_all_is_not_idle(clock: Clock) -> None:
    assert Activity("trainer").idle_share() == 0


def test_every_second_reaches_the_metric_once(clock: Clock) -> None:
    service = Activity("test-activity", "forward")
    clock.now += 2
    service.totals()
    service.totals()
    clock.now += 3
    service.enter("wait:scores")
    assert metrics.ACTIVITY_SECONDS.labels("test-activity", "forward")._value.get() == 5

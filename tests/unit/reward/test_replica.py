"""When a replica rests and when it is tried again, with a clock of the test's own."""

from collections.abc import Callable

import pytest

from tidemill.services.reward.remote.servers import (
    FAILURES_BEFORE_REST,
    FIRST_REST_S,
    LONGEST_REST_S,
    Replica,
)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def replica(clock: Clock) -> Replica:
    return Replica("http://127.0.0.1:8000/v1", clock=clock)


@pytest.fixture
def resting(replica: Replica) -> Replica:
    for _ in range(FAILURES_BEFORE_REST):
        replica.begin()
        replica.fail()
    return replica


def test_it_rests_after_failures_in_a_row_and_a_success_begins_the_count_again(replica: Replica) -> None:
    for _ in range(3):
        assert not any(replica.fail() for _ in range(FAILURES_BEFORE_REST - 1))
        replica.succeed()
    assert replica.state == "up"
    assert [replica.fail() for _ in range(FAILURES_BEFORE_REST)][-1]
    assert (replica.is_usable, replica.state, replica.rests_for_s) == (False, "resting", FIRST_REST_S)


@pytest.mark.parametrize(
    ("end", "is_usable", "rests_for_s"),
    [
        (Replica.succeed, True, 0.0),
        (Replica.abandon, True, 0.0),  # a cancelled trial leaves room for the next
        (Replica.fail, False, 2 * FIRST_REST_S),
        (lambda replica: replica.pause(7.0), False, 7.0),
    ],
)
def test_after_a_rest_one_request_tries(
    resting: Replica, clock: Clock, end: Callable[[Replica], None], is_usable: bool, rests_for_s: float
) -> None:
    clock.now += FIRST_REST_S
    assert resting.is_usable
    resting.begin()
    assert not resting.is_usable
    end(resting)
    assert (resting.is_usable, resting.rests_for_s) == (is_usable, rests_for_s)


def test_rests_become_longer_up_to_a_bound_while_trials_fail(resting: Replica, clock: Clock) -> None:
    seen = []
    for _ in range(5):
        clock.now += resting.rests_for_s
        resting.begin()
        resting.fail()
        seen.append(resting.rests_for_s)
    assert seen == [10.0, 20.0, 40.0, LONGEST_REST_S, LONGEST_REST_S]


def test_late_failures_of_earlier_requests_do_not_prolong_a_rest(resting: Replica, clock: Clock) -> None:
    clock.now += 3.0
    resting.fail()
    assert resting.rests_for_s == FIRST_REST_S - 3.0


def test_after_a_pause_that_was_asked_for_one_request_tries(replica: Replica, clock: Clock) -> None:
    replica.pause(30.0)
    assert (replica.state, replica.rests_for_s) == ("paused", 30.0)
    replica.succeed()  # an answer to a request from before says nothing
    replica.pause(10.0)  # and a shorter pause changes nothing
    assert replica.rests_for_s == 30.0
    clock.now += 30.0
    replica.begin()
    assert not replica.is_usable
    replica.succeed()
    assert replica.state == "up"

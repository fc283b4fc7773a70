"""When a replica rests and when it is tried again, with a clock of the test's own."""

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
        replica.fail()
    return replica


def test_it_rests_after_failures_in_a_row_and_a_success_begins_the_count_again(replica: Replica) -> None:
    for _ in range(3):
        assert not any(replica.fail() for _ in range(FAILURES_BEFORE_REST - 1))
        replica.succeed()
    assert replica.state == "up"
    assert [replica.fail() for _ in range(FAILURES_BEFORE_REST)][-1]
    assert (replica.state, replica.rests_for_s) == ("resting", FIRST_REST_S)


@pytest.mark.parametrize(
    ("end", "state", "rests_for_s"),
    [
        (Replica.succeed, "up", 0.0),
        (lambda replica: None, "up", 0.0),  # a cancelled trial leaves room for the next
        (Replica.fail, "resting", 2 * FIRST_REST_S),
        (lambda replica: replica.pause(7.0), "resting", 7.0),
    ],
)
def test_after_a_rest_one_request_tries(resting, clock, end, state, rests_for_s):
    clock.now += FIRST_REST_S
    assert resting.state == "up"
    resting.in_flight += 1
    assert resting.state == "resting"
    end(resting)
    resting.in_flight -= 1
    assert (resting.state, resting.rests_for_s) == (state, rests_for_s)


def test_rests_become_longer_up_to_a_bound_while_trials_fail(resting: Replica, clock: Clock) -> None:
    seen = []
    for _ in range(5):
        clock.now += resting.rests_for_s
        resting.fail()
        seen.append(resting.rests_for_s)
    assert seen == [10.0, 20.0, 40.0, LONGEST_REST_S, LONGEST_REST_S]


def test_late_ends_of_earlier_requests_say_nothing_during_a_rest(resting: Replica, clock: Clock) -> None:
    clock.now += 3.0
    resting.fail()
    resting.succeed()
    resting.pause(1.0)  # and a shorter pause changes nothing
    assert (resting.state, resting.rests_for_s) == ("resting", FIRST_REST_S - 3.0)

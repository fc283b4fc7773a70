"""The circuit breaker, with a clock of the test's own."""

from tidemill.services.reward.remote.router import LONGEST_COOLDOWN_S, Breaker


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def opened(clock: Clock) -> Breaker:
    breaker = Breaker(3, 5.0, clock)
    for _ in range(3):
        breaker.begin()
        breaker.failed()
    return breaker


def test_it_opens_after_failures_in_a_row_and_a_success_begins_the_count_anew() -> None:
    breaker = Breaker(3, 5.0, Clock())
    for _ in range(5):
        breaker.failed()
        breaker.failed()
        breaker.succeeded()
    assert breaker.allows
    for _ in range(3):
        breaker.failed()
    assert not breaker.allows and breaker.opens_in_s == 5.0


def test_after_the_cooldown_one_request_tries() -> None:
    clock = Clock()
    breaker = opened(clock)
    clock.now += 5.0
    assert breaker.allows
    breaker.begin()
    assert not breaker.allows
    breaker.succeeded()
    assert breaker.allows and breaker.is_closed


def test_a_failed_trial_doubles_the_cooldown_up_to_a_bound() -> None:
    clock = Clock()
    breaker = opened(clock)
    seen = []
    for _ in range(6):
        clock.now += breaker.opens_in_s
        breaker.begin()
        breaker.failed()
        seen.append(breaker.opens_in_s)
    assert seen == [10.0, 20.0, 40.0, LONGEST_COOLDOWN_S, LONGEST_COOLDOWN_S, LONGEST_COOLDOWN_S]


def test_a_trial_that_was_cancelled_leaves_room_for_the_next() -> None:
    clock = Clock()
    breaker = opened(clock)
    clock.now += 5.0
    breaker.begin()
    breaker.abandoned()
    assert breaker.allows


def test_late_failures_of_earlier_requests_do_not_prolong_the_cooldown() -> None:
    clock = Clock()
    breaker = opened(clock)
    clock.now += 3.0
    breaker.failed()
    assert breaker.opens_in_s == 2.0


def test_after_a_pause_that_was_asked_for_one_request_tries() -> None:
    clock = Clock()
    breaker = Breaker(3, 5.0, clock)
    breaker.pause(30.0)
    assert (breaker.allows, breaker.is_paused, breaker.opens_in_s) == (False, True, 30.0)
    clock.now += 30.0
    breaker.begin()
    assert not breaker.allows
    breaker.succeeded()
    assert breaker.is_closed and not breaker.is_paused


def test_answers_to_requests_from_before_a_pause_do_not_end_it() -> None:
    clock = Clock()
    breaker = Breaker(3, 5.0, clock)
    breaker.pause(30.0)
    breaker.succeeded()
    breaker.pause(10.0)
    assert breaker.opens_in_s == 30.0


def test_a_trial_that_is_told_to_wait_begins_a_pause_anew() -> None:
    clock = Clock()
    breaker = Breaker(3, 5.0, clock)
    breaker.pause(30.0)
    clock.now += 30.0
    breaker.begin()
    breaker.pause(7.0)
    assert breaker.opens_in_s == 7.0
    clock.now += 7.0
    assert breaker.allows

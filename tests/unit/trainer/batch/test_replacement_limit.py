"""Replacing groups ends when none will ever be trained, and the message says why."""

from collections.abc import Callable
from typing import Any

import pytest
import structlog

from tests.support.training import trainer_config
from tidemill.common.errors import ConfigError
from tidemill.services.trainer.batch.batch_assembler import LEAST_GIVE_UP, ReplacementLimit
from tidemill.services.trainer.groups.group_filter import STALE, ZERO_VARIANCE


def make(rounds: int | None = None, **trainer: Any) -> ReplacementLimit:
    """Of a run with two groups in a step."""
    algorithm = {"filter_zero_variance": True, "max_filter_rounds": rounds}
    return ReplacementLimit(trainer_config(algorithm=algorithm, **trainer).trainer)


Event = Callable[[ReplacementLimit], None]


def filtered(*rewards: float) -> Event:
    """Groups are replaced, of which each has one reward for all its samples."""

    def replace(limit: ReplacementLimit) -> None:
        for reward in rewards:
            limit.note_replaced(ZERO_VARIANCE, "", [reward, reward])

    return replace


def replaced(reason: str, detail: str = "", times: int = 1) -> Event:
    def replace(limit: ReplacementLimit) -> None:
        for _ in range(times):
            limit.note_replaced(reason, detail, ())

    return replace


TRAINED: Event = ReplacementLimit.note_trained


@pytest.mark.parametrize(
    ("rounds", "before", "last", "said"),
    [
        # Three rounds are the step's own groups and twice as many replacements.
        (3, [filtered(0, 0, 0, 0)], filtered(0), r"a step of 2 groups needs more than 3 times .*: 5 groups"),
        (2, [filtered(0.25, 0.25)], filtered(0.25), r"reward is constant: it was 0\.25 for every sample"),
        # Rewards are equal within groups only.
        (2, [filtered(0, 1)], filtered(0), r"Rewards were 0 in 2 groups, 1 in 1 groups recently: prompts"),
        # A group that can be trained does not make the reward constant, and not the bound larger.
        (2, [filtered(0), TRAINED, filtered(0)], filtered(1), "3 groups were replaced"),
        # Each step begins anew, and other reasons do not count as rounds.
        (1, [replaced(STALE, times=5), ReplacementLimit.begin_step], filtered(0), "more than 1 times"),
        # A trainer that resumes within a step goes on counting.
        (
            2,
            [lambda limit: limit.begin_step([ZERO_VARIANCE, "stale", ZERO_VARIANCE])],
            filtered(0),
            "3 groups were replaced",
        ),
        # Without a bound it takes so many in a row.
        (None, [filtered(*[1] * LEAST_GIVE_UP)], filtered(1), r"257 groups in a row .* constant: it was 1 "),
        (
            None,
            [filtered(*[1] * LEAST_GIVE_UP)],
            replaced(STALE, "two steps"),
            "could not be trained, the last one because of 'stale' two steps",
        ),
    ],
)
def test_one_replacement_too_many_ends_the_run_and_says_why(
    rounds: int | None, before: list[Event], last: Event, said: str
) -> None:
    limit = make(rounds)
    for event in before:
        event(limit)
    with pytest.raises(ConfigError, match=said):
        last(limit)


def test_groups_replaced_in_a_row_are_a_warning_that_names_the_reason_each_time_they_double() -> None:
    limit = make()
    with structlog.testing.capture_logs() as logs:
        for event in (replaced("no_reward", "why", 20), TRAINED, replaced("no_reward", "why", 7)):
            event(limit)
    assert [(entry["groups_in_a_row"], entry["last_reason"]) for entry in logs] == (
        [(8, "no_reward"), (16, "no_reward")]
    )

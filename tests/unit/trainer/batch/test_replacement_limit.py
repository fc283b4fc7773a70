"""Replacing groups ends when none will ever be trained, and the message says why."""

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


def filtered(limit: ReplacementLimit, *rewards: float) -> None:
    for reward in rewards:
        limit.note_replaced(ZERO_VARIANCE, "", [reward, reward])


def test_three_rounds_are_the_step_s_own_groups_and_twice_as_many_replacements() -> None:
    limit = make(3)
    filtered(limit, 0.0, 0.0, 0.0, 0.0)
    with pytest.raises(ConfigError, match=r"a step of 2 groups needs more than 3 times as many.*: 5 groups"):
        filtered(limit, 0.0)


def test_a_constant_reward_is_called_that_with_its_value() -> None:
    limit = make(2)
    filtered(limit, 0.25, 0.25)
    with pytest.raises(ConfigError, match=r"The reward is constant: it was 0\.25 for every sample"):
        filtered(limit, 0.25)


def test_rewards_that_are_equal_within_groups_only_are_counted() -> None:
    limit = make(2)
    filtered(limit, 0.0, 1.0)
    with pytest.raises(ConfigError, match=r"Rewards were 0 in 2 groups, 1 in 1 groups recently: prompts"):
        filtered(limit, 0.0)


def test_a_group_that_can_be_trained_does_not_make_the_reward_constant_and_not_the_bound_larger() -> None:
    limit = make(2)
    filtered(limit, 0.0)
    limit.note_trained()
    filtered(limit, 0.0)
    with pytest.raises(ConfigError, match="3 groups were replaced"):
        filtered(limit, 1.0)


def test_groups_replaced_in_a_row_are_a_warning_that_names_the_reason_each_time_they_double() -> None:
    limit = make()
    with structlog.testing.capture_logs() as logs:
        for _ in range(20):
            limit.note_replaced("no_reward", "why", ())
        limit.note_trained()
        for _ in range(7):
            limit.note_replaced("no_reward", "why", ())
    assert [(entry["groups_in_a_row"], entry["last_reason"]) for entry in logs] == (
        [(8, "no_reward"), (16, "no_reward")]
    )


def test_each_step_begins_anew_and_other_reasons_do_not_count_as_rounds() -> None:
    limit = make(1)
    for _ in range(5):
        limit.note_replaced(STALE, "", ())
    limit.begin_step()
    with pytest.raises(ConfigError, match="more than 1 times"):
        filtered(limit, 0.0)


def test_a_trainer_that_resumes_within_a_step_goes_on_counting() -> None:
    limit = make(2)
    limit.begin_step([ZERO_VARIANCE, "stale", ZERO_VARIANCE])
    with pytest.raises(ConfigError, match="3 groups were replaced"):
        filtered(limit, 0.0)


def test_without_a_bound_a_constant_reward_ends_the_run_after_so_many_in_a_row() -> None:
    limit = make()
    filtered(limit, *[1.0] * LEAST_GIVE_UP)
    with pytest.raises(ConfigError, match=r"257 groups in a row .* The reward is constant: it was 1 "):
        filtered(limit, 1.0)


def test_other_causes_are_named_as_before() -> None:
    limit = make()
    filtered(limit, *[1.0] * LEAST_GIVE_UP)
    with pytest.raises(ConfigError, match="could not be trained, the last one because of 'stale' two steps"):
        limit.note_replaced(STALE, "two steps", ())

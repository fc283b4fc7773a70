"""A number that leaves its healthy range is said once, in plain words; and once when it is back."""

import math
import re
from typing import Any

import pytest

from tests.support.training import trainer_config
from tidemill.common.config import RunConfig
from tidemill.common.config.diagnostics import CHECKS, HealthyRange
from tidemill.common.config.problems import _field_paths
from tidemill.common.errors import ConfigError
from tidemill.common.telemetry import metrics
from tidemill.services.trainer.metrics.diagnostics import MAX_WARNINGS, Diagnostics, time_advice

GAP = "logprob_gap/mean"


def diagnostics(patience: int = 2, **ranges: Any) -> Diagnostics:
    return Diagnostics(ranges, patience_steps=patience)


def said(watch: Diagnostics, metric: str, values: list[float | None]) -> list[tuple[int, int | None]]:
    """For each step, what began (since, None) or ended (since, until) with it."""
    return [
        (warning.since_step, warning.until_step)
        for step, value in enumerate(values)
        for warning in watch.observe(step, {metric: value})
    ]


def test_a_warning_is_said_once_when_it_begins_and_once_when_it_ends():
    watch = diagnostics(logprob_gap=HealthyRange(high=0.1))
    began = watch.observe(0, {GAP: 0.5}) + watch.observe(1, {GAP: 0.2})
    assert [(w.metric, w.since_step, w.until_step, w.worst) for w in began] == [(GAP, 0, None, 0.5)]
    assert watch.observe(2, {GAP: 0.9}) == [] and watch.observe(3, {GAP: 0.05}) == []
    (ended,) = watch.observe(4, {GAP: 0.1})
    assert (ended.since_step, ended.until_step, ended.worst) == (0, 3, 0.9)
    assert watch.observe(5, {GAP: 0.05}) == []


def test_one_bad_step_is_noise():
    assert said(diagnostics(2), GAP, [0.5, 0.0, 0.5, 0.0, 0.5]) == []
    assert said(diagnostics(1), GAP, [0.0, 0.5, 0.0]) == [(1, None), (1, 2)]


def test_a_number_that_flickers_at_its_bound_is_not_said_again_and_again():
    assert said(diagnostics(3), GAP, [0.5] * 3 + [0.0, 0.5] * 20) == [(0, None)]


def test_what_is_not_a_number_is_outside_and_the_worst():
    watch = diagnostics(2)
    assert said(watch, GAP, [math.nan, None]) == [(0, None)]
    assert watch.warnings[0].worst is None


def test_both_ends_of_a_range_have_their_own_words():
    high = diagnostics(1)
    low = diagnostics(1)
    (exploding,) = high.observe(0, {"grad_norm": 1000.0})
    (silent,) = low.observe(0, {"grad_norm": 0.0})
    assert exploding.text == "gradients are exploding: grad_norm is 1000, healthy is 1e-08 to 100"
    assert silent.text.startswith("there is no gradient") and silent.advice != exploding.advice


def test_the_worst_value_of_a_low_bound_is_the_lowest():
    watch = diagnostics(1)
    said(watch, "sampling/effective_sample_size", [0.4, 0.2, 0.3])
    assert watch.warnings[0].worst == 0.2


def test_a_resumed_trainer_goes_on_with_the_warnings_and_says_none_again():
    records = [{"kind": "step", "step": step, GAP: 0.5} for step in range(5)]
    watch = diagnostics(2).resume(records)
    assert watch.observe(5, {GAP: 0.5}) == []
    assert [(item["check"], item["since_step"]) for item in watch.as_state()] == [("logprob_gap", 0)]
    gauge = metrics.UNHEALTHY.labels("logprob_gap")
    assert gauge._value.get() == 1.0
    said(watch, GAP, [0.0, 0.0])
    assert gauge._value.get() == 0.0


def test_the_advice_about_waiting_is_about_the_longest_wait():
    numbers = {"time/wait_share": 0.9, "time/wait_scores_s": 8.0, "time/wait_trajectories_s": 1.0}
    (warning,) = diagnostics(1).observe(0, numbers)
    assert warning.advice.startswith("It waited 8 s for scores: add reward workers")
    assert "tidemill status" in time_advice({})


def test_what_an_advice_names_is_a_setting_or_a_metric():
    fields = [f".{path}" for path in _field_paths(RunConfig)]
    for check in CHECKS.values():
        text = f"{check.problem} {check.problem_low} {check.advice} {check.advice_low}"
        for name in re.findall(r"[a-z]+(?:[._][a-z_]+)+", text):
            is_field = any(field.endswith(f".{name}") for field in fields)
            assert is_field or name in [each.metric for each in CHECKS.values()], name


def test_a_range_without_bounds_says_nothing():
    assert said(diagnostics(1, logprob_gap=HealthyRange()), GAP, [9.0, math.nan]) == []


def test_warnings_are_bounded_and_ended_ones_go_first():
    watch = diagnostics(1)
    watch.observe(0, {"entropy": 0.0})
    said(watch, GAP, [0.5, 0.0] * (MAX_WARNINGS + 10))
    assert len(watch.warnings) == MAX_WARNINGS
    assert watch.warnings[0].check == "entropy", "it still holds"


def test_what_is_no_range_of_a_check_is_refused():
    for healthy in ({"entropy": {"low": 2, "high": 1}}, {"entrpy": {"low": 1}}):
        with pytest.raises(ConfigError, match=r"trainer\.diagnostics"):
            trainer_config(diagnostics=healthy)

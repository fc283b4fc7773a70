"""A run in virtual time: cases worked out by hand, a sum written again, and what others have published."""

import random
from math import exp

import pytest

from benchmarks.scale_anchors import VERL, anchor_rows, errors_of
from benchmarks.scale_pipeline import Pipeline, mean_of_later, mean_of_lengths, play


@pytest.mark.parametrize(
    ("staleness", "rate", "fetches", "step_s", "wait_s"),
    [
        (0.0, 2.0, 1, 4.0, 1.0),  # generate 1, then train 3
        (1.0, 2.0, 1, 3.0, 0.0),  # generation hides behind training
        (0.0, 1.0, 1, 5.0, 2.0),  # two completions share the speed of one
        (0.5, 2.0, 1, 4.0, 1.0),  # one group of two is there already; the other begins with the version
        (0.5, 2.0, 2, 3.0, 0.0),  # and is made while the first is trained
    ],
)
def test_two_groups_of_one_completion(staleness, rate, fetches, step_s, wait_s):
    flow = play(Pipeline(2, 1, staleness, 2, rate, 1.0, 3.0, fetches=fetches))
    assert (flow.step_s, flow.wait_s) == pytest.approx((step_s, wait_s))
    assert flow.rollout_idle == pytest.approx(1 - 2 / rate / step_s)


@pytest.mark.parametrize("in_order", [True, False])
def test_completions_that_share_their_speed(in_order):
    """With k = 0 all begin at once: between two ends, those that are left go on at min(1, rate / n)."""
    sigma, rate, steps = 0.99, 20.0, 3
    flow = play(Pipeline(16, 4, 0.0, 64, rate, 1.0, 5.0, sigma, steps=steps, warm_up=0, in_order=in_order))
    chance, expected = random.Random(0), 0.0
    for _ in range(steps):
        drawn = [min(exp(sigma * chance.gauss(0, 1)), 16.0) / mean_of_lengths(sigma, 16.0) for _ in range(64)]
        before = 0.0
        for number, length in enumerate(sorted(drawn)):
            expected += (length - before) / min(1.0, rate / (64 - number))
            before = length
    assert flow.step_s == pytest.approx(expected / steps + 5.0)


def test_means_of_cut_lengths_and_of_the_later_stage():
    chance = random.Random(3)
    drawn = [min(exp(0.99 * chance.gauss(0, 1)), 16.0) for _ in range(100_000)]
    assert mean_of_lengths(0.99, 16.0) == pytest.approx(sum(drawn) / len(drawn), rel=0.02)
    later = [max(chance.gauss(458, 96), 445.0) for _ in range(100_000)]
    assert mean_of_later(458.0, 96 / 458, 445.0) == pytest.approx(sum(later) / len(later), rel=0.005)
    assert mean_of_later(3.0, 0.0, 4.0) == 4.0


def test_steps_of_an_order_wait_for_their_own_stragglers():
    p = Pipeline(8, 2, 1.0, 16, 16.0, 1.0, 0.5, 0.99)
    ordered = Pipeline(8, 2, 1.0, 16, 16.0, 1.0, 0.5, 0.99, in_order=True)
    assert play(ordered).step_s > play(p).step_s


def test_what_cannot_be_played_says_so():
    with pytest.raises(ValueError, match="3 groups in 2 parts"):
        play(Pipeline(3, 1, 1.0, 4, 1.0, 1.0, 1.0, fetches=2))


def test_published_figures_are_predicted_within_a_tenth():
    rows = anchor_rows()
    errors = errors_of(rows)
    assert set(errors) == {"verl_thresholds", "verl_30b", "verl_one_step", "staleness", "long_tail"}
    assert max(errors.values()) < 0.10
    waits = {row.theirs: row.ours for row in rows if row.anchor == "verl_waits"}
    assert len(waits) == len(VERL) and all(abs(theirs - ours) < 15 for theirs, ours in waits.items())
    assert [waits[theirs] for theirs in sorted(waits)] == sorted(waits.values())

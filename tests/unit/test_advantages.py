"""Group advantages: hand-computed values and the outcomes of degenerate groups."""

import math

import numpy as np
import pytest
import torch

from services.trainer.advantages import group_advantages


def test_group_scaling_divides_by_the_unbiased_deviation():
    # mean 0.5; squares 4 * 0.25 = 1; unbiased variance 1 / 3; std 0.577350; 0.5 / 0.577450 = 0.865876
    expected = 0.5 / (math.sqrt(1 / 3) + 1e-4)
    assert expected == pytest.approx(0.865876, abs=1e-6)
    np.testing.assert_allclose(
        group_advantages([1, 0, 0, 1]), [expected, -expected, -expected, expected], rtol=1e-12
    )


def test_without_scaling_only_the_mean_is_subtracted():
    # mean (2 + 0 + 1 + 1) / 4 = 1
    np.testing.assert_array_equal(group_advantages([2, 0, 1, 1], "none"), [1, -1, 0, 0])


def test_advantages_equal_trls_formula():
    rewards = torch.tensor([0.1, 0.9, 0.4, 0.4, 0.0], dtype=torch.float64)
    expected = (rewards - rewards.mean()) / (torch.std(rewards) + 1e-4)
    np.testing.assert_allclose(group_advantages(rewards.tolist()), expected.numpy(), rtol=1e-12)


@pytest.mark.parametrize("scale", ["group", "none"])
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1e6 + 0.1])
def test_equal_rewards_give_exactly_zero(scale, reward):
    # The float mean of three times 0.1 is not 0.1: without the exact comparison this is noise.
    for size in (2, 3, 8):
        assert group_advantages([reward] * size, scale).tolist() == [0.0] * size


@pytest.mark.parametrize("scale", ["group", "none"])
def test_a_group_of_one_has_nothing_to_compare_with(scale):
    assert group_advantages([3.0], scale).tolist() == [0.0]


def test_an_empty_group_has_no_advantages():
    assert group_advantages([]).tolist() == []


@pytest.mark.parametrize("bad", [None, float("nan"), float("inf"), -float("inf")])
def test_a_missing_reward_is_an_error_and_never_a_zero(bad):
    with pytest.raises(ValueError, match="reward 1 of 3"):
        group_advantages([1.0, bad, 0.0])


def test_computed_in_float64_whatever_comes_in():
    advantages = group_advantages(np.array([1e7, 1e7 + 1], dtype=np.float32), "none")
    assert advantages.dtype == np.float64
    assert advantages.tolist() == [-0.5, 0.5]

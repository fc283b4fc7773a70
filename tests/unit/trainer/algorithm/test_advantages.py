"""Advantage functions: hand-computed values, TRL's formulas, and the outcomes of degenerate groups."""

import itertools
import math
from math import comb

import numpy as np
import pytest
import torch

from tidemill.services.trainer.algorithm.advantages.episode import overlong_penalty, whiten
from tidemill.services.trainer.algorithm.advantages.estimators import (
    dr_grpo,
    gae,
    grpo,
    pass_at_k,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    returns,
    rloo,
)

GROUP_RELATIVE = [grpo, dr_grpo, rloo, lambda rewards: pass_at_k(rewards, 2)]
NAMES = ["grpo", "dr_grpo", "rloo", "pass_at_k"]


def test_grpo_divides_by_the_unbiased_deviation():
    # mean 0.5; squares 4 * 0.25 = 1; unbiased variance 1 / 3; std 0.577350; 0.5 / 0.577450 = 0.865876
    expected = 0.5 / (math.sqrt(1 / 3) + 1e-4)
    assert expected == pytest.approx(0.865876, abs=1e-6)
    np.testing.assert_allclose(grpo([1, 0, 0, 1]), [expected, -expected, -expected, expected], rtol=1e-12)


def test_dr_grpo_subtracts_the_mean_only():
    # mean (2 + 0 + 1 + 1) / 4 = 1
    np.testing.assert_array_equal(dr_grpo([2, 0, 1, 1]), [1, -1, 0, 0])


def test_rloo_compares_with_the_mean_of_the_others():
    # 3 - (0 + 0) / 2, 0 - (3 + 0) / 2, 0 - (3 + 0) / 2
    np.testing.assert_allclose(rloo([3, 0, 0]), [3.0, -1.5, -1.5], rtol=1e-12)


def test_grpo_and_rloo_equal_trls_formulas():
    rewards = torch.tensor([0.1, 0.9, 0.4, 0.4, 0.0], dtype=torch.float64)
    expected = (rewards - rewards.mean()) / (torch.std(rewards) + 1e-4)
    np.testing.assert_allclose(grpo(rewards.tolist()), expected.numpy(), rtol=1e-12)
    baselines = (rewards.sum() - rewards) / (len(rewards) - 1)
    np.testing.assert_allclose(rloo(rewards.tolist()), (rewards - baselines).numpy(), rtol=1e-12)


@pytest.mark.parametrize("function", GROUP_RELATIVE, ids=NAMES)
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1e6 + 0.1])
def test_equal_rewards_give_exactly_zero(function, reward):
    # The float mean of three times 0.1 is not 0.1: without the exact comparison this is noise.
    for size in (2, 3, 8):
        assert function([reward] * size).tolist() == [0.0] * size


@pytest.mark.parametrize("function", GROUP_RELATIVE, ids=NAMES)
def test_a_group_of_one_has_nothing_to_compare_with(function):
    assert function([3.0]).tolist() == [0.0]
    assert function([]).tolist() == []


@pytest.mark.parametrize("function", GROUP_RELATIVE, ids=NAMES)
@pytest.mark.parametrize("bad", [None, float("nan"), float("inf"), -float("inf")])
def test_a_missing_reward_is_an_error_and_never_a_zero(function, bad):
    with pytest.raises(ValueError, match="reward 1 of 3"):
        function([1.0, bad, 0.0])


def test_computed_in_float64_whatever_comes_in():
    advantages = dr_grpo(np.array([1e7, 1e7 + 1], dtype=np.float32))
    assert advantages.dtype == np.float64
    assert advantages.tolist() == [-0.5, 0.5]


class TestPassAtK:
    def test_one_success_of_four_in_pairs(self):
        # 3 of 6 pairs hold the success: p = 0.5, s = 0.5. Success (1 - 0.5) / 0.5 = 1.
        # A failure's other member fails in 2 of 3: (0.5 - 2/3) / 0.5 = -1/3.
        np.testing.assert_allclose(pass_at_k([1, 0, 0, 0], 2), [1.0, -1 / 3, -1 / 3, -1 / 3], rtol=1e-12)

    @pytest.mark.parametrize("successes", range(7))
    @pytest.mark.parametrize("k", [1, 2, 3, 6])
    def test_equals_the_mean_over_all_sets_of_k(self, successes, k):
        """Sets have rewards, which are normalised as in GRPO; a completion gets the mean of its sets."""
        rewards = [1.0] * successes + [0.0] * (6 - successes)
        sets = list(itertools.combinations(range(6), k))
        set_rewards = np.array([max(rewards[i] for i in members) for members in sets])
        deviation = set_rewards.std()
        scaled = (set_rewards - set_rewards.mean()) / deviation if deviation > 1e-9 else 0 * set_rewards
        expected = [np.mean([scaled[s] for s, members in enumerate(sets) if i in members]) for i in range(6)]
        np.testing.assert_allclose(pass_at_k(rewards, k), expected, atol=1e-12)
        assert len(sets) == comb(6, k)

    def test_a_success_is_a_reward_of_at_least_the_threshold(self):
        np.testing.assert_array_equal(pass_at_k([0.7, 0.2, 0.5, 0.1], 2), pass_at_k([1, 0, 1, 0], 2))
        np.testing.assert_array_equal(pass_at_k([0.7, 0.2, 0.5, 0.1], 2, 0.6), pass_at_k([1, 0, 0, 0], 2))

    def test_a_group_smaller_than_k_is_one_set(self):
        assert pass_at_k([1, 0, 0], 8).tolist() == [0.0, 0.0, 0.0]

    def test_k_below_one_is_refused(self):
        with pytest.raises(ValueError, match="at least 1"):
            pass_at_k([1, 0], 0)


class TestReinforcePlusPlus:
    def test_returns_are_discounted_sums_of_what_comes_later(self):
        # 1; 0 + 0.5 * 1; 2 + 0.5 * 0.5
        np.testing.assert_allclose(returns(np.array([2.0, 0.0, 1.0]), 0.5), [2.25, 0.5, 1.0])
        assert returns(np.array([0.0, 0.0, 0.1]), 1.0).tolist() == [0.1, 0.1, 0.1]

    def test_normalised_over_the_tokens_of_the_batch(self):
        # Returns [1], [0, 0]: mean 1/3; squares 4/9 + 2 * 1/9 = 2/3, divisor 2: variance 1/3
        first, second = reinforce_plus_plus([np.array([1.0]), np.zeros(2)])
        np.testing.assert_allclose(first, [(2 / 3) / math.sqrt(1 / 3)], rtol=1e-6)
        np.testing.assert_allclose(second, [(-1 / 3) / math.sqrt(1 / 3)] * 2, rtol=1e-6)

    def test_the_baseline_is_the_groups_mean_and_the_deviation_the_batchs(self):
        # Centred 0.5, -0.5 and 2, -2; lengths weigh: 0.5 once, -0.5 twice, 2 once, -2 once, over 5 tokens
        result = reinforce_plus_plus_baseline([[1.0, 0.0], [4.0, 0.0]], [[1, 2], [1, 1]])
        flat = np.array([0.5, -0.5, -0.5, 2.0, -2.0])
        expected = (flat - flat.mean()) / math.sqrt(flat.var(ddof=1) + 1e-8)
        np.testing.assert_allclose(np.concatenate(result), expected, rtol=1e-12)
        assert [len(values) for values in result] == [1, 2, 1, 1]

    def test_equal_rewards_and_masked_sequences_give_zero(self):
        assert [values.tolist() for values in reinforce_plus_plus([np.full(2, 0.0), np.zeros(0)])] == [
            [0, 0],
            [],
        ]
        result = reinforce_plus_plus_baseline([[0.1] * 3, [0.7] * 3], [[1, 2, 0], [1, 1, 1]])
        assert np.concatenate(result).tolist() == [0.0] * 6


def test_whitening_by_hand_and_of_too_little():
    # [1, 1], [4]: mean 2, variance (1 + 1 + 4) / 2 = 3
    first, second = whiten([np.ones(2), np.array([4.0])])
    np.testing.assert_allclose([*first, *second], np.array([-1, -1, 2]) / math.sqrt(3), rtol=1e-6)
    assert [values.tolist() for values in whiten([np.array([5.0]), np.zeros(0)])] == [[0.0], []]
    assert whiten([]) == []


class TestGae:
    def test_by_hand(self):
        # d = 0 + 0.25 - 0.5 = -0.25, 1 + 0 - 0.25 = 0.75; A = -0.25 + 0.5 * 0.75 = 0.125, 0.75
        advantages, targets = gae(np.array([0.0, 1.0]), np.array([0.5, 0.25]), gamma=1.0, gae_lambda=0.5)
        np.testing.assert_allclose(advantages, [0.125, 0.75])
        np.testing.assert_allclose(targets, [0.625, 1.0])

    def test_lambda_one_is_the_return_minus_the_value_and_lambda_zero_one_step_ahead(self):
        rng = np.random.default_rng(0)
        rewards, values = rng.normal(size=6), rng.normal(size=6)
        advantages, targets = gae(rewards, values, gamma=0.9, gae_lambda=1.0)
        np.testing.assert_allclose(targets, returns(rewards, 0.9))
        np.testing.assert_allclose(advantages, returns(rewards, 0.9) - values)
        one_step, _ = gae(rewards, values, gamma=0.9, gae_lambda=0.0)
        np.testing.assert_allclose(one_step, rewards + 0.9 * np.append(values[1:], 0.0) - values)

    def test_equals_the_sum_written_out(self):
        rng = np.random.default_rng(1)
        rewards, values = rng.normal(size=7), rng.normal(size=7)
        deltas = rewards + 0.95 * np.append(values[1:], 0.0) - values
        expected = [sum((0.95 * 0.8) ** (u - t) * deltas[u] for u in range(t, 7)) for t in range(7)]
        np.testing.assert_allclose(gae(rewards, values, 0.95, 0.8)[0], expected, rtol=1e-12)

    def test_no_tokens_and_unequal_lengths(self):
        assert [values.tolist() for values in gae(np.zeros(0), np.zeros(0))] == [[], []]
        with pytest.raises(ValueError, match="2 rewards but 3 values"):
            gae(np.zeros(2), np.zeros(3))


@pytest.mark.parametrize(
    ("num_tokens", "penalty"),
    [(0, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (100, -1.0)],
)
def test_overlong_punishment_grows_over_the_buffer(num_tokens, penalty):
    assert overlong_penalty(num_tokens, 100, 20, 1.0) == pytest.approx(penalty)
    assert overlong_penalty(num_tokens, 100, 20, 0.5) == pytest.approx(penalty / 2)

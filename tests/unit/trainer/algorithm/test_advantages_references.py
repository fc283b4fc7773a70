"""Advantages against formulas written a second time, in torch and float32, and against values by hand."""

import math

import numpy as np
import pytest
import torch

from tidemill.services.trainer.algorithm.advantages.batch_scaled import gdpo, gpg, grpo_batch, scale_rl
from tidemill.services.trainer.algorithm.advantages.estimators import (
    dr_grpo_passk,
    grpo_passk,
    max_rl,
    opo,
    remax,
)

GENERATOR = np.random.default_rng(7)
GROUPS = [GENERATOR.random(size).round(2).tolist() for size in (4, 3, 6, 2)] + [[0.4] * 4, [1.0]]
LENGTHS = [GENERATOR.integers(0, 50, len(group)).tolist() for group in GROUPS]
CLOSE = {"rtol": 1e-6, "atol": 1e-6}


def f32(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


class TestByHand:
    def test_opo_weighs_the_baseline_by_length(self):
        # (2 * 1 + 1 * 0 + 1 * 0) / 4 = 0.5
        np.testing.assert_allclose(opo([1, 0, 0], [2, 1, 1]), [0.5, -0.5, -0.5])
        assert opo([2, 0], [0, 0]).tolist() == [1.0, -1.0], "without lengths it is the mean"
        with pytest.raises(ValueError, match="2 rewards but 1 lengths"):
            opo([1, 0], [3])

    def test_max_rl_divides_by_the_mean(self):
        assert max_rl([1, 0, 0, 0]).tolist() == [3.0, -1.0, -1.0, -1.0]
        assert max_rl([1, 1, 1, 0]).tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3, -1.0])
        assert max_rl([-1, -1, 1]).tolist() == [0.0] * 3, "made for rewards that are not negative"

    def test_max_rl_is_bounded_where_negative_rewards_bring_the_mean_near_zero(self):
        assert max_rl([1, -0.75, 0]).tolist() == pytest.approx([2.75, -2.5, -0.25])  # mean 1/12, divisor 1/3
        assert max_rl([1, -1 + 1e-9, 0]).tolist() == pytest.approx([3.0, -3.0, 0.0], abs=1e-6)

    def test_remax_compares_with_the_greedy_completion(self):
        assert remax([1, 0, 0.25], 0.25).tolist() == [0.75, -0.25, 0.0]
        with pytest.raises(ValueError, match="reward 0 of 1"):
            remax([1, 0], math.nan)

    def test_only_the_best_of_a_group_gets_its_lead(self):
        assert dr_grpo_passk([1, 3, 0]).tolist() == [0.0, 2.0, 0.0]
        assert dr_grpo_passk([1, 0, 1]).tolist() == [0.0] * 3, "two are best: either can be missed"
        # Variance ((1 - 4/3)^2 + (3 - 4/3)^2 + (4/3)^2) / 2 = 7/3
        np.testing.assert_allclose(grpo_passk([1, 3, 0]), [0.0, 2 / (math.sqrt(7 / 3) + 1e-4), 0.0])

    def test_the_batch_scales_what_the_group_centres(self):
        # 1, 0, 3, 0: mean 1, squares 0 + 1 + 4 + 1 = 6, variance 2
        expected = np.array([0.5, -0.5, 1.5, -1.5])
        np.testing.assert_allclose(grpo_batch([[1, 0], [3, 0]]), expected / (math.sqrt(2) + 1e-4))
        # 0.5, -0.5, 1.5, -1.5: mean 0, squares 5, variance 5/3
        np.testing.assert_allclose(scale_rl([[1, 0], [3, 0]]), expected / (math.sqrt(5 / 3) + 1e-4))

    def test_gpg_gives_the_weight_of_idle_groups_to_the_others(self):
        assert gpg([[1, 0], [1, 1]]).tolist() == [1.0, -1.0, 0.0, 0.0]

    def test_gdpo_tells_apart_what_has_one_sum(self):
        # Sums 1 and 1, as in 0.5 and 0.5; each reward alone prefers another completion, the second one twice.
        first = 0.5 / (math.sqrt(0.5) + 1e-4)
        sums = np.array([first - 2 * first, -first + 2 * first])
        expected = sums / (sums.std(ddof=1) + 1e-4)
        np.testing.assert_allclose(gdpo([[(1.0, 0.0), (0.0, 1.0)]], [1.0, 2.0]), expected)

    def test_gdpo_leaves_out_what_does_not_apply(self):
        rewards = [[(1.0, None), (0.0, 5.0), (0.5, 3.0), (None, None)]]
        first = np.array([1.0, 0.0, 0.5])
        first = (first - 0.5) / (first.std(ddof=1) + 1e-4)
        second = np.array([5.0, 3.0])
        second = (second - 4.0) / (second.std(ddof=1) + 1e-4)
        sums = np.array([first[0], first[1] + second[0], first[2] + second[1]])
        expected = (sums - sums.mean()) / (sums.std(ddof=1) + 1e-4)
        np.testing.assert_allclose(gdpo(rewards, [1.0, 1.0]), [*expected, 0.0])


@pytest.mark.parametrize("reward", [0.0, 0.1, 1e6 + 0.1])
def test_equal_rewards_and_groups_of_one_give_exactly_zero(reward):
    for size in (1, 2, 3, 8):
        group, none = [reward] * size, [0.0] * size
        assert opo(group, [3] * size).tolist() == none
        assert all(function(group).tolist() == none for function in (max_rl, grpo_passk, dr_grpo_passk))
        for function in (grpo_batch, scale_rl, gpg):
            assert function([group, group]).tolist() == 2 * none
        assert gdpo([[(one, one) for one in group]] * 2, [1.0, 1.0]).tolist() == 2 * none


@pytest.mark.parametrize("bad", [None, float("nan"), float("inf")])
def test_a_missing_reward_is_an_error(bad):
    for function in (max_rl, grpo_passk, lambda rewards: opo(rewards, [1, 1])):
        with pytest.raises(ValueError, match="reward 1 of 2"):
            function([1.0, bad])
    for function in (grpo_batch, scale_rl, gpg):
        with pytest.raises(ValueError, match="reward 1 of 2"):
            function([[1.0, 0.0], [1.0, bad]])


class TestAgainstReferences:
    """verl's loops over samples, and TRL's over rectangles, in float32."""

    @pytest.mark.parametrize("number", range(4))
    def test_of_one_group(self, number):
        rewards, lengths = f32(GROUPS[number]), f32(LENGTHS[number])
        baseline = (lengths * rewards).sum() / lengths.sum()
        np.testing.assert_allclose(opo(GROUPS[number], LENGTHS[number]), rewards - baseline, **CLOSE)
        np.testing.assert_allclose(
            max_rl(GROUPS[number]), (rewards - rewards.mean()) / rewards.mean(), **CLOSE
        )
        np.testing.assert_allclose(remax(GROUPS[number], 0.3), rewards - 0.3, **CLOSE)
        others = [torch.cat([rewards[:i], rewards[i + 1 :]]).max() for i in range(len(rewards))]
        lead = torch.stack([rewards.max() - other for other in others])  # max of all - max of the others
        np.testing.assert_allclose(dr_grpo_passk(GROUPS[number]), lead, **CLOSE)
        np.testing.assert_allclose(grpo_passk(GROUPS[number]), lead / (rewards.std() + 1e-4), **CLOSE)

    def test_of_the_batch(self):
        rewards = f32([reward for group in GROUPS for reward in group])
        means = torch.cat([f32(group).mean().expand(len(group)) for group in GROUPS])
        centred = rewards - means
        np.testing.assert_allclose(grpo_batch(GROUPS), centred / (rewards.std() + 1e-4), **CLOSE)
        np.testing.assert_allclose(scale_rl(GROUPS), centred / (centred.std() + 1e-4), **CLOSE)
        teaching = sum(len(group) for group in GROUPS if len(set(group)) > 1)
        np.testing.assert_allclose(gpg(GROUPS), len(rewards) / teaching * centred, **CLOSE)

    def test_gdpo_is_trls_normalise_then_sum(self):
        rng = np.random.default_rng(3)
        rewards = rng.random((5, 4, 3)).astype(np.float32)  # groups, completions, rewards
        rewards[1, :, 2] = 0.5
        weights = [1.0, 0.5, 2.0]
        grouped = torch.from_numpy(rewards)
        scaled = (grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)
        scaled[1, :, 2] = 0.0  # equal: exactly zero here, rounding noise there
        sums = (scaled * f32(weights)).sum(-1).flatten()
        expected = (sums - sums.mean()) / (sums.std() + 1e-4)
        given = [[tuple(map(float, parts)) for parts in group] for group in rewards]
        np.testing.assert_allclose(gdpo(given, weights), expected, **CLOSE)

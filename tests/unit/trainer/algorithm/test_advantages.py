"""Advantage functions: worked examples, formulas written a second time, and degenerate groups."""

import itertools
import math

import numpy as np
import pytest
import torch

from tidemill.services.trainer.algorithm.advantages.estimators import (
    dr_grpo,
    dr_grpo_passk,
    gae,
    gdpo,
    gpg,
    grpo,
    grpo_batch,
    grpo_passk,
    max_rl,
    opo,
    pass_at_k,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
    returns,
    rloo,
    scale_rl,
    whiten,
)
from tidemill.services.trainer.algorithm.advantages.shaping import overlong_penalty

GENERATOR = np.random.default_rng(7)
GROUPS = [GENERATOR.random(size).round(2).tolist() for size in (4, 3, 6, 2)] + [[0.4] * 4, [1.0]]
LENGTHS = [GENERATOR.integers(0, 50, len(group)).tolist() for group in GROUPS]
CLOSE = {"rtol": 1e-6, "atol": 1e-6}
EPSILON = 1e-4
FIRST = 0.5 / (math.sqrt(0.5) + EPSILON)
"""What grpo makes of rewards 1 and 0."""


@pytest.mark.parametrize(
    ("function", "given", "expected"),
    [
        # mean 1/2, squares 4 * 1/4 = 1, divisor 3: deviation sqrt(1/3)
        (grpo, ([1, 0, 0, 1],), np.array([0.5, -0.5, -0.5, 0.5]) / (math.sqrt(1 / 3) + EPSILON)),
        (dr_grpo, ([2, 0, 1, 1],), [1, -1, 0, 0]),  # mean 1
        (rloo, ([3, 0, 0],), [3.0, -1.5, -1.5]),  # 3 - (0 + 0) / 2, 0 - (3 + 0) / 2 twice
        (opo, ([1, 0, 0], [2, 1, 1]), [0.5, -0.5, -0.5]),  # (2 * 1 + 1 * 0 + 1 * 0) / 4 = 0.5
        (opo, ([2, 0], [0, 0]), [1.0, -1.0]),  # without lengths it is the mean
        (max_rl, ([1, 0, 0, 0],), [3.0, -1.0, -1.0, -1.0]),
        (max_rl, ([1, 1, 1, 0],), [1 / 3, 1 / 3, 1 / 3, -1.0]),
        (max_rl, ([-1, -1, 1],), [0.0] * 3),  # made for rewards that are not negative
        (max_rl, ([1, -0.75, 0],), [2.75, -2.5, -0.25]),  # mean 1/12, divisor 1/3
        (max_rl, ([1, -1 + 1e-9, 0],), [3.0, -3.0, 0.0]),  # bounded where the mean is nearly zero
        (remax, ([1, 0, 0.25], 0.25), [0.75, -0.25, 0.0]),
        (dr_grpo_passk, ([1, 3, 0],), [0.0, 2.0, 0.0]),
        (dr_grpo_passk, ([1, 0, 1],), [0.0] * 3),  # two are best: either can be missed
        # variance ((1 - 4/3)^2 + (3 - 4/3)^2 + (4/3)^2) / 2 = 7/3
        (grpo_passk, ([1, 3, 0],), [0.0, 2 / (math.sqrt(7 / 3) + EPSILON), 0.0]),
        # 3 of 6 pairs hold the success: p = 0.5, s = 0.5; it gets (1 - 0.5) / 0.5. A failure's other member
        # fails in 2 of 3: (0.5 - 2/3) / 0.5
        (pass_at_k, ([1, 0, 0, 0], 2), [1.0, -1 / 3, -1 / 3, -1 / 3]),
        (pass_at_k, ([1, 0, 0], 8), [0.0] * 3),  # a group smaller than k is one set
        # 1, 0, 3, 0: mean 1, squares 0 + 1 + 4 + 1 = 6, variance 2
        (grpo_batch, ([[1, 0], [3, 0]],), np.array([0.5, -0.5, 1.5, -1.5]) / (math.sqrt(2) + EPSILON)),
        # 0.5, -0.5, 1.5, -1.5: mean 0, squares 5, variance 5/3
        (scale_rl, ([[1, 0], [3, 0]],), np.array([0.5, -0.5, 1.5, -1.5]) / (math.sqrt(5 / 3) + EPSILON)),
        (gpg, ([[1, 0], [1, 1]],), [1.0, -1.0, 0.0, 0.0]),  # the weight of idle groups goes to the others
        # Sums are equal; each reward alone prefers another completion, and the second one counts twice:
        # -FIRST, FIRST, whose deviation is sqrt(2) FIRST
        (
            gdpo,
            ([[(1.0, 0.0), (0.0, 1.0)]], [1.0, 2.0]),
            np.array([-FIRST, FIRST]) / (math.sqrt(2) * FIRST + EPSILON),
        ),
        (returns, (np.array([2.0, 0.0, 1.0]), 0.5), [2.25, 0.5, 1.0]),  # 1; 0 + 0.5 * 1; 2 + 0.5 * 0.5
        (returns, (np.array([0.0, 0.0, 0.1]), 1.0), [0.1, 0.1, 0.1]),
    ],
)
def test_worked_examples(function, given, expected):
    np.testing.assert_allclose(function(*given), expected, rtol=1e-9, atol=1e-8)


def test_gdpo_leaves_out_what_does_not_apply():
    rewards = [[(1.0, None), (0.0, 5.0), (0.5, 3.0), (None, None)]]
    first, second = np.array([0.5, -0.5, 0.0]), np.array([1.0, -1.0])
    first, second = first / (0.5 + EPSILON), second / (math.sqrt(2) + EPSILON)  # their unbiased deviations
    sums = np.array([first[0], first[1] + second[0], first[2] + second[1]])
    expected = (sums - sums.mean()) / (sums.std(ddof=1) + EPSILON)
    np.testing.assert_allclose(gdpo(rewards, [1.0, 1.0]), [*expected, 0.0])


OF_A_GROUP = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "pass_at_k": lambda rewards: pass_at_k(rewards, 2),
    "opo": lambda rewards: opo(rewards, [3] * len(rewards)),
    "max_rl": max_rl,
    "grpo_passk": grpo_passk,
    "dr_grpo_passk": dr_grpo_passk,
    "grpo_batch": lambda rewards: grpo_batch([rewards]),
    "scale_rl": lambda rewards: scale_rl([rewards]),
    "gpg": lambda rewards: gpg([rewards]),
    "gdpo": lambda rewards: gdpo([[(one, one) for one in rewards]], [1.0, 1.0]),
}


@pytest.mark.parametrize("name", OF_A_GROUP)
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1e6 + 0.1])
def test_equal_rewards_and_groups_of_one_or_none_give_exactly_zero(name, reward):
    # The float mean of three times 0.1 is not 0.1: without the exact comparison this is noise.
    for size in (0, 1, 2, 3, 8):
        assert OF_A_GROUP[name]([reward] * size).tolist() == [0.0] * size


@pytest.mark.parametrize("name", [name for name in OF_A_GROUP if name != "gdpo"])
@pytest.mark.parametrize("bad", [None, float("nan"), float("inf"), -float("inf")])
def test_a_missing_reward_is_an_error_and_never_a_zero(name, bad):
    with pytest.raises(ValueError, match="reward 1 of 3"):
        OF_A_GROUP[name]([1.0, bad, 0.0])


@pytest.mark.parametrize(
    ("function", "given"),
    [
        (remax, ([1, 0], math.nan)),
        (opo, ([1, 0], [3])),
        (pass_at_k, ([1, 0], 0)),
        (gae, (np.zeros(2), np.zeros(3))),
    ],
)
def test_what_does_not_fit_is_refused(function, given):
    with pytest.raises(ValueError):
        function(*given)


def test_computed_in_float64_whatever_comes_in():
    advantages = dr_grpo(np.array([1e7, 1e7 + 1], dtype=np.float32))
    assert advantages.dtype == np.float64
    assert advantages.tolist() == [-0.5, 0.5]


class TestAgainstReferences:
    """verl's loops over samples, and TRL's over rectangles, in torch and float32."""

    @pytest.mark.parametrize("number", range(4))
    def test_of_one_group(self, number):
        group, lengths = GROUPS[number], LENGTHS[number]
        r, weights = torch.tensor(group), torch.tensor(lengths, dtype=torch.float32)
        others = [torch.cat([r[:i], r[i + 1 :]]) for i in range(len(r))]
        lead = torch.stack([r.max() - other.max() for other in others])
        for found, expected in (
            (grpo(group), (r - r.mean()) / (r.std() + EPSILON)),
            (rloo(group), r - torch.stack([other.mean() for other in others])),
            (opo(group, lengths), r - (weights * r).sum() / weights.sum()),
            (max_rl(group), (r - r.mean()) / r.mean()),
            (remax(group, 0.3), r - 0.3),
            (dr_grpo_passk(group), lead),
            (grpo_passk(group), lead / (r.std() + EPSILON)),
        ):
            np.testing.assert_allclose(found, expected, **CLOSE)

    def test_of_the_batch(self):
        rewards = torch.tensor([reward for group in GROUPS for reward in group])
        means = torch.cat([torch.tensor(group).mean().expand(len(group)) for group in GROUPS])
        centred = rewards - means
        np.testing.assert_allclose(grpo_batch(GROUPS), centred / (rewards.std() + EPSILON), **CLOSE)
        np.testing.assert_allclose(scale_rl(GROUPS), centred / (centred.std() + EPSILON), **CLOSE)
        teaching = sum(len(group) for group in GROUPS if len(set(group)) > 1)
        np.testing.assert_allclose(gpg(GROUPS), len(rewards) / teaching * centred, **CLOSE)

    def test_gdpo_is_trls_normalise_then_sum(self):
        rng = np.random.default_rng(3)
        rewards = rng.random((5, 4, 3)).astype(np.float32)  # groups, completions, rewards
        rewards[1, :, 2] = 0.5
        weights = [1.0, 0.5, 2.0]
        grouped = torch.from_numpy(rewards)
        scaled = (grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + EPSILON)
        scaled[1, :, 2] = 0.0  # equal: exactly zero here, rounding noise there
        sums = (scaled * torch.tensor(weights)).sum(-1).flatten()
        expected = (sums - sums.mean()) / (sums.std() + EPSILON)
        given = [[tuple(map(float, parts)) for parts in group] for group in rewards]
        np.testing.assert_allclose(gdpo(given, weights), expected, **CLOSE)

    @pytest.mark.parametrize("successes", range(7))
    @pytest.mark.parametrize("k", [1, 2, 3, 6])
    def test_pass_at_k_is_the_mean_over_all_sets_of_k(self, successes, k):
        """Sets have rewards, which are normalised as in GRPO; a completion gets the mean of its sets."""
        rewards = [1.0] * successes + [0.0] * (6 - successes)
        sets = list(itertools.combinations(range(6), k))
        set_rewards = np.array([max(rewards[i] for i in members) for members in sets])
        deviation = set_rewards.std()
        scaled = (set_rewards - set_rewards.mean()) / deviation if deviation > 1e-9 else 0 * set_rewards
        expected = [np.mean([scaled[s] for s, members in enumerate(sets) if i in members]) for i in range(6)]
        np.testing.assert_allclose(pass_at_k(rewards, k), expected, atol=1e-12)

    def test_gae_is_the_sum_written_out(self):
        rng = np.random.default_rng(1)
        rewards, values = rng.normal(size=7), rng.normal(size=7)
        deltas = rewards + 0.95 * np.append(values[1:], 0.0) - values
        expected = [sum((0.95 * 0.8) ** (u - t) * deltas[u] for u in range(t, 7)) for t in range(7)]
        np.testing.assert_allclose(gae(rewards, values, 0.95, 0.8)[0], expected, rtol=1e-12)


def test_a_success_is_a_reward_of_at_least_the_threshold():
    np.testing.assert_array_equal(pass_at_k([0.7, 0.2, 0.5, 0.1], 2), pass_at_k([1, 0, 1, 0], 2))
    np.testing.assert_array_equal(pass_at_k([0.7, 0.2, 0.5, 0.1], 2, 0.6), pass_at_k([1, 0, 0, 0], 2))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        # mean 2, variance (1 + 1 + 4) / 2 = 3
        ([[1.0, 1.0], [4.0]], [[-1 / math.sqrt(3)] * 2, [2 / math.sqrt(3)]]),
        # returns of rewards 1 and 0: mean 1/3, squares 4/9 + 2 * 1/9 = 2/3, divisor 2: variance 1/3
        ([[1.0], [0.0, 0.0]], [[2 / math.sqrt(3)], [-1 / math.sqrt(3)] * 2]),
        ([[5.0], []], [[0.0], []]),
        ([[0.0, 0.0], []], [[0.0, 0.0], []]),
        ([], []),
    ],
)
def test_whitening_over_the_tokens_of_the_batch(values, expected):
    arrays = [np.array(one) for one in values]
    for function in (whiten, lambda arrays: reinforce_plus_plus(arrays, [0.0] * len(arrays))):
        found = function(arrays)
        assert len(found) == len(expected)
        for mine, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-6)


def test_the_baseline_is_the_groups_mean_and_the_deviation_the_batchs():
    # Centred 0.5, -0.5 and 2, -2; lengths weigh: 0.5 once, -0.5 twice, 2 once, -2 once, over 5 tokens
    result = reinforce_plus_plus_baseline([[1.0, 0.0], [4.0, 0.0]], [[1, 2], [1, 1]])
    flat = np.array([0.5, -0.5, -0.5, 2.0, -2.0])
    expected = (flat - flat.mean()) / math.sqrt(flat.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(np.concatenate(result), expected, rtol=1e-12)
    assert [len(values) for values in result] == [1, 2, 1, 1]
    equal = reinforce_plus_plus_baseline([[0.1] * 3, [0.7] * 3], [[1, 2, 0], [1, 1, 1]])
    assert np.concatenate(equal).tolist() == [0.0] * 6


def test_gae_by_hand_and_at_the_ends_of_lambda():
    # d = 0 + 0.25 - 0.5 = -0.25, 1 + 0 - 0.25 = 0.75; A = -0.25 + 0.5 * 0.75 = 0.125, 0.75
    advantages, targets = gae(np.array([0.0, 1.0]), np.array([0.5, 0.25]), gamma=1.0, gae_lambda=0.5)
    np.testing.assert_allclose([advantages, targets], [[0.125, 0.75], [0.625, 1.0]])
    rng = np.random.default_rng(0)
    rewards, values = rng.normal(size=6), rng.normal(size=6)
    advantages, targets = gae(rewards, values, gamma=0.9, gae_lambda=1.0)
    np.testing.assert_allclose(targets, returns(rewards, 0.9))
    np.testing.assert_allclose(advantages, returns(rewards, 0.9) - values)
    one_step, _ = gae(rewards, values, gamma=0.9, gae_lambda=0.0)
    np.testing.assert_allclose(one_step, rewards + 0.9 * np.append(values[1:], 0.0) - values)
    assert [values.tolist() for values in gae(np.zeros(0), np.zeros(0))] == [[], []]


@pytest.mark.parametrize(
    ("num_tokens", "penalty"),
    [(0, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (100, -1.0)],
)
def test_overlong_punishment_grows_over_the_buffer(num_tokens, penalty):
    assert overlong_penalty(num_tokens, 100, 20, 1.0) == pytest.approx(penalty)
    assert overlong_penalty(num_tokens, 100, 20, 0.5) == pytest.approx(penalty / 2)

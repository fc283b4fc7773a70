"""Advantages: the functions by worked examples and formulas written a second time; from groups to samples."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

from tests.support import samples as samples_support
from tests.support.samples import changed, taught
from tests.support.sessions import make_segment, make_session
from tests.support.training import group_of_samples, make_score, plain_sample, trainer_config
from tidemill.common.config.algorithm import TeacherTermConfig
from tidemill.common.config.algorithms.advantage import returns, whiten
from tidemill.common.config.algorithms.advantages.dr_grpo import dr_grpo
from tidemill.common.config.algorithms.advantages.gdpo import gdpo
from tidemill.common.config.algorithms.advantages.grpo import grpo
from tidemill.common.config.algorithms.advantages.grpo_batch import grpo_batch
from tidemill.common.config.algorithms.advantages.max_rl import max_rl
from tidemill.common.config.algorithms.advantages.opo import opo
from tidemill.common.config.algorithms.advantages.reinforce_plus_plus import reinforce_plus_plus
from tidemill.common.config.algorithms.advantages.reinforce_plus_plus_baseline import (
    reinforce_plus_plus_baseline,
)
from tidemill.common.config.algorithms.advantages.remax import remax
from tidemill.common.config.algorithms.advantages.rloo import rloo
from tidemill.common.config.algorithms.table import ADVANTAGES
from tidemill.common.config.algorithms.with_settings.gae import gae
from tidemill.common.config.algorithms.with_settings.pass_at_k import pass_at_k
from tidemill.services.trainer.algorithm.advantages import Advantages
from tidemill.services.trainer.algorithm.advantages.shaping import (
    overlong_penalty,
    shaped_reward,
    token_rewards,
)
from tidemill.services.trainer.algorithm.advantages.teacher import add_teacher
from tidemill.services.trainer.groups.group import Group
from tidemill.services.trainer.groups.sample import Sample, TurnEnd, make_sample, turn_ends

GENERATOR = np.random.default_rng(7)
GROUPS = [GENERATOR.random(size).round(2).tolist() for size in (4, 3, 6, 2)] + [[0.4] * 4, [1.0]]
LENGTHS = [GENERATOR.integers(0, 50, len(group)).tolist() for group in GROUPS]
CLOSE = {"rtol": 1e-6, "atol": 1e-6}
EPSILON = 1e-4
FIRST = 0.5 / (math.sqrt(0.5) + EPSILON)
"""What grpo makes of rewards 1 and 0."""


@pytest.mark.parametrize(
    ("function", "arguments", "expected"),
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
        # 3 of 6 pairs hold the success: p = 0.5, s = 0.5; it gets (1 - 0.5) / 0.5. A failure's other member
        # fails in 2 of 3: (0.5 - 2/3) / 0.5
        (pass_at_k, ([1, 0, 0, 0], 2), [1.0, -1 / 3, -1 / 3, -1 / 3]),
        (pass_at_k, ([1, 0, 0], 8), [0.0] * 3),  # a group smaller than k is one set
        # 1, 0, 3, 0: mean 1, squares 0 + 1 + 4 + 1 = 6, variance 2
        (grpo_batch, ([[1, 0], [3, 0]],), np.array([0.5, -0.5, 1.5, -1.5]) / (math.sqrt(2) + EPSILON)),
        # Sums are equal; each reward alone prefers another completion, and the second one counts twice:
        # -FIRST, FIRST, whose deviation is sqrt(2) FIRST
        (gdpo, ([[(1.0, 0.0), (0.0, 1.0)]], [1.0, 2.0]), np.array([-FIRST,
         FIRST]) / (math.sqrt(2) * FIRST + EPSILON)),
        (returns, (np.array([2.0, 0.0, 1.0]), 0.5), [2.25, 0.5, 1.0]),  # 1; 0 + 0.5 * 1; 2 + 0.5 * 0.5
        (returns, (np.array([0.0, 0.0, 0.1]), 1.0), [0.1, 0.1, 0.1]),
    ],
)  # fmt: skip
def test_worked_examples(function, arguments, expected):
    np.testing.assert_allclose(function(*arguments), expected, rtol=1e-9, atol=1e-8)


def test_gdpo_leaves_out_what_does_not_apply():
    rewards = [[(1.0, None), (0.0, 5.0), (0.5, 3.0), (None, None)]]
    first = np.array([0.5, -0.5, 0.0])
    second = np.array([1.0, -1.0])
    # their unbiased deviations
    first = first / (0.5 + EPSILON)
    second = second / (math.sqrt(2) + EPSILON)
    sums = np.array([first[0], first[1] + second[0], first[2] + second[1]])
    expected = (sums - sums.mean()) / (sums.std(ddof=1) + EPSILON)
    np.testing.assert_allclose(gdpo(rewards, [1.0, 1.0]), [*expected, 0.0])


OF_A_GROUP = {
    "grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo, "pass_at_k": lambda rewards: pass_at_k(rewards, 2),
    "opo": lambda rewards: opo(rewards, [3] * len(rewards)), "max_rl": max_rl, 
    "grpo_batch": lambda rewards: grpo_batch([rewards]),
    "gdpo": lambda rewards: gdpo([[(reward, reward) for reward in rewards]], [1.0, 1.0]),
}  # fmt: skip


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
    ("function", "arguments"),
    [
        (remax, ([1, 0], math.nan)),
        (opo, ([1, 0], [3])),
        (pass_at_k, ([1, 0], 0)),
        (gae, (np.zeros(2), np.zeros(3))),
    ],
)
def test_what_does_not_fit_is_refused(function, arguments):
    with pytest.raises(ValueError):
        function(*arguments)


def test_computed_in_float64_whatever_comes_in():
    advantages = dr_grpo(np.array([1e7, 1e7 + 1], dtype=np.float32))
    assert advantages.dtype == np.float64
    assert advantages.tolist() == [-0.5, 0.5]


class TestAgainstReferences:
    """verl's loops over samples, and TRL's over rectangles, in torch and float32."""

    @pytest.mark.parametrize("number", range(4))
    def test_of_one_group(self, number):
        group = GROUPS[number]
        lengths = LENGTHS[number]
        r = torch.tensor(group)
        weights = torch.tensor(lengths, dtype=torch.float32)
        others = [torch.cat([r[:i], r[i + 1 :]]) for i in range(len(r))]
        for advantages, expected in (
            (grpo(group), (r - r.mean()) / (r.std() + EPSILON)),
            (rloo(group), r - torch.stack([siblings.mean() for siblings in others])),
            (opo(group, lengths), r - (weights * r).sum() / weights.sum()),
            (max_rl(group), (r - r.mean()) / r.mean()),
            (remax(group, 0.3), r - 0.3),
        ):
            np.testing.assert_allclose(advantages, expected, **CLOSE)

    def test_of_the_batch(self):
        rewards = torch.tensor([reward for group in GROUPS for reward in group])
        means = torch.cat([torch.tensor(group).mean().expand(len(group)) for group in GROUPS])
        centred = rewards - means
        np.testing.assert_allclose(grpo_batch(GROUPS), centred / (rewards.std() + EPSILON), **CLOSE)

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
        np.testing.assert_allclose(gdpo(rewards.tolist(), weights), expected, **CLOSE)

    @pytest.mark.parametrize("successes", range(7))
    @pytest.mark.parametrize("k", [1, 2, 3, 6])
    def test_pass_at_k_is_the_mean_over_all_sets_of_k(self, successes, k):
        """Sets have rewards, which are normalised as in GRPO; a completion gets the mean of its sets."""
        rewards = [1.0] * successes + [0.0] * (6 - successes)
        sets = list(itertools.combinations(range(6), k))
        best = []
        for members in sets:
            best.append(max(rewards[i] for i in members))
        set_rewards = np.array(best)
        deviation = set_rewards.std()
        scaled = (set_rewards - set_rewards.mean()) / deviation if deviation > 1e-9 else 0 * set_rewards
        expected = []
        for i in range(6):
            of_its_sets = [scaled[s] for s, members in enumerate(sets) if i in members]
            expected.append(np.mean(of_its_sets))
        np.testing.assert_allclose(pass_at_k(rewards, k), expected, atol=1e-12)

    def test_gae_is_the_sum_written_out(self):
        rng = np.random.default_rng(1)
        rewards = rng.normal(size=7)
        values = rng.normal(size=7)
        deltas = rewards + 0.95 * np.append(values[1:], 0.0) - values
        expected = []
        for t in range(7):
            expected.append(sum((0.95 * 0.8) ** (u - t) * deltas[u] for u in range(t, 7)))
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
    arrays = [np.array(of_sample) for of_sample in values]
    for function in (whiten, lambda arrays: reinforce_plus_plus(arrays, [0.0] * len(arrays))):
        whitened_arrays = function(arrays)
        assert len(whitened_arrays) == len(expected)
        for mine, theirs in zip(whitened_arrays, expected, strict=True):
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
    rewards = rng.normal(size=6)
    values = rng.normal(size=6)
    advantages, targets = gae(rewards, values, gamma=0.9, gae_lambda=1.0)
    np.testing.assert_allclose(targets, returns(rewards, 0.9))
    np.testing.assert_allclose(advantages, returns(rewards, 0.9) - values)
    one_step, _ = gae(rewards, values, gamma=0.9, gae_lambda=0.0)
    np.testing.assert_allclose(one_step, rewards + 0.9 * np.append(values[1:], 0.0) - values)
    assert [values.tolist() for values in gae(np.zeros(0), np.zeros(0))] == [[], []]


@pytest.mark.parametrize(
    ("num_tokens", "penalty"), [(0, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (100, -1.0)]
)
def test_overlong_punishment_grows_over_the_buffer(num_tokens, penalty):
    assert overlong_penalty(num_tokens, 100, 20, 1.0) == pytest.approx(penalty)
    assert overlong_penalty(num_tokens, 100, 20, 0.5) == pytest.approx(penalty / 2)


REFERENCE = {"reference": {"model": "frozen"}}
LOG2 = np.log(2.0)


def assigner(**algorithm: Any) -> Advantages:
    """With completions of at most 10 tokens."""
    return Advantages(trainer_config(algorithm=algorithm, rollout__sampling={"max_tokens": 10}))


def assigned(advantages: Advantages, *groups: Group) -> list[Sample]:
    return [sample for group in samples_support.assigned(advantages, *groups) for sample in group.samples]


def group_of(ticket: int, *rewards: float, **fields: Any) -> Group:
    return group_of_samples(ticket, *(plain_sample(ticket, i, r, **fields) for i, r in enumerate(rewards)))


def values_of(samples: list[Sample]) -> list[float]:
    """Of samples with one number each."""
    return [float(sample.advantage) for sample in samples]


def whitened(values: Any) -> Any:
    flat = np.array(values)
    return (flat - flat.mean()) / np.sqrt(flat.var(ddof=1) + 1e-8)


@pytest.mark.parametrize("name", [name for name in ADVANTAGES if name not in ("gae", "gdpo", "remax")])
def test_only_batch_normalisation_waits_for_the_batch(name):
    advantages = assigner(advantage=name, pass_k=2)
    assert advantages.scope == ADVANTAGES[name].scope
    groups = [group_of(0, 1.0, 0.0), group_of(1, 3.0, 0.0), group_of(2, 1.0, 1.0)]
    together = values_of(assigned(advantages, *groups))
    alone = [value for group in groups for value in values_of(assigned(advantages, group))]
    assert (together == alone) is (advantages.scope == "group")


def test_opo_weighs_by_trained_tokens():
    masked = plain_sample(0, 1, 0.0, mask=np.array([True, False, False]))
    done = assigned(assigner(advantage="opo"), group_of_samples(0, plain_sample(0, 0, 1.0), masked))
    assert values_of(done) == [0.25, -0.75]  # baseline 3 / (3 + 1)


@pytest.mark.parametrize(
    ("overlong", "expected"),
    [
        ({}, [0.75, -0.25]),
        # Of at most 10 tokens the last 5 are the buffer: 10 tokens cost 2, 6 of the greedy sample 0.4.
        ({"penalty": 2.0, "buffer_share": 0.5}, [1.15, -1.85]),
    ],
)
def test_remax_compares_with_the_greedy_sample_by_the_same_rewards(overlong, expected):
    group = group_of_samples(0, plain_sample(0, 0, 1.0, 3), plain_sample(0, 1, 0.0, 10))
    group.baseline = plain_sample(0, 2, 0.25, 6)
    done = assigned(assigner(advantage="remax", overlong=overlong), group)
    np.testing.assert_allclose(values_of(done), expected, atol=1e-12)


def test_gdpo_reads_the_rewards_of_the_scores_with_the_weights_of_the_config():
    rewards = {
        "right": {"function": "gsm8k", "weight": 2.0},
        "short": {"function": "exact_match", "weight": 0.5},
        "held_out": {"function": "math", "lanes": ["eval"]},
    }
    config = trainer_config(algorithm={"advantage": "gdpo"}, reward__rewards=rewards)
    components = [{"right": 1.0, "short": 0.0}, {"right": 0.0, "short": 1.0}, {"right": 0.0}]
    group = group_of(0, 0.0, 0.0, 0.0)
    for i, parts in enumerate(components):
        group.scores[i] = make_score(0, i, 0.0, components=parts | {"right/detail": 7.0})
    expected = gdpo([[(1.0, 0.0), (0.0, 1.0), (0.0, None)]], [2.0, 0.5]).tolist()
    assert values_of(assigned(Advantages(config), group)) == expected


def shaped_by(rewards: list[float], lengths: list[int], turns: Any = (), **algorithm: Any) -> Any:
    """What is taken off each reward, up to the group's mean; and whether the scores stay what they were."""
    samples = [plain_sample(0, i, r, n) for i, (r, n) in enumerate(zip(rewards, lengths, strict=True))]
    samples[0] = changed(samples[0], turns=turns)
    done = assigned(assigner(advantage="dr_grpo", **algorithm), group_of_samples(0, *samples))
    assert [sample.reward for sample in done] == rewards
    return np.array(values_of(done))


def centred(values: list[float]) -> Any:
    return np.array(values) - np.mean(values)


SOLVED = [1.0, 1.0, 0.0, 0.0]
TWO_TURNS = (TurnEnd(5, 0.0), TurnEnd(10, 0.0))


@pytest.mark.parametrize(
    ("rewards", "lengths", "algorithm", "shaped"),
    [
        # Of at most 10 tokens the last 5 are the buffer: 10 tokens cost 2, 6 cost 0.4, 5 nothing.
        ([2.0] * 3, [10, 6, 5], {"overlong": {"penalty": 2.0, "buffer_share": 0.5}}, [0.0, 1.6, 2.0]),
        # Half of the group is solved; the longest has 20 tokens, the first one two turns.
        (SOLVED, [10, 5, 20, 20], {"length_penalty": {"tokens": 0.2}}, [0.95, 0.975, -0.1, -0.1]),
        (SOLVED, [10, 5, 20, 20], {"length_penalty": {"tokens": 0.2, "of": "successes"}}, [0.95, 0.975, 0.0,
         0.0]),
        (SOLVED, [10, 5, 20, 20], {"length_penalty": {"turns": 0.4}}, [0.8, 0.9, -0.1, -0.1]),
        (SOLVED, [10, 5, 20, 20], {"length_penalty": {"tokens": 0.2, "turns": 0.4}}, [0.75, 0.875, -0.2,
         -0.2]),
        ([0.0, 0.25], [10, 20], {"length_penalty": {"tokens": 0.2}}, [0.0, 0.25]),  # nothing is solved
    ],
)  # fmt: skip
def test_length_costs_reward_before_completions_are_compared(rewards, lengths, algorithm, shaped):
    advantages = shaped_by(rewards, lengths, TWO_TURNS if len(rewards) == 4 else (), **algorithm)
    np.testing.assert_allclose(advantages, centred(shaped), atol=1e-12)


def test_the_length_penalty_is_prime_rls_linear_one():
    """Its formula, a second time in torch and float32; with rewards of 0 and 1 the mean is the pass rate."""
    rng = np.random.default_rng(5)
    rewards = rng.integers(0, 2, 8).astype(float)
    lengths = rng.integers(1, 50, 8)
    advantages = shaped_by(rewards.tolist(), lengths.tolist(), length_penalty={"tokens": 0.25})
    r = torch.tensor(rewards, dtype=torch.float32)
    n = torch.tensor(lengths, dtype=torch.float32)
    shaped = r - r.mean() * 0.25 * (n / n.max())
    np.testing.assert_allclose(advantages, shaped - shaped.mean(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("estimator", "value"), [("k1", 0.5), ("k2", 0.125), ("k3", np.exp(-0.5) - 0.5), ("abs", 0.5)]
)
def test_kl_in_the_reward_is_summed_over_trained_tokens(estimator, value):
    # rollout - reference = 0.5 at each token, of which two of three are trained; beta 0.1
    far = {"reference_logprobs": np.full(3, -1.5, np.float32), "mask": np.array([True, False, True])}
    near = {"reference_logprobs": np.full(3, -1.0, np.float32)}
    kl = {"place": "reward", "estimator": estimator, "coefficient": 0.1}
    group = group_of_samples(0, plain_sample(0, 0, 1.0, **far), plain_sample(0, 1, 1.0, **near))
    done = assigned(assigner(advantage="dr_grpo", kl=kl, **REFERENCE), group)
    np.testing.assert_allclose(values_of(done), [-0.1 * value, 0.1 * value], atol=1e-7)


def test_reinforce_plus_plus_puts_the_penalty_on_the_tokens_that_follow_it():
    # Token rewards -0.5, 0, 1 - 0.5 => returns 0, 0.5, 0.5; and 0, 0, 0.
    kl = {"place": "reward", "estimator": "k1", "coefficient": 1.0}
    references = [np.array([-1.5, -1.0, -1.5], np.float32), np.full(3, -1.0, np.float32)]
    samples = [
        plain_sample(0, i, 1.0 - i, reference_logprobs=logprobs) for i, logprobs in enumerate(references)
    ]
    advantages = assigner(advantage="reinforce_plus_plus", kl=kl, **REFERENCE)
    first, second = assigned(advantages, group_of_samples(0, *samples))
    expected = whitened([0.0, 0.5, 0.5, 0.0, 0.0, 0.0])
    both = np.append(first.columns["advantages"], second.columns["advantages"])
    np.testing.assert_allclose(both, expected, atol=1e-6)
    assert first.mean_advantage == pytest.approx(expected[:3].mean())


def test_without_a_penalty_reinforce_plus_plus_has_one_number_for_a_sequence():
    half = np.array([False, True])
    none = np.zeros(2, np.bool_)
    done = assigned(
        assigner(advantage="reinforce_plus_plus"),
        group_of_samples(0, plain_sample(0, 0, 1.0, 1), plain_sample(0, 1, 0.0, 2, mask=half)),
        group_of_samples(1, plain_sample(1, 0, 0.0, 1), plain_sample(1, 1, 5.0, 2, mask=none)),
    )
    # Over trained tokens only: 1, 0, 0; the masked sequence has no weight and no gradient.
    np.testing.assert_allclose(values_of(done), [*whitened([1.0, 0.0, 0.0]), 0.0])


def trained_advantages(samples: list[Sample]) -> np.ndarray:
    """Those of the trained tokens of all samples."""
    return np.concatenate([sample.columns["advantages"][sample.mask] for sample in samples])


def test_gae_goes_over_trained_tokens_and_whitening_takes_the_batch_and_leaves_the_values_targets():
    # The token in the middle is no action: rewards 0, 1, values 0.5, 0.25 as in the function's docstring.
    fields = {"values": np.array([0.5, 9.0, 0.25], np.float32), "mask": np.array([True, False, True])}
    plain = assigner(advantage="gae", value={"whiten": False}, gae_lambda=0.5)
    scaled = assigner(advantage="gae", gae_lambda=0.5)
    assert (plain.scope, scaled.scope) == ("group", "batch")
    groups = [group_of(t, float(t), **fields) for t in (1, 0, 2)]
    raw = assigned(plain, *groups)
    done = assigned(scaled, *groups)
    np.testing.assert_allclose(raw[0].columns["advantages"], [0.125, 0.0, 0.75])
    np.testing.assert_allclose(raw[0].columns["returns"], [0.625, 0.0, 1.0])
    np.testing.assert_allclose(trained_advantages(done), whitened(trained_advantages(raw)))
    for mine, theirs in zip(done, raw, strict=True):
        np.testing.assert_array_equal(mine.columns["returns"], theirs.columns["returns"])


GAMMA = 0.9
LAMBDA = 0.8
VALUES = (0.5, -0.25, 0.125, 0.75, -1.0)
"""At the model's tokens of `session`."""


def session(index: int, reward: float, rewards: tuple[float | None, ...] = (1.0, None, -0.5)) -> Sample:
    """Turns of two, one and two tokens, the last in a segment of its own, with an answer between them."""
    first = make_segment((3, 4), (5, 6), (7, 8, 9), (10,), rewards=rewards[:2])
    trajectory = make_session(0, index, first, make_segment((11,), (12, 13), rewards=rewards[2:]))
    values = np.zeros(8, np.float32)
    sample = make_sample(trajectory)
    sample.turns = tuple(turn_ends(trajectory.segments, 1.0))
    values[sample.mask] = VALUES
    return changed(sample, reward=reward, values=values)


def discounts(gamma: float, per: str) -> list[float]:
    """From each token of `session` to the next: turns end after tokens 1, 2 and 4."""
    return [gamma] * 5 if per == "token" else [1.0, gamma, gamma, 1.0, gamma]


class TestTurns:
    ALGORITHM = trainer_config().trainer.algorithm

    @pytest.mark.parametrize(
        ("rewards", "masked", "placed"),
        [
            ((1.0, None, -0.5), None, [0.0, 1.0, 0.0, 0.0, 2.0]),
            ((None, None, None), None, [0.0, 0.0, 0.0, 0.0, 3.0]),
            # Without the only token of the second turn, its reward is at the one before; of the first turn,
            # at the first token of all.
            ((1.0, 0.25, -0.5), 5, [0.0, 1.25, 0.0, 1.75]),
            ((1.0, None, -0.5), slice(0, 2), [1.0, 0.0, 2.0]),
            ((1.0, 0.25, -0.5), slice(None), []),
        ],
    )
    def test_rewards_stand_at_the_ends_of_their_turns_and_the_rest_at_the_end(self, rewards, masked, placed):
        sample = session(0, 3.0, rewards)
        mask = sample.mask.copy()
        if masked is not None:
            mask[masked] = False
        sample.set_mask(mask)
        assert token_rewards(sample, self.ALGORITHM, 100).tolist() == placed
        assert shaped_reward(sample, self.ALGORITHM, 100) == 3.0

    @pytest.mark.parametrize("per", ["token", "turn"])
    def test_gae_is_the_recursion_over_the_models_tokens(self, per):
        advantages = assigner(
            advantage="gae", gamma=GAMMA, gamma_per=per, gae_lambda=LAMBDA, value={"whiten": False}
        )
        (sample,) = assigned(advantages, group_of_samples(0, session(0, 3.0)))
        rewards = [0.0, 1.0, 0.0, 0.0, 2.0]
        expected = [0.0] * 5
        following = 0.0
        for t in range(4, -1, -1):
            discount = discounts(GAMMA, per)[t]
            next_value = VALUES[t + 1] if t < 4 else 0.0
            following = rewards[t] + discount * next_value - VALUES[t] + discount * LAMBDA * following
            expected[t] = following
        advantage_T = sample.columns["advantages"]
        returns_T = sample.columns["returns"]
        np.testing.assert_allclose(advantage_T[sample.mask], expected, rtol=1e-12)
        np.testing.assert_allclose(returns_T[sample.mask], np.add(expected, VALUES), rtol=1e-12)
        assert not advantage_T[~sample.mask].any()

    @pytest.mark.parametrize(("gamma", "per"), [(GAMMA, "token"), (GAMMA, "turn"), (1.0, "token")])
    def test_reinforce_plus_plus_whitens_the_returns_of_tokens(self, gamma, per):
        assign = assigner(advantage="reinforce_plus_plus", gamma=gamma, gamma_per=per)
        samples = assigned(assign, group_of_samples(0, session(0, 3.0), session(1, -1.0)))
        expected: list[float] = []
        # Of the score, less the turns' 1.0 and -0.5, and with the last turn's own.
        for remainder in (2.0, -2.0):
            following = 0.0
            returns = [0.0] * 5
            for t, reward in reversed(list(enumerate([0.0, 1.0, 0.0, 0.0, remainder]))):
                following = reward + discounts(gamma, per)[t] * following
                returns[t] = following
            expected += returns
        np.testing.assert_allclose(trained_advantages(samples), whitened(expected), rtol=1e-9)

    def test_a_session_is_overlong_by_what_the_model_wrote_however_its_history_was_split(self):
        overlong = {"penalty": 1.0, "buffer_share": 0.5}
        algorithm = trainer_config(algorithm={"overlong": overlong}).trainer.algorithm
        whole = make_segment((3, 4), (5, 6), (7, 8, 9), (10,), (), (12, 13))
        samples = [session(0, 2.0), changed(make_sample(make_session(0, 0, whole)), reward=2.0)]
        # Of at most 8 tokens the last 4 are the buffer, and the model has written 5 of the 8.
        assert [shaped_reward(sample, algorithm, 8) for sample in samples] == [1.75, 1.75]

    def test_group_estimators_compare_the_scores_of_sessions(self):
        group = group_of_samples(0, session(0, 3.0), session(1, -1.0))
        assert values_of(assigned(assigner(advantage="dr_grpo"), group)) == [2.0, -2.0]

    def test_a_single_turn_is_one_turn(self):
        """Discounted per turn, its tokens are not discounted at all."""
        advantages = assigner(advantage="gae", gamma=GAMMA, gamma_per="turn", value={"whiten": False})
        plain = changed(session(0, 3.0), turns=())
        (sample,) = assigned(advantages, group_of_samples(0, plain))
        assert sample.columns["returns"][sample.mask].tolist() == pytest.approx([3.0] * 5)


def by_teacher(rollout: list[float], teacher: list[float], weight: float = 1.0, **fields: Any) -> Sample:
    """By probabilities."""
    logprobs = np.log(np.array(rollout, np.float32))
    sample = plain_sample(0, 0, 0.0, len(rollout), rollout_logprobs=logprobs, **fields)
    return taught(sample, np.log(np.array(teacher, np.float32))[sample.mask], weight)


class TestTeacher:
    @pytest.mark.parametrize(
        ("sample", "term", "expected"),
        [
            (by_teacher([0.5, 0.2], [0.25, 0.4], 2.0), {"gamma": 0.0}, [-2 * LOG2, 2 * LOG2]),
            (by_teacher([0.5, 0.2], [0.25, 0.4], 2.0), {"gamma": 0.5}, [-LOG2, 2 * LOG2]),
            (by_teacher([0.5, 0.2], [0.25, 0.4], 2.0), {"gamma": 1.0}, [0.0, 2 * LOG2]),
            # Beside the outcome's advantage, and on the model's tokens alone.
            (by_teacher([0.5, 0.9, 0.2], [0.25, 1.0, 0.4], mask=np.array([True, False, True]), advantage=3.0),
             {"gamma": 1.0}, [3.0, 3.0, 3.0 + LOG2]),
            (by_teacher([0.9, 0.001], [1e-9, 0.9]), {"clip": 2.0}, [-2.0, 2.0]),
            (by_teacher([0.5], [0.25], 0.0, advantage=1.5), {}, [1.5]),
            (by_teacher([0.5], [0.25], advantage=1.5), {"place": "loss"}, [1.5]),
        ],
    )  # fmt: skip
    def test_reverse_kl_is_a_reward_for_each_token(self, sample, term, expected):
        add_teacher(sample, TeacherTermConfig(**term))
        np.testing.assert_allclose(sample.columns["advantages"], expected, atol=1e-6)

    @pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce_plus_plus"])
    def test_every_advantage_has_the_teachers_part_added_as_it_is(self, name):
        plain = group_of(7, 1.0, 0.0)
        samples = [taught(sample, [-1.25, -1.0, -0.5], 0.5) for sample in plain.samples]
        taught_group = group_of_samples(7, *samples)
        advantages = assigner(advantage=name)
        for sample, outcome in zip(
            assigned(advantages, taught_group), assigned(advantages, plain), strict=True
        ):
            expected = outcome.columns["advantages"] + 0.5 * np.array([-0.25, 0.0, 0.5])
            np.testing.assert_allclose(sample.columns["advantages"], expected, atol=1e-7)

"""The losses: hand-computed values, and what each choice does to gradients.

The arithmetic is written beside each expectation. Logprobs are given as logs of round probabilities.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.support.losses import loss_of, make_tokens, tensor
from tidemill.common.config.algorithm import AlgorithmConfig
from tidemill.common.config.algorithm_sections import KlConfig
from tidemill.services.trainer.algorithm.losses.corrections import importance_weights, kl_penalty, value_loss
from tidemill.services.trainer.algorithm.losses.surrogates import clipped_surrogate
from tidemill.services.trainer.algorithm.losses.tokens import (
    denominator,
    sequence_means,
    sequence_sums,
    token_weight,
)

ROLLOUT = {"old_logprobs": "rollout"}


def two_and_one() -> dict[str, object]:
    """The first two tokens are one sequence, the third is another."""
    return {"sequence_N": torch.tensor([0, 0, 1]), "num_sequences": 2}


@pytest.mark.parametrize(
    ("ratio", "advantage", "objective", "slope"),
    [
        (1.0, 2.0, 2.0, 2.0),
        (1.2, 2.0, 2.4, 2.0),
        (1.5, 2.0, 2.56, 0.0),  # min(3.0, 1.28 * 2): clipped above
        (0.5, 2.0, 1.0, 2.0),  # min(1.0, 0.8 * 2): a good token that became unlikely keeps its gradient
        (0.5, -2.0, -1.6, 0.0),  # min(-1.0, 0.8 * -2): clipped below
        (1.5, -2.0, -3.0, -2.0),  # min(-3.0, 1.28 * -2): a bad token that became likely keeps its gradient
    ],
)
def test_clipped_surrogate_by_hand(ratio, advantage, objective, slope):
    ratio_N = tensor(ratio).requires_grad_()
    algorithm = AlgorithmConfig(clip_low=0.2, clip_high=0.28, dual_clip=None)
    result = clipped_surrogate(ratio_N, tensor(advantage), algorithm)
    result.objective_N.sum().backward()
    assert result.objective_N.item() == pytest.approx(objective)
    assert ratio_N.grad.item() == pytest.approx(slope)


@pytest.mark.parametrize(
    ("ratio", "advantage", "objective", "slope", "is_cut"),
    [
        (5.0, -2.0, -6.0, 0.0, True),  # max(min(-10, -2.56), 3 * -2)
        (2.0, -2.0, -4.0, -2.0, False),  # below the bound
        (5.0, 2.0, 2.56, 0.0, False),  # a positive advantage has its own clip
    ],
)
def test_the_dual_clip_bounds_bad_tokens_that_became_likely(ratio, advantage, objective, slope, is_cut):
    ratio_N = tensor(ratio).requires_grad_()
    algorithm = AlgorithmConfig(clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    result = clipped_surrogate(ratio_N, tensor(advantage), algorithm)
    result.objective_N.sum().backward()
    assert result.objective_N.item() == pytest.approx(objective)
    assert (ratio_N.grad.item(), result.is_dual_N.item()) == (pytest.approx(slope), is_cut)


class TestImportance:
    def weights(self, ratios: list[float], **importance: object) -> list[float]:
        config = AlgorithmConfig(importance=importance)
        ids = torch.tensor([0, 0, 1, 1])
        result = importance_weights(tensor(*ratios).log().requires_grad_(), ids, 2, config)
        assert not result.weights_N.requires_grad
        self.bounded = result.is_bounded_N.tolist()
        self.raw = result.raw_N.tolist()
        return result.weights_N.tolist()

    def test_truncated_from_above(self):
        assert self.weights([0.25, 1.0, 1.5, 8.0]) == pytest.approx([0.25, 1.0, 1.5, 2.0])
        assert self.bounded == [False, False, False, True]
        assert self.raw == pytest.approx([0.25, 1.0, 1.5, 8.0])

    def test_truncated_on_both_sides(self):
        assert self.weights([0.25, 1.0, 1.5, 8.0], low=0.5) == pytest.approx([0.5, 1.0, 1.5, 2.0])

    def test_icepop_masks_on_both_sides(self):
        icepop = {"mode": "mask", "low": 0.5, "high": 5.0}
        assert self.weights([0.25, 1.0, 4.5, 8.0], **icepop) == pytest.approx([0.0, 1.0, 4.5, 0.0])
        assert self.bounded == [True, False, False, True]

    def test_of_sequences_by_product_and_by_geometric_mean(self):
        ratios = [0.25, 2.0, 1.5, 6.0]  # products 0.5 and 9; geometric means 0.707 and 3
        assert self.weights(ratios, level="sequence") == pytest.approx([0.5, 0.5, 2.0, 2.0])
        masked = self.weights(ratios, level="geometric", mode="mask")
        assert masked == pytest.approx([math.sqrt(0.5)] * 2 + [0.0] * 2)

    def test_off_is_one_and_the_raw_weights_are_still_measured(self):
        assert self.weights([0.25, 1.0, 1.5, 8.0], mode="off") == [1.0] * 4
        assert self.raw == pytest.approx([0.25, 1.0, 1.5, 8.0])

    def test_with_rollout_they_are_off_unless_said_otherwise(self):
        assert AlgorithmConfig(old_logprobs="rollout").importance_mode == "off"
        assert AlgorithmConfig().importance_mode == "truncate"


def test_recompute_weighs_each_token_and_never_clips():
    # current / rollout = 0.5, 0.6 / 0.4 = 1.5, 0.9 / 0.1 = 9 -> 2; advantages 1, -2, 3; the ratio is 1
    tokens = make_tokens([0.2, 0.6, 0.9], [0.4, 0.4, 0.1], [1.0, -2.0, 3.0])
    terms = loss_of(tokens)
    terms.loss.backward()
    # loss = -(0.5 * 1 + 1.5 * -2 + 2 * 3) = -3.5
    assert terms.loss.item() == pytest.approx(-3.5)
    # gradient = -weight * advantage: staleness never silences a token
    np.testing.assert_allclose(tokens.logprobs_N.grad, [-0.5, 3.0, -6.0])
    counts = [terms.sums[name].item() for name in ("clipped_low", "clipped_high", "weights_bounded")]
    assert counts == [0, 0, 1]
    assert (terms.sums["weight_sum"].item(), terms.sums["weight_max"].item()) == pytest.approx((4.0, 2.0))
    # before the bound: 0.5 + 1.5 + 9, 0.25 + 2.25 + 81
    assert terms.sums["raw_weight_sum"].item() == pytest.approx(11.0)
    assert terms.sums["raw_weight_square_sum"].item() == pytest.approx(83.5)


def test_rollout_clips_the_ratio():
    # ratios 0.5, 1.5, 9 with advantages -1, 1, -3
    tokens = make_tokens([0.2, 0.6, 0.9], [0.4, 0.4, 0.1], [-1.0, 1.0, -3.0])
    terms = loss_of(tokens, dual_clip=None, **ROLLOUT)
    terms.loss.backward()
    # min(-0.5, -0.8) = -0.8; min(1.5, 1.28) = 1.28; min(-27, -3.84) = -27; loss = 0.8 - 1.28 + 27
    assert terms.loss.item() == pytest.approx(26.52)
    # d(ratio) / d(logprob) = ratio: only the third keeps its gradient, 3 * 9
    np.testing.assert_allclose(tokens.logprobs_N.grad, [0.0, 0.0, 27.0])
    counts = [terms.sums[name].item() for name in ("clipped_low", "clipped_high", "weights_bounded")]
    assert counts == [1, 1, 0]
    assert (terms.sums["weight_sum"].item(), terms.sums["weight_max"].item()) == (3.0, 1.0)


def test_decoupled_the_ratio_is_to_the_steps_start_and_the_weight_is_its_own():
    # current / proximal = 0.6 / 0.5 = 1.2 and 0.4 / 0.5 = 0.8; proximal / rollout = 0.5 / 0.4 = 1.25, 5 -> 2
    proximal = {"proximal_logprobs_N": tensor(0.5, 0.5).log()}
    tokens = make_tokens([0.6, 0.4], [0.4, 0.1], [1.0, -1.0], **proximal)
    terms = loss_of(tokens, clip_low=0.1, clip_high=0.5)
    terms.loss.backward()
    # -(1.25 * 1.2 + 2 * min(-0.8, -0.9)) = -1.5 + 1.8
    assert terms.loss.item() == pytest.approx(0.3)
    np.testing.assert_allclose(tokens.logprobs_N.grad, [-1.5, 0.0], atol=1e-12)
    assert terms.sums["clipped_low"].item() == 1
    plain = make_tokens([0.6, 0.4], [0.4, 0.1], [1.0, -1.0], **proximal)
    # reinforce has no ratio: its weights are current / rollout, 1.5 and 4 -> 2
    loss_of(plain, loss="reinforce").loss.backward()
    np.testing.assert_allclose(plain.logprobs_N.grad, [-1.5, 2.0])


class TestSequenceRatio:
    def test_gspo_by_hand(self):
        # Ratios 1.2, 0.9 in one sequence: s = sqrt(1.08) = 1.0392; and 0.5 in another. A = 1, 1, -1.
        tokens = make_tokens([0.6, 0.45, 0.25], [0.5, 0.5, 0.5], [1.0, 1.0, -1.0], **two_and_one())
        terms = loss_of(tokens, loss="gspo", **ROLLOUT)
        terms.loss.backward()
        s = math.sqrt(1.08)
        # -(2 s + min(-0.5, -0.8)); the second sequence is clipped below
        assert terms.loss.item() == pytest.approx(-2 * s + 0.8)
        # d s / d logprob = s / 2 for each of the two tokens, and both have A s in the sum
        np.testing.assert_allclose(tokens.logprobs_N.grad, [-s, -s, 0.0], atol=1e-12)
        assert terms.sums["clipped_low"].item() == 1

    def test_with_the_sequence_normalisation_it_is_the_papers_mean_over_sequences(self):
        fields = two_and_one() | {"weights_N": tensor(0.5, 0.5, 1.0)}
        tokens = make_tokens([0.6, 0.45, 0.25], [0.5, 0.5, 0.5], [1.0, 1.0, -1.0], **fields)
        terms = loss_of(tokens, loss="gspo", normalisation="sequence", **ROLLOUT)
        assert terms.loss.item() == pytest.approx(-(math.sqrt(1.08) - 0.8))

    def test_sums_and_means_of_sequences(self):
        ids = torch.tensor([0, 2, 2])
        assert sequence_sums(tensor(1, 2, 4), ids, 3).tolist() == [1, 0, 6]
        assert sequence_means(tensor(1, 2, 4), ids, 3).tolist() == [1, 0, 3]


def test_cispo_bounds_the_weight_and_keeps_every_gradient():
    # ratios 1.5, 9 -> 5, 0.5; with clip_low 1 there is no lower bound
    tokens = make_tokens([0.6, 0.9, 0.2], [0.4, 0.1, 0.4], [1.0, 2.0, -1.0])
    terms = loss_of(tokens, loss="cispo", clip_low=1.0, clip_high=4.0, **ROLLOUT)
    terms.loss.backward()
    # gradient = -weight * advantage
    np.testing.assert_allclose(tokens.logprobs_N.grad, [-1.5, -10.0, 0.5])
    expected = -(1.5 * math.log(0.6) + 10 * math.log(0.9) - 0.5 * math.log(0.2))
    assert terms.loss.item() == pytest.approx(expected)
    assert terms.sums["clipped_high"].item() == 1


def test_sapo_fades_on_both_sides_of_one():
    tokens = make_tokens([0.5, 0.9, 0.3], [0.5, 0.3, 0.9], [1.0, 1.0, -1.0])
    loss_of(tokens, loss="sapo", **ROLLOUT).loss.backward()

    # d/dr [4 / t sigmoid(t (r - 1))] = 4 p (1 - p), times r; at r = 1 it is 1
    def slope(r: float, t: float) -> float:
        p = 1 / (1 + math.exp(-t * (r - 1)))
        return 4 * p * (1 - p) * r

    expected = [-1.0, -slope(3.0, 1.0), slope(1 / 3, 1.05)]
    np.testing.assert_allclose(tokens.logprobs_N.grad, expected, rtol=1e-9)


LOSSES = [
    {"loss": "ppo"},
    {"loss": "ppo", **ROLLOUT},
    {"loss": "reinforce"},
    {"loss": "gspo", "importance": {"level": "sequence"}},
    {"loss": "cispo", **ROLLOUT},
    {"loss": "sapo", **ROLLOUT},
    {"loss": "dppo_tv", **ROLLOUT},
    {"loss": "dppo_kl", **ROLLOUT},
    {"loss": "gmpo", **ROLLOUT},
    {"loss": "vespo", **ROLLOUT},
    {"loss": "clip_cov"},
    {"loss": "kl_cov", **ROLLOUT},
]


@pytest.mark.parametrize("algorithm", LOSSES, ids=str)
def test_on_policy_every_loss_has_the_plain_policy_gradient(algorithm):
    probabilities, advantages = [0.2, 0.6, 0.9], [1.0, 1.0, 3.0]
    fields = two_and_one() | {"weights_N": tensor(0.5, 0.5, 1.0)}
    tokens = make_tokens(probabilities, probabilities, advantages, **fields)
    terms = loss_of(tokens, **algorithm)
    terms.loss.backward()
    np.testing.assert_allclose(tokens.logprobs_N.grad, [-0.5, -0.5, -3.0], atol=1e-12)
    assert terms.sums["weight_max"].item() == 1.0
    for name in ("rollout_kl_sum", "mismatch_sum", "clipped_low", "clipped_high"):
        assert terms.sums[name].item() == 0.0


@pytest.mark.parametrize("algorithm", LOSSES, ids=str)
def test_absurd_ratios_stay_finite(algorithm):
    tokens = make_tokens([0.5, 0.5], [0.5, 0.5], [-1.0, 1.0])
    logprobs_N = torch.tensor([-1.0, -500.0], requires_grad=True)  # e^499 is infinite in float32
    fields = {
        "logprobs_N": logprobs_N,
        "rollout_logprobs_N": torch.tensor([-500.0, -1.0]),
        "advantages_N": torch.tensor([-1.0, 1.0]),
        "sequence_N": torch.tensor([0, 1]),
        "num_sequences": 2,
        "reference_logprobs_N": torch.tensor([-500.0, -1.0]),
    }
    terms = loss_of(
        replace(tokens, **fields), kl={"place": "loss"}, reference={"model": "frozen"}, **algorithm
    )
    terms.loss.backward()
    assert torch.isfinite(terms.loss) and torch.isfinite(logprobs_N.grad).all()
    assert all(torch.isfinite(value) for value in terms.sums.values())


@pytest.mark.parametrize("old_logprobs", ["recompute", "rollout"])
def test_kl_and_mismatch_compare_the_current_policy_with_the_rollout(old_logprobs):
    terms = loss_of(make_tokens([0.2, 0.6], [0.4, 0.4], [1.0, 1.0]), old_logprobs=old_logprobs)
    # k3 = r - 1 - log r at r = 0.5 and r = 1.5
    k3 = (0.5 - 1 - math.log(0.5)) + (1.5 - 1 - math.log(1.5))
    assert terms.sums["rollout_kl_sum"].item() == pytest.approx(k3)
    # |log 0.5| = 0.693, |log 1.5| = 0.405
    assert terms.sums["mismatch_sum"].item() == pytest.approx(math.log(2) + math.log(1.5))
    assert terms.sums["mismatch_max"].item() == pytest.approx(math.log(2))


class TestKl:
    D = math.log(1.5)  # 0.6 under the policy, 0.4 under the reference

    @pytest.mark.parametrize(
        ("estimator", "value", "slope"),
        [
            ("k1", D, D),
            ("k2", D**2 / 2, D),
            ("k3", 2 / 3 - 1 + D, 1 - 2 / 3),
            ("k3+", 2 / 3 - 1 + D, D),
            ("corrected_k3", 1.2 * (2 / 3 - 1 + D), 1.2 * D),  # 0.6 / 0.5 = 1.2
            ("abs", D, 1.0),
        ],
    )
    def test_values_and_gradients_by_hand(self, estimator, value, slope):
        logprobs_N = tensor(0.6).log().requires_grad_()
        kl = KlConfig(estimator=estimator)
        penalty_N = kl_penalty(logprobs_N, tensor(0.4).log(), kl, (logprobs_N - tensor(0.5).log()).exp())
        penalty_N.sum().backward()
        assert penalty_N.item() == pytest.approx(value)
        assert logprobs_N.grad.item() == pytest.approx(slope)

    @pytest.mark.parametrize(
        ("estimator", "is_right"),
        [("k1", True), ("k2", True), ("k3", False), ("k3+", True), ("corrected_k3", True), ("abs", False)],
    )
    def test_which_gradients_are_that_of_the_true_kl(self, estimator, is_right):
        """In expectation over the policy's own tokens, written out over a vocabulary of four."""
        logits = tensor(0.3, -0.5, 1.2, 0.0).requires_grad_()
        reference = tensor(0.1, 0.2, 0.3, 0.4).log()
        true = (logits.softmax(0) * (logits.log_softmax(0) - reference)).sum()
        (expected,) = torch.autograd.grad(true, logits)
        logprobs_N = logits.log_softmax(0)
        # Also where another policy samples, if corrected for that.
        sampled = logprobs_N.detach() if estimator != "corrected_k3" else tensor(0.4, 0.3, 0.2, 0.1).log()
        ratio_N = (logprobs_N - sampled).exp()
        penalty_N = kl_penalty(logprobs_N, reference, KlConfig(estimator=estimator), ratio_N)
        estimated = (sampled.exp() * penalty_N).sum()
        (gradient,) = torch.autograd.grad(estimated, logits)
        assert torch.allclose(gradient, expected, atol=1e-9) is is_right
        if estimator not in ("k2", "abs"):
            assert estimated.item() == pytest.approx(true.item())  # unbiased as values

    def test_in_the_loss_it_is_weighted_as_the_token_is_and_counted(self):
        fields = {"weights_N": tensor(0.5), "reference_logprobs_N": tensor(0.4).log()}
        kl = {"place": "loss", "estimator": "k2", "coefficient": 0.1}
        tokens = make_tokens([0.6], [0.6], [0.0], **fields)
        terms = loss_of(tokens, kl=kl, reference={"model": "frozen"})
        assert terms.loss.item() == pytest.approx(0.5 * 0.1 * self.D**2 / 2)
        assert terms.sums["kl_sum"].item() == pytest.approx(self.D**2 / 2)

    def test_a_reference_without_a_penalty_is_only_measured(self):
        tokens = make_tokens([0.6], [0.6], [0.0], reference_logprobs_N=tensor(0.4).log())
        terms = loss_of(tokens, reference={"model": "frozen"})
        assert terms.loss.item() == 0.0
        assert terms.sums["kl_sum"].item() == pytest.approx(2 / 3 - 1 + self.D)


def test_the_entropy_bonus_lowers_the_loss_by_its_coefficient():
    entropies_N = tensor(1.0, 3.0).requires_grad_()
    fields = {"entropies_N": entropies_N, "weights_N": tensor(1.0, 0.5)}
    terms = loss_of(make_tokens([0.6, 0.6], [0.6, 0.6], [0.0, 0.0], **fields), entropy_coefficient=0.1)
    terms.loss.backward()
    assert terms.loss.item() == pytest.approx(-0.1 * (1.0 + 1.5))
    np.testing.assert_allclose(entropies_N.grad, [-0.1, -0.05])
    assert terms.sums["entropy_sum"].item() == 4.0


class TestValueLoss:
    @pytest.mark.parametrize(
        ("value", "old", "target", "clip", "loss", "slope"),
        [
            (1.0, 0.5, 0.0, 0.2, 0.5, 1.0),  # max(1, 0.49) / 2: moving back is not clipped
            (1.0, 0.5, 2.0, 0.2, 0.845, 0.0),  # max(1, 1.69) / 2: it has moved far enough
            (0.6, 0.5, 2.0, 0.2, 0.98, -1.4),  # within the clip
            (1.0, 0.5, 2.0, None, 0.5, -1.0),
        ],
    )
    def test_by_hand(self, value, old, target, clip, loss, slope):
        values_N = tensor(value).requires_grad_()
        result_N = value_loss(values_N, tensor(old), tensor(target), clip)
        result_N.sum().backward()
        assert (result_N.item(), values_N.grad.item()) == pytest.approx((loss, slope))

    def test_joins_the_loss_with_its_coefficient_and_its_diagnostics(self):
        fields = {
            "values_N": tensor(1.0, 0.0),
            "old_values_N": tensor(0.5, 0.0),
            "returns_N": tensor(0.0, 3.0),
            "weights_N": tensor(1.0, 0.5),
        }
        value = {"coefficient": 0.1, "clip": None}
        tokens = make_tokens([0.6, 0.6], [0.6, 0.6], [0.0, 0.0], **fields)
        terms = loss_of(tokens, advantage="gae", value=value)
        # 0.1 * (1 * 0.5 + 0.5 * 4.5)
        assert terms.loss.item() == pytest.approx(0.275)
        expected = {
            "value_loss_sum": 5.0,
            "value_square_error_sum": 0.25 + 9.0,
            "return_sum": 3.0,
            "return_square_sum": 9.0,
        }
        assert {name: terms.sums[name].item() for name in expected} == pytest.approx(expected)


def test_weights_and_denominators_of_the_three_normalisations():
    # two sequences with 2 and 4 trained tokens, completions of at most 10 tokens
    assert [token_weight("sequence", count) for count in (2, 4)] == [0.5, 0.25]
    assert [token_weight("token", count) for count in (2, 4)] == [1.0, 1.0]
    assert [token_weight("constant", count) for count in (2, 4)] == [1.0, 1.0]
    assert denominator("sequence", 2, 6, 10) == 2.0
    assert denominator("token", 2, 6, 10) == 6.0
    assert denominator("constant", 2, 6, 10) == 20.0


@pytest.mark.parametrize("normalisation", ["sequence", "token", "constant"])
def test_denominators_add_up_over_parts(normalisation):
    parts = [(3, 17), (1, 0), (5, 40)]
    whole = denominator(normalisation, 9, 57, 32)
    assert sum(denominator(normalisation, *part, 32) for part in parts) == whole


def test_a_sequence_without_trained_tokens_counts_where_sequences_are_counted():
    assert token_weight("sequence", 0) == 1.0  # of no token
    assert denominator("sequence", 1, 0, 10) == 1.0
    assert denominator("token", 1, 0, 10) == 0.0
    assert denominator("constant", 1, 0, 10) == 10.0

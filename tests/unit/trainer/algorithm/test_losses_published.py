"""Losses that were published after PPO: by hand, and against their formulas written again in float64."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.losses import loss_of, make_tokens, our_loss, probable_rectangle, written_out
from tidemill.common.config.algorithm import AlgorithmConfig
from tidemill.services.trainer.algorithm.losses.tokens import denominator

ROLLOUT: dict[str, Any] = {"old_logprobs": "rollout"}


def dppo_tv(of: SimpleNamespace, low: float, high: float, most: float = math.inf) -> torch.Tensor:
    """Token by token, as the paper's definition reads."""
    losses = []
    for now, old in zip(of.now, of.old, strict=True):
        p, q = math.exp(now.item()), math.exp(old.item())
        is_out = p - q > high if of.advantage > 0 else p - q < -low
        weight = min(p / q, most)
        losses.append(0.0 * now if is_out else -of.advantage * weight * (1 + now - now.detach()))
    return torch.stack(losses)


def dppo_kl(of: SimpleNamespace, low: float, high: float) -> torch.Tensor:
    losses = []
    for now, old in zip(of.now, of.old, strict=True):
        p, q = math.exp(now.item()), math.exp(old.item())
        divergence = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
        is_out = (divergence > high and p > q) if of.advantage > 0 else (divergence > low and p < q)
        losses.append(0.0 * now if is_out else -of.advantage * (now - old).exp())
    return torch.stack(losses)


PLAIN: dict[str, Any] = {
    "clip_low": 1.0,
    "clip_high": 99.0,
    "dual_clip": None,
    "reference": {"model": "frozen"},
}
"""PPO without bounds."""


def plain(of: SimpleNamespace) -> torch.Tensor:
    return -(of.now - of.old).exp() * of.advantage


def k2(of: SimpleNamespace) -> torch.Tensor:
    return (of.now - of.reference) ** 2 / 2


def k3(of: SimpleNamespace) -> torch.Tensor:
    return (of.reference - of.now).exp() - 1 - (of.reference - of.now)


def gspo(of: SimpleNamespace, low: float, high: float) -> torch.Tensor:
    ratio = (of.now - of.old).mean().exp()
    return -torch.minimum(ratio * of.advantage, ratio.clamp(1 - low, 1 + high) * of.advantage).repeat(
        len(of.now)
    )


def gmpo(of: SimpleNamespace, low: float, high: float) -> torch.Tensor:
    """A product of ratios to the power 1 / T, as the paper writes it."""
    product = torch.ones((), dtype=torch.float64)
    for now, old in zip(of.now, of.old, strict=True):
        ratio = (now - old).exp()
        bound = torch.tensor(math.exp(high if of.advantage > 0 else -low), dtype=torch.float64)
        product = product * (torch.minimum(ratio, bound) if of.advantage > 0 else torch.maximum(ratio, bound))
    return (-of.advantage * product ** (1 / len(of.now))).repeat(len(of.now))


def vespo(of: SimpleNamespace, k: float, decay: float) -> torch.Tensor:
    whole = math.exp((of.now - of.old).sum().item())
    phi = math.exp(decay) * whole**k * math.exp(-decay * whole)
    return -phi * of.advantage * of.now


SEQUENCE_CASES: dict[str, tuple[dict[str, Any], Callable[[SimpleNamespace], torch.Tensor]]] = {
    "gmpo": ({"loss": "gmpo", "clip_low": 0.3, "clip_high": 0.2}, lambda of: gmpo(of, 0.3, 0.2)),
    "vespo": (
        {"loss": "vespo", "vespo": {"positive": [1.5, 1.0], "negative": [2.0, 0.5]}},
        lambda of: vespo(of, 1.5, 1.0) if of.advantage >= 0 else vespo(of, 2.0, 0.5),
    ),
    "luspo": (
        {"loss": "gspo", "clip_low": 0.1, "clip_high": 0.2, "dual_clip": None},
        lambda of: gspo(of, 0.1, 0.2),
    ),
}


@pytest.mark.parametrize("normalisation", ["sequence", "token", "constant", "sequence_sum"])
@pytest.mark.parametrize("case", SEQUENCE_CASES)
def test_a_loss_of_sequences_equals_its_formula(case, normalisation):
    fields, formula = SEQUENCE_CASES[case]
    algorithm = AlgorithmConfig(normalisation=normalisation, **ROLLOUT, **fields)
    for seed in range(3):
        data = probable_rectangle(seed)
        ours, our_gradient_BT, _ = our_loss(data, algorithm)
        theirs, their_gradient_BT = written_out(data, algorithm, False, formula)
        assert ours == pytest.approx(theirs, abs=1e-6)
        np.testing.assert_allclose(our_gradient_BT, their_gradient_BT, atol=1e-6)


def test_gpg_is_reinforce():
    """A logprob and nothing else (arXiv 2504.02546): as verl's `gpg`."""
    data, plain = probable_rectangle(0), AlgorithmConfig(loss="reinforce", importance={"mode": "off"})
    ours, our_gradient_BT, _ = our_loss(data, plain)
    theirs, their_gradient_BT = written_out(data, plain, False, lambda of: -of.advantage * of.now)
    assert ours == pytest.approx(theirs, abs=1e-6)
    np.testing.assert_allclose(our_gradient_BT, their_gradient_BT, atol=1e-6)


class TestSequences:
    def test_gmpo_by_hand(self):
        # log-ratios 0.5 and 0.1 with A = 2, the first stops at 0.4; -0.5 with A = -1 stops at -0.4
        fields = {"sequence_N": torch.tensor([0, 0, 1]), "num_sequences": 2}
        now = [0.2 * math.exp(0.5), 0.5 * math.exp(0.1), 0.5 * math.exp(-0.5)]
        tokens = make_tokens(now, [0.2, 0.5, 0.5], [2.0, 2.0, -1.0], **fields)
        terms = loss_of(tokens, loss="gmpo", clip_low=0.4, clip_high=0.4, **ROLLOUT)
        terms.loss.backward()
        mean = math.exp(0.25)
        assert terms.loss.item() == pytest.approx(-2 * 2 * mean + math.exp(-0.4))
        # Both tokens of the first sequence have its objective; its slope is half of it for each of them.
        np.testing.assert_allclose(tokens.logprobs_N.grad, [0.0, -2 * mean, 0.0], atol=1e-12)
        assert (terms.sums["clipped_high"].item(), terms.sums["clipped_low"].item()) == (1, 1)

    def test_vespo_by_hand(self):
        # W = 1.5 * 4/3 = 2: 4 exp(-3) with A >= 0, 8 exp(-2) with A < 0
        for advantage, phi in ((1.0, 4 * math.exp(-3)), (-1.0, 8 * math.exp(-2))):
            tokens = make_tokens([0.6, 0.4], [0.4, 0.3], [advantage] * 2)
            terms = loss_of(tokens, loss="vespo", **ROLLOUT)
            terms.loss.backward()
            assert terms.loss.item() == pytest.approx(-phi * advantage * math.log(0.24))
            np.testing.assert_allclose(tokens.logprobs_N.grad, [-phi * advantage] * 2)

    def test_luspo_weighs_a_sequence_by_its_length(self):
        # Two sequences of 2 and 1 tokens with the ratio 1: 2 * 1 + 1 * -3, over 2 sequences
        assert denominator("sequence_sum", 2, 3, 10) == 2.0
        fields = {"sequence_N": torch.tensor([0, 0, 1]), "num_sequences": 2}
        tokens = make_tokens([0.5] * 3, [0.5] * 3, [1.0, 1.0, -3.0], **fields)
        terms = loss_of(tokens, loss="gspo", normalisation="sequence_sum", **ROLLOUT)
        assert terms.loss.item() / 2 == pytest.approx(-(2 - 3) / 2)


CASES: dict[str, tuple[dict[str, Any], Callable[[SimpleNamespace], torch.Tensor]]] = {
    "dppo_tv": (
        {"loss": "dppo_tv", "clip_low": 0.1, "clip_high": 0.15},
        lambda of: dppo_tv(of, 0.1, 0.15),
    ),
    "dppo_tv with a bound": (
        {"loss": "dppo_tv", "clip_low": 0.2, "clip_high": 0.2, "dppo": {"max_ratio": 1.2}},
        lambda of: dppo_tv(of, 0.2, 0.2, 1.2),
    ),
    "dppo_kl": (
        {"loss": "dppo_kl", "clip_low": 0.02, "clip_high": 0.05},
        lambda of: dppo_kl(of, 0.02, 0.05),
    ),
    "corrected k3": (
        {"kl": {"place": "loss", "estimator": "corrected_k3", "coefficient": 0.3}, **PLAIN},
        lambda of: plain(of) + 0.3 * (of.now - of.old).exp() * k3(of),
    ),
    "k3+": (
        {"kl": {"place": "loss", "estimator": "k3+", "coefficient": 0.3}, **PLAIN},
        lambda of: plain(of) + 0.3 * (k3(of).detach() + k2(of) - k2(of).detach()),
    ),
    "abs": (
        {"kl": {"place": "loss", "estimator": "abs", "coefficient": 0.3}, **PLAIN},
        lambda of: plain(of) + 0.3 * (of.now - of.reference).abs(),
    ),
    "off-policy sequence mask": (
        {"off_policy_threshold": 0.1, **PLAIN},
        lambda of: plain(of) * float(of.advantage >= 0 or (of.rollout - of.now).mean().item() <= 0.1),
    ),
    "prime-rl's default": (
        {"loss": "dppo_tv", "clip_low": 0.2, "clip_high": 0.2, "rollout_penalty": 0.3},
        lambda of: dppo_tv(of, 0.2, 0.2) + 0.3 * (of.now - of.rollout) ** 2,
    ),
}


@pytest.mark.parametrize("normalisation", ["sequence", "token", "constant"])
@pytest.mark.parametrize("old", ["rollout", "recompute"])
@pytest.mark.parametrize("case", CASES)
def test_equals_its_formula_in_value_and_gradient(case, old, normalisation):
    fields, formula = CASES[case]
    algorithm = AlgorithmConfig(
        normalisation=normalisation, old_logprobs=old, importance={"mode": "off"}, **fields
    )
    for seed in range(3):
        data = probable_rectangle(seed)
        ours, our_gradient_BT, _ = our_loss(data, algorithm, has_proximal=True)
        theirs, their_gradient_BT = written_out(data, algorithm, True, formula)
        assert ours == pytest.approx(theirs, abs=1e-6)
        np.testing.assert_allclose(our_gradient_BT, their_gradient_BT, atol=1e-6)
        assert np.abs(their_gradient_BT).max() > 1e-2


def test_the_off_policy_mask_by_hand():
    # rollout / now = 2 for both tokens of each of two sequences; log 2 = 0.693
    fields = {"sequence_N": torch.tensor([0, 0, 1, 1]), "num_sequences": 2}
    tokens = make_tokens([0.25, 0.2, 0.25, 0.2], [0.5, 0.4, 0.5, 0.4], [-1.0, -1.0, 1.0, 1.0], **fields)
    for threshold, gradient in ((0.5, [0.0, 0.0, -0.5, -0.5]), (0.7, [0.5, 0.5, -0.5, -0.5])):
        tokens.logprobs_N.grad = None
        terms = loss_of(tokens, off_policy_threshold=threshold)
        terms.loss.backward()
        np.testing.assert_allclose(tokens.logprobs_N.grad, gradient)
        assert terms.sums["off_policy"].item() == (2 if threshold == 0.5 else 0)


class TestDppo:
    def test_total_variation_by_hand(self):
        # p - q: 0.3 with A = 2, 0.3 with A = -2, -0.3 with A = -1, -0.1 with A = -1
        tokens = make_tokens([0.5, 0.5, 0.2, 0.4], [0.2, 0.2, 0.5, 0.5], [2.0, -2.0, -1.0, -1.0])
        terms = loss_of(tokens, loss="dppo_tv", clip_low=0.2, clip_high=0.2, **ROLLOUT)
        terms.loss.backward()
        # The first and the third have gone too far. Ratios of the others: 2.5 and 0.8.
        assert terms.loss.item() == pytest.approx(2 * 2.5 + 0.8)
        np.testing.assert_allclose(tokens.logprobs_N.grad, [0.0, 5.0, 0.0, 0.8], atol=1e-12)
        assert (terms.sums["clipped_high"].item(), terms.sums["clipped_low"].item()) == (1, 1)

    def test_kl_by_hand(self):
        # 0.2 log 0.4 + 0.8 log 1.6 = 0.1927 for p = 0.5, q = 0.2
        for bound, loss in ((0.19, 0.0), (0.2, -2.5)):
            tokens = make_tokens([0.5], [0.2], [1.0])
            terms = loss_of(tokens, loss="dppo_kl", clip_high=bound, clip_low=0.0, **ROLLOUT)
            assert terms.loss.item() == pytest.approx(loss)

    def test_a_rare_token_may_multiply_and_weighs_no_more_than_its_bound(self):
        # PPO would silence a ratio of 50; p - q is 0.049
        for bound, weight in ((None, 50.0), (20.0, 20.0)):
            tokens = make_tokens([0.05], [0.001], [1.0])
            terms = loss_of(tokens, loss="dppo_tv", dppo={"max_ratio": bound}, **ROLLOUT)
            terms.loss.backward()
            assert terms.loss.item() == pytest.approx(-weight)
            assert tokens.logprobs_N.grad.item() == pytest.approx(-weight)
            assert terms.sums["clipped_dual"].item() == (bound is not None)

    def test_a_certain_token_has_a_finite_divergence(self):
        logprobs_N = torch.tensor([0.0, -1e-9], requires_grad=True)
        tokens = make_tokens([1.0, 1.0], [0.9, 0.9], [1.0, -1.0], logprobs_N=logprobs_N)
        terms = loss_of(tokens, loss="dppo_kl", **ROLLOUT)
        terms.loss.backward()
        assert torch.isfinite(logprobs_N.grad).all() and terms.sums["clipped_high"].item() == 1

    def test_the_penalty_towards_the_rollout_by_hand(self):
        # log(0.6 / 0.4) = 0.4055; its square times 0.1, and 2 * 0.1 * 0.4055 as gradient
        tokens = make_tokens([0.6], [0.4], [0.0])
        terms = loss_of(tokens, rollout_penalty=0.1)
        terms.loss.backward()
        assert terms.loss.item() == pytest.approx(0.1 * math.log(1.5) ** 2)
        assert tokens.logprobs_N.grad.item() == pytest.approx(0.2 * math.log(1.5))

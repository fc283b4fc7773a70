"""No single token takes over a step: what bounds it by default, and what one is worth that is ruled out."""

import math

import numpy as np
import pytest
import torch

from tests.support.losses import loss_of, make_tokens, tensor
from tests.support.models import make_samples
from tidemill.common.config.algorithm import AlgorithmConfig
from tidemill.common.config.algorithm_sections import KlConfig
from tidemill.services.trainer.algorithm.advantages.episode import make_episode
from tidemill.services.trainer.algorithm.losses.corrections import kl_penalty, rollout_penalty
from tidemill.services.trainer.algorithm.losses.totals import total_metrics
from tidemill.services.trainer.policy.head import score_logits

FROZEN = {"reference": {"model": "frozen"}}
ROLLOUT = {"old_logprobs": "rollout"}
KINDS = ("k1", "k2", "k3", "k3+", "corrected_k3", "abs")
LOSSES = {
    "ppo": {},
    "ppo rollout": ROLLOUT,
    "gspo": {"loss": "gspo", **ROLLOUT},
    "cispo": {"loss": "cispo", **ROLLOUT},
    "sapo": {"loss": "sapo", **ROLLOUT},
    "reinforce": {"loss": "reinforce"},
    "gmpo": {"loss": "gmpo", **ROLLOUT},
    "vespo": {"loss": "vespo", **ROLLOUT},
    "clip_cov": {"loss": "clip_cov"},
    "kl_cov": {"loss": "kl_cov", **ROLLOUT},
    "dppo_tv": {"loss": "dppo_tv", "rollout_penalty": 0.1, **ROLLOUT},
    "dppo_kl": {"loss": "dppo_kl", **ROLLOUT},
    "masked weights": {"importance": {"mode": "mask", "low": 0.5, "high": 5.0}},
    **{f"{k} in the loss": {"kl": {"place": "loss", "estimator": k}, **FROZEN} for k in KINDS},
}


def penalty(d: float, **kl: object) -> tuple[float, float]:
    """The penalty of one token that is d above its reference, and its gradient."""
    logprobs_N = tensor(-30.0 + d).requires_grad_()
    (penalty_N,) = kl_penalty(logprobs_N, tensor(-30.0), KlConfig(**kl))
    penalty_N.backward()
    return penalty_N.item(), logprobs_N.grad.item()


def test_k3_stops_at_its_bound():
    # exp(2) - 1 - 2 = 4.389 with the gradient 1 - exp(2); exp(10) - 1 - 10 = 22015 is beyond 10
    assert penalty(-2.0) == pytest.approx((math.exp(2) - 3, 1 - math.exp(2)))
    assert penalty(-10.0) == (10.0, 0.0)
    assert penalty(-10.0, bound=None) == pytest.approx((math.exp(10) - 11, 1 - math.exp(10)))
    assert penalty(-10.0, bound=50.0) == (50.0, 0.0)
    assert penalty(15.0, bound=None) == pytest.approx((14.0, 1.0), abs=1e-5)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3+", "corrected_k3"])
def test_the_gradient_of_the_others_grows_with_the_difference(estimator):
    assert penalty(-10.0, estimator=estimator)[1] == pytest.approx(-10.0)


@pytest.mark.parametrize(
    ("estimator", "slope"), [("k1", 20.0), ("k2", 20.0), ("k3+", 20.0), ("corrected_k3", 20.0), ("abs", 1.0)]
)
def test_a_token_beyond_20_nats_keeps_its_gradient(estimator, slope):
    for d in (-25.0, 25.0):
        value, gradient = penalty(d, estimator=estimator, bound=None)
        assert gradient == pytest.approx(math.copysign(slope, d))
        assert value == penalty(math.copysign(20.0, d), estimator=estimator, bound=None)[0]
    assert penalty(25.0, bound=None)[1] == pytest.approx(1.0)  # k3 is d far above the reference


def test_the_gradient_of_corrected_k3_stops_at_the_bound_whatever_the_ratio():
    for bound, slope in ((10.0, 10.0), (None, 50.0 * math.log(2.0))):  # d = log 2, ratio 50
        logprobs_N = tensor(0.5).log().requires_grad_()
        kl = KlConfig(estimator="corrected_k3", bound=bound)
        (penalty_N,) = kl_penalty(logprobs_N, tensor(0.25).log(), kl, tensor(50.0))
        penalty_N.backward()
        assert penalty_N.item() == pytest.approx(50.0 * (0.5 - 1.0 + math.log(2.0)))
        assert logprobs_N.grad.item() == pytest.approx(slope)


def test_the_rollout_penalty_keeps_its_gradient_beyond_20_nats():
    for d, slope in ((math.log(2.0), 2.0 * math.log(2.0)), (-25.0, -40.0)):
        logprobs_N = tensor(-30.0 + d).requires_grad_()
        (penalty_N,) = rollout_penalty(logprobs_N, tensor(-30.0))
        penalty_N.backward()
        assert penalty_N.item() == pytest.approx(min(abs(d), 20.0) ** 2)
        assert logprobs_N.grad.item() == pytest.approx(slope)


def test_k3_in_the_reward_stops_at_the_same_bound():
    (sample,) = make_samples(1)
    object.__setattr__(sample, "reference_logprobs", sample.rollout_logprobs + 10.0)
    for bound, expected in ((10.0, 10.0), (None, math.exp(10) - 11)):
        kl = {"place": "reward", "estimator": "k3", "coefficient": 1.0, "bound": bound}
        episode = make_episode(sample, AlgorithmConfig(kl=kl, **FROZEN), max_tokens=100)
        assert episode.reward == pytest.approx(sample.reward - expected * sample.num_trained, rel=1e-5)


@pytest.mark.parametrize("loss", ["ppo", "gspo"])
def test_a_bad_token_that_became_likely_is_bounded_by_default(loss):
    # ratio 0.9 / 0.01 = 90 with A = -1: the objective is -3 and has no gradient
    for dual_clip, objective, gradient in (("auto", -3.0, 0.0), (None, -90.0, 90.0)):
        tokens = make_tokens([0.9], [0.01], [-1.0])
        terms = loss_of(tokens, loss=loss, dual_clip=dual_clip, **ROLLOUT)
        terms.loss.backward()
        assert terms.loss.item() == pytest.approx(-objective)
        assert tokens.logprobs_N.grad.item() == pytest.approx(gradient)


def test_the_bound_never_cuts_into_the_ordinary_clip():
    assert AlgorithmConfig().dual_clip_bound == 3.0
    assert AlgorithmConfig(clip_high=5.0).dual_clip_bound == 6.0
    assert AlgorithmConfig(dual_clip=4).dual_clip_bound == 4.0
    assert AlgorithmConfig(dual_clip=None).dual_clip_bound is None
    assert AlgorithmConfig(loss="reinforce").dual_clip_bound is None
    assert AlgorithmConfig(loss="cispo", **ROLLOUT).dual_clip_bound is None


@pytest.mark.parametrize("has_proximal", [False, True])
@pytest.mark.parametrize("case", LOSSES)
def test_a_token_that_the_model_rules_out_adds_finite_numbers_and_no_gradient(case, has_proximal):
    def terms_of(probability: float):
        fields = {"proximal_logprobs_N": tensor(probability, 0.3).log()} if has_proximal else {}
        fields["reference_logprobs_N"] = tensor(probability, 0.2).log()
        tokens = make_tokens([probability, 0.5], [0.4, 0.4], [-1.0, 1.0], **fields)
        terms = loss_of(tokens, **LOSSES[case])
        terms.loss.backward()
        return tokens.logprobs_N.grad, terms

    gradient_N, terms = terms_of(0.0)
    metrics = total_metrics([terms])
    assert all(math.isfinite(value) for value in vars_of(metrics)), metrics
    assert gradient_N[0].item() == 0.0 and torch.isfinite(gradient_N).all()
    if case not in ("gspo", "gmpo", "vespo"):  # whose ratio is that of the whole sequence
        assert gradient_N[1].item() == pytest.approx(terms_of(0.1)[0][1].item())


def vars_of(metrics: object) -> list[float]:
    values = (getattr(metrics, name) for name in metrics.__dataclass_fields__)
    return [float(x) for value in values for x in (value if isinstance(value, tuple) else (value,))]


def test_the_gradient_of_the_logits_is_finite_where_one_of_them_is_ruled_out():
    logits_NV = torch.tensor([[0.0, -torch.inf, 1.0], [0.5, 0.0, 1.0]], requires_grad=True)
    logprobs_N, _ = score_logits(logits_NV, torch.tensor([1, 0]), 1.0)
    tokens = make_tokens([0.5, 0.5], [0.4, 0.4], [-1.0, 1.0], logprobs_N=logprobs_N)
    loss_of(tokens).loss.backward()
    assert torch.isfinite(logits_NV.grad).all()
    assert not logits_NV.grad[0].any() and logits_NV.grad[1].any()


def test_a_model_that_gives_nan_is_not_hidden():
    terms = loss_of(make_tokens([np.nan, 0.5], [0.4, 0.4], [-1.0, 1.0]))
    assert math.isnan(terms.loss.item())

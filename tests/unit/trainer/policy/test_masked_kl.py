"""With sampling masks, a reference and a teacher are compared over all ids: they sample nothing.

Worked numbers, and a dense softmax in float64 with torch's own gradients.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.architectures import make_model
from tests.support.losses import loss_of, make_tokens, tensor
from tests.support.models import (
    accumulate_all,
    gradients_of,
    make_policy,
    make_relatives,
    one_batch,
    with_masks,
)
from tests.support.samples import changed, taught
from tidemill.common.config.algorithm import AlgorithmConfig
from tidemill.common.wire.choices import Rows
from tidemill.services.trainer.algorithm.coefficients import Coefficients
from tidemill.services.trainer.algorithm.losses.policy_loss import find_loss, policy_loss
from tidemill.services.trainer.groups.sample import Sample
from tidemill.services.trainer.policy.head import score_logits

Penalty = Callable[[Tensor], Tensor]
"""From d = logprob - reference logprob (with gradient) to the penalty of each token."""

FROZEN: dict[str, Any] = {"reference": {"model": "frozen"}}
LOG2 = math.log(2.0)


def make_neox() -> Any:
    """A model whose norms are float64 where its weights are."""
    return make_model("GPTNeoX")


def k2(d: Tensor) -> Tensor:
    return d.square() / 2


def k3(d: Tensor) -> Tensor:
    return torch.exp(-d) - 1 + d


def valued(value: Tensor, slope: Tensor) -> Tensor:
    """The value of one formula with the gradient of another."""
    return value.detach() + slope - slope.detach()


ESTIMATORS: dict[str, Penalty] = {
    "k1": lambda d: valued(d, k2(d)),
    "k2": k2,
    "k3": k3,
    "k3+": lambda d: valued(k3(d), k2(d)),
    "abs": torch.abs,
    "corrected_k3": lambda d: valued(k3(d), k2(d)),  # its ratio is 1 here
}


def in_loss(estimator: str, coefficient: float = 0.3) -> dict[str, Any]:
    section = {"place": "loss", "estimator": estimator, "coefficient": coefficient, "bound": None}
    return {"kl": section, "importance": {"mode": "off"}, "normalisation": "token", **FROZEN}


@pytest.mark.parametrize(
    ("estimator", "same", "far", "slope"),
    [
        ("abs", 0.0, LOG2, 1.0),
        ("k1", 0.0, LOG2, LOG2),
        ("k2", 0.0, LOG2**2 / 2, LOG2),
        ("k3", 0.0, 0.5 - 1 + LOG2, 0.5),
        ("k3+", 0.0, 0.5 - 1 + LOG2, LOG2),
        ("corrected_k3", 0.0, 0.5 - 1 + LOG2, LOG2),
    ],
)
def test_the_penalty_of_one_token_by_hand(estimator, same, far, slope):
    """Ids have 0.5, 0.4, 0.1; sampling kept the first two. Over these the first has 5/9, over all 0.5. A
    reference with 0.5 is where the policy is; of one with 0.25, d = log 2."""
    for reference, expected in ((0.5, same), (0.25, far)):
        logits_1V = tensor(0.5, 0.4, 0.1).log()[None].requires_grad_()
        logprobs_N, entropies_N, log_mass_N = score_logits(
            logits_1V, torch.tensor([0]), 1.0, kept=Rows.of_lists([[0, 1]])
        )
        assert logprobs_N.item() == pytest.approx(math.log(5 / 9), abs=1e-12)
        assert log_mass_N.item() == pytest.approx(math.log(0.9), abs=1e-12)
        fields = {
            "logprobs_N": logprobs_N, "log_mass_N": log_mass_N, "entropies_N": entropies_N,
            "reference_logprobs_N": tensor(reference).log(),
        }  # fmt: skip
        tokens = make_tokens([5 / 9], [5 / 9], [0.0], **fields)
        terms = loss_of(tokens, **in_loss(estimator, 1.0))
        assert float(terms.sums["kl_sum"]) == pytest.approx(expected, abs=1e-12)
        assert terms.loss.item() == pytest.approx(expected, abs=1e-12)
    terms.loss.backward()
    # The gradient of log p is that of softmax over all ids: 1 - 0.5, -0.4, -0.1.
    expected_V = slope * np.array([0.5, -0.4, -0.1])
    np.testing.assert_allclose(logits_1V.grad[0], expected_V, atol=1e-12)


def test_a_teachers_loss_by_hand():
    """As above: 5/9 among the kept ids is 0.5 among all. Teachers with 0.5 and 0.25."""
    term = {"place": "loss", "estimator": "k2"}
    for teacher, expected in ((0.5, 0.0), (0.25, LOG2**2 / 2)):
        fields = {
            "log_mass_N": tensor(0.9).log(), "teacher_logprobs_N": tensor(teacher).log(),
            "teacher_weights_N": tensor(1.0),
        }  # fmt: skip
        tokens = make_tokens([5 / 9], [5 / 9], [0.0], **fields)
        terms = loss_of(tokens, teacher=term, importance={"mode": "off"})
        assert float(terms.sums["teacher_kl_sum"]) == pytest.approx(expected, abs=1e-12)
        assert terms.loss.item() == pytest.approx(expected, abs=1e-12)


def test_ratios_and_weights_are_over_the_ids_that_were_sampled_from():
    """Rollout and policy agree over the kept ids: weights 1, no gap, nothing clipped, whatever the mass."""
    tokens = make_tokens([0.5, 0.25], [0.5, 0.25], [1.0, -1.0], log_mass_N=tensor(0.5, 0.25).log())
    terms = loss_of(tokens, importance={"mode": "truncate"}, rollout_penalty=1.0)
    sums = {name: float(value) for name, value in terms.sums.items()}
    assert sums["weight_sum"] == 2.0 and sums["mismatch_sum"] == sums["rollout_kl_sum"] == 0.0
    assert sums["unmasked_mismatch_sum"] == pytest.approx(LOG2 + 2 * LOG2)
    assert sums["clipped_low"] == sums["clipped_high"] == 0.0


def test_an_id_that_the_model_rules_out_has_a_finite_distance_and_no_gradient():
    logits_NV = tensor(0.0, -math.inf, 0.0, 0.0).view(1, 4).requires_grad_()
    logprobs_N, entropies_N, log_mass_N = score_logits(
        logits_NV, torch.tensor([1]), 1.0, kept=Rows.of_lists([[0, 1]])
    )
    fields = {"logprobs_N": logprobs_N, "log_mass_N": log_mass_N, "entropies_N": entropies_N}
    tokens = make_tokens([0.5], [0.5], [0.0], reference_logprobs_N=tensor(0.5).log(), **fields)
    config = AlgorithmConfig(**in_loss("k2"))
    loss, sums = policy_loss(tokens, config, find_loss(config))
    loss.backward()
    assert math.isfinite(float(sums["kl_sum"])) and not logits_NV.grad.any()


def moved(seed: int) -> Any:
    """A model a little away from where it begins."""
    model = make_neox().double()
    torch.manual_seed(seed + 1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.05 * torch.randn_like(weight))
    return model


def dense(model: Any, sample: Sample, temperature: float = 1.0) -> Tensor:
    """Logprobs over all ids of a sample's completion tokens, from whole logits of its row alone."""
    ids = np.concatenate([sample.prompt_ids, sample.completion_ids]).astype(np.int64)
    logits_TV = model(torch.from_numpy(ids)[None], use_cache=False).logits[0] / temperature
    rows_TV = torch.log_softmax(logits_TV[len(sample.prompt_ids) - 1 : -1], -1)
    return rows_TV.gather(-1, torch.from_numpy(sample.completion_ids.astype(np.int64))[:, None])[:, 0]


def expected_penalty(policy: Any, others: Any, samples: Sequence[Sample], penalty: Penalty) -> Any:
    """Sum of the penalties over trained tokens, and its gradient by the policy's weights."""
    total = torch.zeros((), dtype=torch.float64)
    for sample, other_T in zip(samples, others, strict=True):
        d_T = dense(policy._model, sample, policy._temperature) - other_T
        total = total + penalty(d_T[torch.from_numpy(sample.mask)]).sum()
    weights = [weight for _, weight in policy._parameters]
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(total, weights)])
    return total.item(), gradient


@pytest.mark.parametrize("split", [1, 3, 12])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_value_and_gradient_are_those_of_dense_softmaxes_however_batches_are_split(estimator, split):
    """Advantages are 0: the whole gradient is the penalty's."""
    policy = make_policy(torch.float64, model=make_neox(), temperature=1.3, algorithm=in_loss(estimator))
    samples = masked_samples()
    reference = [dense(policy._model, sample, 1.3).detach() for sample in samples]
    filled = with_precomputed(policy, samples)
    same = accumulate_all(policy, [one_batch(filled)])
    assert abs(same.kl_sum) <= 1e-12 * same.tokens, "the policy is its reference"
    policy.zero()
    with torch.no_grad():
        for _, weight in policy._parameters:
            weight.add_(0.05 * torch.randn_like(weight))
    total, gradient = expected_penalty(policy, reference, samples, ESTIMATORS[estimator])
    batches = [one_batch(filled[start :: 12 // split]) for start in range(12 // split)]
    sums = accumulate_all(policy, batches)
    assert sums.kl_sum == pytest.approx(total, rel=1e-9)
    mine = gradients_of(policy) / 0.3
    assert float(gradient.norm()) > 1e-3
    assert float((mine - gradient).norm() / gradient.norm()) < 1e-9


def masked_samples() -> list[Sample]:
    return [changed(sample, advantage=0.0) for sample in with_masks(make_relatives(12))]


def with_precomputed(policy: Any, samples: Sequence[Sample]) -> list[Sample]:
    precomputed = policy.precompute(samples)
    return [changed(sample, **fields) for sample, fields in zip(samples, precomputed, strict=True)]


def test_a_teacher_in_the_loss_is_a_dense_softmax_too():
    term = {"place": "loss", "estimator": "k2", "clip": 20.0}
    algorithm = {"teacher": term, "importance": {"mode": "off"}, "normalisation": "token"}
    policy = make_policy(torch.float64, model=make_neox(), algorithm=algorithm)
    teacher = moved(0)
    samples = masked_samples()
    with torch.no_grad():
        others = [dense(teacher, sample) for sample in samples]
    # Rounded as on the wire, for both sides of the comparison.
    rounded = [other_T.float() for other_T in others]
    with_teacher = [
        taught(sample, other_T.numpy()[sample.mask], 0.7)
        for sample, other_T in zip(samples, rounded, strict=True)
    ]
    sums = policy.accumulate(one_batch(with_teacher))
    total, gradient = expected_penalty(policy, [other_T.double() for other_T in rounded], samples, k2)
    assert sums.teacher_kl_sum == pytest.approx(total, rel=1e-9)
    assert float((gradients_of(policy) - 0.7 * gradient).norm() / gradient.norm()) < 1e-9


def test_the_coefficient_falls_while_the_policy_is_its_reference():
    """50 steps of 64 samples with a horizon of 200: each takes 0.2 * 64 / 200 off."""
    algorithm = in_loss("k3", 0.001) | {"kl_control": {"target": 0.05, "horizon": 200.0}}
    policy = make_policy(torch.float64, model=make_neox(), algorithm=algorithm)
    sums = accumulate_all(policy, [one_batch(with_precomputed(policy, masked_samples()))])
    config = AlgorithmConfig(**algorithm)
    coefficients = Coefficients(0.001, 0.0)
    for _ in range(50):
        coefficients = coefficients.after(sums.kl_sum / sums.tokens, 1.0, 64.0, config)
    assert coefficients.kl == pytest.approx(0.001 * (1 - 0.064) ** 50, rel=1e-9)

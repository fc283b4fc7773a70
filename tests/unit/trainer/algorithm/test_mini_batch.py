"""Statistics of a mini-batch: by hand, against the formulas over the whole batch, whatever the order."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.losses import our_loss, probable_rectangle, with_statistics
from tests.support.models import masked
from tests.support.training import plain_sample
from tidemill.common.config.algorithm import AlgorithmConfig
from tidemill.services.trainer.algorithm.losses.mini_batch import mean_weight, start_ratio, top_entropy
from tidemill.services.trainer.algorithm.losses.surrogates import LOSSES, token_covariances
from tidemill.services.trainer.groups.samples import Sample

ROLLOUT: dict[str, Any] = {"old_logprobs": "rollout"}


def sample_of(index: int, start: list[float], rollout: list[float], advantage: float = 0.0) -> Sample:
    """By the probabilities of its tokens at the start of the step and at the rollout."""
    logprobs = {"rollout_logprobs": np.log(rollout), "start_logprobs": np.log(start)}
    fields = {name: values.astype(np.float32) for name, values in logprobs.items()}
    return plain_sample(0, index, 0.0, len(start), advantage=advantage, **fields)


def test_the_tokens_with_the_highest_entropy_stay():
    # The quantile 0.5 of 0, 1, 2, 3 is 1.5, that of 0.75 is 2.25
    entropies = np.array([3.0, 0.0, 2.0, 1.0])
    assert top_entropy(entropies, 0.5).tolist() == [True, False, True, False]
    assert top_entropy(entropies, 0.25).tolist() == [True, False, False, False]
    assert top_entropy(np.ones(3), 0.2).all(), "equal ones are at the quantile"
    assert not len(top_entropy(np.zeros(0), 0.2))


@pytest.mark.parametrize(
    ("level", "mean"),
    [
        ("token", (0.5 + 1.5 + 2.0) / 3),  # 0.5, 1.5, and 4 truncated to 2
        ("sequence", (0.75 + 2.0) / 2),  # the product of the first two, and 2
        ("geometric", (math.sqrt(0.75) + 2.0) / 2),
    ],
)
def test_the_mean_of_truncated_weights_by_hand(level, mean):
    samples = [sample_of(0, [0.2, 0.6], [0.4, 0.4]), sample_of(1, [0.8], [0.2])]
    algorithm = AlgorithmConfig(importance={"level": level, "normalise": True})
    assert mean_weight(samples, algorithm) == pytest.approx(mean)
    assert mean_weight([*samples, masked(sample_of(2, [0.9], [0.1]))], algorithm) == pytest.approx(mean)
    assert mean_weight([masked(samples[0])], algorithm) == 1.0


def test_covariances_and_what_is_chosen_by_hand():
    # Logprobs -1, -3 with A = 1 and -2, -2 with A = -1: means -2 and 0
    samples = [
        sample_of(0, [math.exp(-1), math.exp(-3)], [0.5, 0.5], 1.0),
        sample_of(1, [math.exp(-2)] * 2, [0.5, 0.5], -1.0),
    ]
    kl_cov = AlgorithmConfig(loss="kl_cov", covariance={"share": 0.5}, **ROLLOUT)
    np.testing.assert_allclose(
        token_covariances(start_ratio(samples, kl_cov)), [1.0, -1.0, 0.0, 0.0], atol=1e-6
    )
    assert chosen(samples, kl_cov) == [True, False, True, False], "2 of 4, the first of equal"
    fields = {"loss": "clip_cov", "covariance": {"share": 0.01, "low": -0.5, "high": 0.5}}
    of_all = chosen(samples, AlgorithmConfig(**fields))
    assert sum(of_all) == 1 and any(of_all[2:]), "one of the two inside, the share rounds to none"
    # The third has A < 0 and the ratio 0.14 / 0.5, below the clip; the last 0.14 / 0.14
    samples[1] = sample_of(1, [math.exp(-2)] * 2, [0.5, math.exp(-2)], -1.0)
    assert chosen(samples, AlgorithmConfig(**fields, **ROLLOUT)) == [False, False, False, True]


def chosen(samples: list[Sample], algorithm: AlgorithmConfig) -> list[bool]:
    """Whether the loss chooses each trained token of a mini-batch."""
    ratio, (surrogate, choose, _) = start_ratio(samples, algorithm), LOSSES[algorithm.loss]
    places = [(sample.key, place) for sample in samples for place in range(len(sample.mask))]
    assert choose is not None
    found = choose(ratio, surrogate(ratio, algorithm), places, algorithm)
    return [place in found for place in range(len(places))]


def samples_of(data: SimpleNamespace) -> list[Sample]:
    """The sequences of a rectangle, whose current policy is that at the step's start."""
    names = {
        "mask": data.mask,
        "rollout_logprobs": data.rollout,
        "start_logprobs": data.current,
        "entropies": data.entropies,
    }
    return [
        plain_sample(0, b, 0.0, data.mask.shape[1], advantage=a, **{name: v[b] for name, v in names.items()})
        for b, a in enumerate(data.advantages.tolist())
    ]


def statistics_of(samples: list[Sample]) -> dict[str, np.ndarray]:
    columns = {name: [getattr(sample, name) for sample in samples] for name in ("factors", "penalised")}
    return {name: np.stack(values) for name, values in columns.items() if values[0] is not None}


CASES: dict[str, dict[str, Any]] = {
    "top entropy": {"top_entropy_quantile": 0.3, "importance": {"mode": "off"}},
    "normalised weights": {"importance": {"normalise": True}},
    "normalised weights of sequences": {"importance": {"level": "sequence", "high": 3.0, "normalise": True}},
    "clip_cov": {"loss": "clip_cov", "covariance": {"share": 0.99, "low": 0.1, "high": 2.0}, **ROLLOUT},
    "kl_cov": {"loss": "kl_cov", "covariance": {"share": 0.3, "coefficient": 0.7}, **ROLLOUT},
}


def whole_batch(data: SimpleNamespace, algorithm: AlgorithmConfig) -> tuple[float, np.ndarray]:
    """The papers' losses over all tokens at once, in float64; normalised by token."""
    now_BT = torch.tensor(data.current, dtype=torch.float64, requires_grad=True)
    mask_BT, counts = torch.tensor(data.mask), data.mask.sum(1)
    now, rollout = now_BT[mask_BT], torch.tensor(data.rollout).double()[mask_BT]
    advantages = torch.tensor(np.repeat(data.advantages, counts)).double()
    sequence = torch.tensor(np.repeat(np.arange(4), counts))
    ratio = (now - (rollout if algorithm.old_logprobs == "rollout" else now.detach())).exp()
    clipped = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)
    covariance = ((advantages - advantages.mean()) * (now - now.mean())).detach()
    if algorithm.loss == "clip_cov":
        bounds = algorithm.covariance
        is_free = clipped == ratio * advantages
        inside = (covariance > bounds.low) & (covariance < bounds.high) & is_free
        losses = -clipped * (~inside)
    elif algorithm.loss == "kl_cov":
        chosen = covariance.topk(int(0.3 * len(now))).indices
        losses = -ratio * advantages
        losses[chosen] = losses[chosen] + 0.7 * (now - rollout).abs()[chosen]
    elif algorithm.top_entropy_quantile < 1.0:
        entropies = torch.tensor(data.entropies).double()[mask_BT]
        losses = -ratio * advantages * (entropies >= entropies.quantile(0.7))
    else:
        importance, logs = algorithm.importance, (now - rollout).detach()
        if importance.level == "sequence":
            sums = torch.stack([logs[sequence == s].sum() for s in range(3)])
            weights = sums.exp().clamp(max=importance.high)
            weights = (weights / weights.mean())[sequence]
        else:
            weights = logs.exp().clamp(max=importance.high)
            weights = weights / weights.mean()
        losses = -weights * ratio * advantages
    loss = losses.mean()
    loss.backward()
    assert now_BT.grad is not None
    return loss.item(), now_BT.grad.numpy()


@pytest.mark.parametrize("case", CASES)
def test_equals_the_formula_over_the_whole_batch_in_value_and_gradient(case):
    algorithm = AlgorithmConfig(**CASES[case])
    for seed in range(4):
        data = probable_rectangle(seed)
        statistics = statistics_of(with_statistics(samples_of(data), algorithm))
        ours, our_gradient_BT, _ = our_loss(data, algorithm, **statistics)
        theirs, their_gradient_BT = whole_batch(data, algorithm)
        assert ours == pytest.approx(theirs, abs=1e-6)
        np.testing.assert_allclose(our_gradient_BT, their_gradient_BT, atol=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_depends_neither_on_the_order_nor_on_what_is_not_trained(case):
    algorithm = AlgorithmConfig(**CASES[case])
    samples = samples_of(probable_rectangle(0))
    plain = {sample.key: sample for sample in with_statistics(samples, algorithm)}
    mixed = [samples[2], masked(sample_of(9, [0.9], [0.1], 5.0)), samples[0], samples[3], samples[1]]
    if algorithm.needs_start_entropies:
        mixed[1] = replace(mixed[1], entropies=np.ones(1, np.float32))
    for sample in with_statistics(mixed, algorithm):
        if sample.key in plain:
            np.testing.assert_array_equal(sample.factors, plain[sample.key].factors)
            np.testing.assert_array_equal(sample.penalised, plain[sample.key].penalised)
        assert sample.start_logprobs is None and sample.entropies is None


def test_an_algorithm_without_statistics_leaves_samples_as_they_are():
    samples = samples_of(probable_rectangle(0))
    assert all(a is b for a, b in zip(with_statistics(samples, AlgorithmConfig()), samples, strict=True))

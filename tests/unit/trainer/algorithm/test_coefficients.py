"""Coefficients that move: values by hand, verl's and TRL's rules, and what a checkpoint keeps."""

import math
from typing import Any

import numpy as np
import pytest

from tests.support.models import load_state, make_policy, make_samples, one_batch
from tests.support.samples import changed
from tidemill.common.config.algorithm import AlgorithmConfig
from tidemill.services.trainer.algorithm.coefficients import Coefficients, coefficient_metrics

REFERENCE = {"reference": {"model": "frozen"}}


def algorithm(**fields: Any) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate(fields)


def with_kl(target: float | None = 0.1, horizon: float = 10_000.0, **fields: Any) -> AlgorithmConfig:
    kl = {"place": "loss", "coefficient": 0.1}
    return algorithm(kl=kl, kl_control={"target": target, "horizon": horizon}, **REFERENCE, **fields)


def with_entropy(coefficient: float = 0.01, **control: Any) -> AlgorithmConfig:
    return algorithm(entropy_coefficient=coefficient, entropy_control={"target": 0.2, **control})


@pytest.mark.parametrize(
    ("kl", "num_samples", "expected"),
    [
        (0.11, 1000, 0.101),  # 0.1 * (1 + 0.1 * 0.1)
        (0.1, 1000, 0.1),
        (5.0, 1000, 0.102),  # an error of at most 0.2
        (0.0, 1000, 0.098),
        (-3.0, 1000, 0.098),
        (0.0, 100_000, 0.0),  # never below 0, however many samples
        (math.nan, 1000, 0.1),
    ],
)
def test_the_kl_coefficient_moves_with_the_relative_error(kl, num_samples, expected):
    config = with_kl()
    moved = Coefficients.at_start(config).after(kl, 1.0, num_samples, config)
    assert moved.kl == pytest.approx(expected, rel=1e-12)
    assert moved.entropy == config.entropy_coefficient


def test_the_kl_coefficient_is_verls_over_a_run():
    """verl's controller, written a second time in float32."""
    config = with_kl(horizon=500.0)
    rng = np.random.default_rng(0)
    ours = Coefficients.at_start(config)
    theirs = np.float32(0.1)
    for kl in rng.gamma(2.0, 0.05, 40):
        ours = ours.after(float(kl), 1.0, 64, config)
        error = np.clip(np.float32(kl) / np.float32(0.1) - np.float32(1), np.float32(-0.2), np.float32(0.2))
        theirs *= np.float32(1) + error * np.float32(64) / np.float32(500)
        assert ours.kl == pytest.approx(float(theirs), rel=1e-5)


def test_the_entropy_coefficient_is_trls_over_a_run():
    """TRL's rule: a step up at or below the target, else down; used only after a step at or below it."""
    config = with_entropy(0.01, delta=0.02, low=0.005, high=0.04)
    ours = Coefficients.at_start(config)
    coefficient = 0.01
    last = math.inf
    for entropy in (0.5, 0.3, 0.2, 0.1, 0.1, 0.15, 0.19, 0.21, 0.4, 0.1):
        used = coefficient if last <= 0.2 else 0.0
        assert ours.applied(config).entropy_coefficient == pytest.approx(used, abs=1e-12)
        coefficient = min(coefficient + 0.02, 0.04) if entropy <= 0.2 else max(coefficient - 0.02, 0.005)
        last = entropy
        ours = ours.after(0.0, entropy, 8, config)
        assert ours.entropy == pytest.approx(coefficient, abs=1e-12)


def test_what_has_no_target_stays_the_section_itself():
    config = algorithm(entropy_coefficient=0.5)
    start = Coefficients.at_start(config)
    assert start.after(9.0, 0.0, 1000, config) == start
    assert start.applied(config) is config
    assert start.as_values(config) == {} == coefficient_metrics(config)


def test_a_checkpoint_keeps_what_moves_and_the_config_says_the_rest():
    config = with_kl(entropy_control={"target": 0.2})
    moved = Coefficients.at_start(config).after(0.2, 0.1, 500, config)
    saved = moved.as_values(config)["coefficients"]
    assert Coefficients.at_start(config, saved) == moved
    assert Coefficients.at_start(config, None) == Coefficients(0.1, 0.0), "of an older checkpoint"
    assert Coefficients.at_start(with_kl(), saved) == Coefficients(moved.kl, 0.0)
    assert Coefficients.at_start(with_kl(None), saved) == Coefficients(0.1, 0.0)


def test_a_policy_trains_with_the_coefficients_of_the_moment_and_saves_them():
    """The loss moves by what the coefficient moved; a policy from the state goes on bit by bit."""
    fields = {
        "reference": {"model": "frozen"},
        "kl": {"place": "loss", "coefficient": 0.1, "bound": None},
        "kl_control": {"target": 1e-9, "horizon": 10.0},
        "entropy_control": {"target": 100.0, "delta": 0.25},
    }
    policy = make_policy(algorithm=fields)
    fixed = make_policy(algorithm=REFERENCE)
    samples = make_samples(4)
    precomputed = zip(samples, policy.precompute(samples), strict=True)
    samples = [
        changed(sample, reference_logprobs=columns["reference_logprobs"] - 0.5)
        for sample, columns in precomputed
    ]
    plain = fixed.accumulate(one_batch(samples))
    first = policy.accumulate(one_batch(samples))
    assert first.loss_sum == pytest.approx(plain.loss_sum + 0.1 * first.kl_sum, rel=1e-6)
    policy.zero()
    policy.adapt(first.kl_sum / first.tokens, first.entropy_sum / first.tokens, 5.0)
    # 0.1 * (1 + 0.2 * 5 / 10) = 0.11; entropy 0 + 0.25
    second = policy.accumulate(one_batch(samples))
    expected = plain.loss_sum + 0.11 * first.kl_sum - 0.25 * first.entropy_sum
    assert second.loss_sum == pytest.approx(expected, rel=1e-6)
    policy.zero()
    state = policy.state()
    assert state.values["coefficients"]["kl"] == pytest.approx(0.11)
    resumed = make_policy(algorithm=fields)
    load_state(resumed, state)
    assert resumed.accumulate(one_batch(samples)) == second
    assert "coefficients" not in fixed.state().values

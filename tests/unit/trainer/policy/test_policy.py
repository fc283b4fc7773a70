"""The policy: gradients that do not depend on the split, defined outcomes, exact replay."""

import asyncio
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.support.models import (
    MAX_COMPLETION,
    accumulate_all,
    emptied,
    gradients_of,
    make_policy,
    make_samples,
    masked,
    one_batch,
    train,
)
from tidemill.services.trainer.algorithm.losses.totals import MicroBatchMetrics

NORMALISATIONS = ["sequence", "token", "constant"]


@pytest.mark.parametrize("useless", [masked, emptied])
@pytest.mark.parametrize("normalisation", NORMALISATIONS)
def test_sequences_without_trained_tokens_add_no_gradient_and_count_as_sequences(useless, normalisation):
    samples = make_samples(4)
    extra = [useless(sample) for sample in make_samples(3, seed=9)]
    with_extra = make_policy(torch.float64, algorithm={"normalisation": normalisation})
    without = make_policy(torch.float64, algorithm={"normalisation": normalisation})
    metrics = accumulate_all(with_extra, [one_batch([*extra, *samples])])
    plain = accumulate_all(without, [one_batch(samples)])
    torch.testing.assert_close(gradients_of(with_extra), gradients_of(without), rtol=1e-9, atol=1e-9)
    added = {"sequence": 3, "token": 0, "constant": 3 * MAX_COMPLETION}[normalisation]
    assert metrics.denominator - plain.denominator == added
    assert (metrics.sequences, metrics.tokens) == (7, plain.tokens)


@pytest.mark.parametrize("useless", [masked, emptied])
@pytest.mark.parametrize("normalisation", NORMALISATIONS)
def test_a_step_without_any_trained_token_leaves_the_weights(useless, normalisation):
    policy = make_policy(algorithm={"normalisation": normalisation})
    before = policy.digest()
    metrics = policy.accumulate(one_batch([useless(sample) for sample in make_samples(3)]))
    assert metrics == MicroBatchMetrics(sequences=3, denominator=metrics.denominator)
    result = policy.update(metrics.denominator)
    assert result.skipped
    assert result.grad_norm == 0.0
    assert policy.digest() == before


def test_logprobs_leave_gradients_alone():
    policy, samples = make_policy(), make_samples(5)
    accumulate_all(policy, [one_batch(samples)])
    before = gradients_of(policy).clone()
    policy.logprobs(samples)
    assert torch.equal(gradients_of(policy), before)


def test_threads_of_the_event_loop_give_the_same_bits_as_the_main_thread():
    samples = make_samples(12)
    here, there = make_policy(), make_policy()
    train(here, [one_batch(samples)])

    async def step() -> None:
        metrics = await asyncio.to_thread(there.accumulate, one_batch(samples))
        await asyncio.to_thread(there.update, metrics.denominator)

    asyncio.run(step())
    assert here.digest() == there.digest()


@pytest.mark.parametrize("advantage", [1e38, -1e38])
def test_gradients_that_are_not_finite_skip_the_update(advantage):
    policy, samples = make_policy(), make_samples(4)
    before = policy.digest()
    samples[2] = replace(samples[2], advantage=advantage * 10)
    result = train(policy, [one_batch(samples)])
    assert result.skipped
    assert not math.isfinite(result.grad_norm)
    assert "gradient norm" in result.reason
    assert policy.digest() == before
    assert not train(policy, [one_batch(make_samples(4))]).skipped
    assert all(torch.isfinite(parameter).all() for _, parameter in policy._parameters)


def test_the_rate_follows_the_steps_also_over_a_skipped_one():
    policy = make_policy(steps=4, optimizer={"lr": 0.4, "schedule": "linear"})
    samples = make_samples(4)
    rates = [
        train(policy, [one_batch(samples)]).lr,
        policy.update(0.0).lr,
        train(policy, [one_batch(samples)]).lr,
    ]
    assert rates == pytest.approx([0.4, 0.3, 0.2])


def test_bfloat16_stays_near_float32():
    samples = make_samples(16)
    full, half = make_policy(), make_policy(torch.bfloat16)
    for exact, rough in zip(full.logprobs(samples), half.logprobs(samples), strict=True):
        np.testing.assert_allclose(rough, exact, atol=0.15)
        assert rough.dtype == np.float32
    accumulate_all(full, [one_batch(samples)])
    accumulate_all(half, [one_batch(samples)])
    exact, rough = gradients_of(full), gradients_of(half)
    assert rough.dtype == torch.float32  # master weights and their gradients
    assert torch.nn.functional.cosine_similarity(exact, rough, dim=0).item() > 0.99
    assert half.update(10.0).skipped is False

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
    load_state,
    logprobs_of,
    make_policy,
    make_samples,
    masked,
    one_batch,
    train,
)
from tests.support.training import sample_of
from tidemill.services.trainer.algorithm.losses.totals import MicroBatchMetrics
from tidemill.services.trainer.groups.bins import form_micro_batches
from tidemill.services.trainer.groups.samples import Sample
from tidemill.services.trainer.policy.transformers_policy import TransformersPolicy

NORMALISATIONS = ["sequence", "token", "constant"]


def test_on_policy_nothing_is_corrected_clipped_or_capped():
    policy, samples = make_policy(algorithm={"old_logprobs": "recompute"}), make_samples(10)
    own = [
        replace(sample, rollout_logprobs=logprobs)
        for sample, logprobs in zip(samples, logprobs_of(policy, samples), strict=True)
    ]
    metrics = policy.accumulate(one_batch(own))
    assert metrics.weight_sum / metrics.tokens == pytest.approx(1.0, abs=1e-5)
    assert metrics.mismatch_max < 1e-5
    assert abs(metrics.rollout_kl_sum) < 1e-5
    assert (metrics.clipped_low, metrics.clipped_high, metrics.weights_bounded) == (0, 0, 0)


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


def test_logprobs_of_an_empty_completion_are_empty():
    policy, samples = make_policy(), make_samples(3)
    results = logprobs_of(policy, [samples[0], emptied(samples[1]), samples[2]])
    assert [len(result) for result in results] == [samples[0].mask.size, 0, samples[2].mask.size]
    assert results[1].dtype == np.float32


def test_logprobs_leave_gradients_alone():
    policy, samples = make_policy(), make_samples(5)
    accumulate_all(policy, [one_batch(samples)])
    before = gradients_of(policy).clone()
    logprobs_of(policy, samples)
    assert torch.equal(gradients_of(policy), before)


def test_zero_undoes_what_was_accumulated():
    policy, samples = make_policy(), make_samples(6)
    accumulate_all(policy, [one_batch(samples)])
    policy.zero()
    train(policy, [one_batch(samples[:2])])
    fresh = make_policy()
    train(fresh, [one_batch(samples[:2])])
    assert policy.digest() == fresh.digest()


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
    for exact, rough in zip(logprobs_of(full, samples), logprobs_of(half, samples), strict=True):
        np.testing.assert_allclose(rough, exact, atol=0.15)
        assert rough.dtype == np.float32
    accumulate_all(full, [one_batch(samples)])
    accumulate_all(half, [one_batch(samples)])
    exact, rough = gradients_of(full), gradients_of(half)
    assert rough.dtype == torch.float32  # master weights and their gradients
    assert torch.nn.functional.cosine_similarity(exact, rough, dim=0).item() > 0.99
    assert half.update(10.0).skipped is False


@pytest.mark.parametrize("old_logprobs", ["recompute", "rollout"])
def test_learns_from_samples_that_are_one_step_old(old_logprobs):
    """Reward: the token 7 at each position. Samples always come from the version before the current one."""
    policy = make_policy(algorithm={"old_logprobs": old_logprobs}, optimizer={"lr": 2e-2}, steps=20)
    stale = make_policy()
    generator = torch.Generator().manual_seed(0)
    rewards = []
    for _ in range(20):
        samples = sample_from(stale, 32, generator)
        rewards.append(np.mean([sample.reward for sample in samples]))
        load_state(stale, policy.state())
        train(policy, form_micro_batches(samples, 64))
    assert rewards[0] < 0.1
    assert rewards[-1] > 0.5


def sample_from(policy: TransformersPolicy, count: int, generator: torch.Generator) -> list[Sample]:
    """Completions of 4 tokens; the advantage is the reward's distance from the mean."""
    ids = torch.full((count, 1), 3)
    columns = []
    for _ in range(4):
        with torch.no_grad():
            logprobs = policy._model(input_ids=ids, use_cache=False).logits[:, -1].log_softmax(-1)
        token = torch.multinomial(logprobs.exp(), 1, generator=generator)
        columns.append(logprobs.gather(1, token))
        ids = torch.cat([ids, token], 1)
    rewards = (ids[:, 1:] == 7).double().mean(1)
    return [
        sample_of(
            (0, i),
            ids[i, :1],
            ids[i, 1:],
            torch.cat(columns, 1)[i],
            advantage=float(rewards[i] - rewards.mean()),
            reward=float(rewards[i]),
        )
        for i in range(count)
    ]

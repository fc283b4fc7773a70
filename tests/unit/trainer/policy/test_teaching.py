"""Training on a teacher's logprobs: whatever the split, with and without a teacher beside each other, and on
sessions written out row by row."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.models import (
    MAX_COMPLETION,
    accumulate_all,
    gradients_of,
    make_policy,
    make_samples,
    one_batch,
    tiny_llama,
)
from tests.support.sessions import make_segment, make_session, rows_by_hand
from tidemill.common.config.algorithm_sections import TeacherTermConfig
from tidemill.services.trainer.algorithm.advantages.shaping import with_teacher
from tidemill.services.trainer.groups.samples import Sample, form_micro_batches, make_sample, with_teaching
from tidemill.services.trainer.policy.fsdp.sharded_policy import decode_call, encode_call

LOSS: dict[str, Any] = {"place": "loss", "estimator": "k3", "clip": 3.0}
TERMS: dict[str, dict[str, Any]] = {"reward": {"gamma": 0.5}, "loss": LOSS}


def taught_samples(count: int, term: dict[str, Any]) -> list[Sample]:
    """Every third has no teacher, the others two teachers of different weight."""
    rng = np.random.default_rng(4)
    done = []
    for number, sample in enumerate(make_samples(count)):
        if number % 3:
            logprobs_A = rng.normal(-3.0, 1.0, sample.num_trained).astype(np.float32)
            sample = with_teaching(sample, f"t{number % 3}", logprobs_A, 0.5 * (number % 3))
        done.append(with_teacher(sample, TeacherTermConfig(**term)))
    return done


@pytest.mark.parametrize("normalisation", ["sequence", "token", "constant"])
@pytest.mark.parametrize("place", TERMS)
def test_the_gradient_does_not_depend_on_the_split_or_the_order(place: str, normalisation: str) -> None:
    samples = taught_samples(14, TERMS[place])
    rng = np.random.default_rng(0)
    splits = [
        [one_batch(samples)],
        form_micro_batches(samples, 40)[::-1],
        [one_batch([samples[i] for i in part]) for part in np.array_split(rng.permutation(14), 5)],
    ]
    results = []
    for split in splits:
        algorithm = {"teacher": TERMS[place], "normalisation": normalisation}
        policy = make_policy(torch.float64, algorithm=algorithm)
        metrics = accumulate_all(policy, split)
        results.append((gradients_of(policy) / metrics.denominator, metrics))
    whole, whole_metrics = results[0]
    assert whole.norm() > 0
    assert (whole_metrics.teacher_tokens > 0) == (place == "loss")
    for gradient, metrics in results[1:]:
        assert ((gradient - whole).norm() / whole.norm()).item() < 1e-6
        for field in metrics.__slots__:
            assert getattr(metrics, field) == pytest.approx(getattr(whole_metrics, field)), field


def test_a_sample_without_a_teacher_is_trained_bit_by_bit_as_without_any() -> None:
    plain = make_samples(3)
    logprobs_A = np.full(plain[0].num_trained, -1.0, np.float32)
    beside = [with_teaching(plain[0], "wise", logprobs_A, 0.0), *plain[1:]]
    gradients = []
    for samples in (plain, beside):
        policy = make_policy(algorithm={"teacher": LOSS})
        accumulate_all(policy, [one_batch(samples)])
        gradients.append(gradients_of(policy))
    assert torch.equal(*gradients)


@pytest.mark.parametrize("place", TERMS)
def test_samples_come_to_other_ranks_as_they_are(place: str) -> None:
    samples = taught_samples(6, TERMS[place])
    _, (batch,) = decode_call(encode_call("accumulate", [one_batch(samples)]))
    for sample, there in zip(samples, batch.samples, strict=True):
        assert (sample.teaching is None) == (there.teaching is None)
        if sample.teaching is not None:
            assert (sample.teaching.teacher, sample.teaching.weight) == (
                there.teaching.teacher,
                there.teaching.weight,
            )
            np.testing.assert_array_equal(sample.teaching.logprobs, there.teaching.logprobs)
    policies = [make_policy(torch.float64, algorithm={"teacher": TERMS[place]}) for _ in range(2)]
    for policy, given in zip(policies, (one_batch(samples), batch), strict=True):
        accumulate_all(policy, [given])
    assert torch.equal(*map(gradients_of, policies))


@pytest.mark.parametrize("place", TERMS)
def test_loss_and_gradient_of_sessions_are_those_written_out_row_by_row(place: str) -> None:
    """A fork's rows share nothing but their sample: the teacher scores each of them."""
    trajectories = [
        make_session(0, 0, make_segment((3, 4, 5), (6, 7), (8, 9, 10), (11, 12, 13))),
        make_session(
            0, 1, make_segment((3, 4), (6,), (8, 9), (11, 12)), make_segment((14, 15, 16), (17, 18), (19,))
        ),
    ]
    weight, term = 0.7, TeacherTermConfig(**({"gamma": 0.0} if place == "reward" else LOSS))
    samples = []
    model, teacher = tiny_llama().double(), tiny_llama(seed=9).double()
    loss = torch.zeros((), dtype=torch.float64)
    for trajectory in trajectories:
        ours, theirs = [], []
        for ids, places in rows_by_hand(trajectory):
            for of, found in ((model, ours), (teacher, theirs)):
                logprobs = of(input_ids=torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)
                found += [logprobs[place - 1, ids[place]] for place in places]
        student, wise = torch.stack(ours), torch.stack(theirs).detach().float()
        # On policy: the rollout's logprobs are the policy's own, so that every importance weight is 1.
        sample = make_sample(trajectory)
        rollout = np.zeros(len(sample.mask), np.float32)
        rollout[sample.mask] = student.detach().float().numpy()
        sample = replace(sample, rollout_logprobs=rollout)
        samples.append(with_teacher(with_teaching(sample, "wise", wise.numpy(), weight), term))
        d = (student.detach().float().double() - wise.double()).clamp(-term.clip, term.clip)
        if place == "reward":
            loss = loss + (weight * d * (student - student.detach()).exp()).sum()
        else:
            exact = (student.detach() - wise.double()).clamp(-term.clip, term.clip)
            loss = loss + (weight * (1 - torch.exp(-exact)) * student).sum()
    loss.backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    policy = make_policy(
        torch.float64, algorithm={"teacher": TERMS[place], "loss": "reinforce", "normalisation": "constant"}
    )
    metrics = accumulate_all(policy, form_micro_batches(samples, 12))
    assert metrics.denominator == 2 * MAX_COMPLETION
    difference = (gradients_of(policy) - expected).norm() / expected.norm()
    assert difference.item() < 1e-5

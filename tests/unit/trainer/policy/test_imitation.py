"""The imitation loss in the policy: by the model's own cross entropy, packed, and beside other samples."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from tests.support.architectures import make_model
from tests.support.models import (
    accumulate_all,
    gradients_of,
    make_policy,
    make_samples,
    one_batch,
    tiny_llama,
)
from tests.support.routes import with_foreign
from tests.unit.trainer.policy.test_policy_algorithms import ALGORITHMS, moved_policy, prepared, taught
from tidemill.common.config.algorithm_sections import TeacherTermConfig
from tidemill.services.trainer.algorithm.losses.totals import loss_metrics
from tidemill.services.trainer.groups.bins import form_micro_batches
from tidemill.services.trainer.groups.samples import Sample

OF_ALL = {"loss", "forward/positions", "forward/row_tokens", "imitation/loss", "imitation/token_share"}


def shown(count: int, weight: float = 1.0) -> list[Sample]:
    return [
        replace(sample, key=(1_000_000_000 + number, 0), advantage=0.0, imitation=weight)
        for number, sample in enumerate(make_samples(count, seed=9))
    ]


def assert_alike(mine: torch.Tensor, expected: torch.Tensor) -> None:
    """Up to the norms of the model's layers, which it computes in float32."""
    assert ((mine - expected).norm() / expected.norm()).item() < 1e-6


def test_loss_and_gradient_are_those_of_cross_entropy():
    samples, model = shown(6, weight=0.5), tiny_llama().double()
    total, num_tokens = torch.zeros((), dtype=torch.float64), 0
    for sample in samples:
        ids = torch.tensor([*sample.prompt_ids, *sample.completion_ids]).long()
        labels = ids.clone()
        labels[: len(sample.prompt_ids)] = -100
        labels[len(sample.prompt_ids) :][~torch.from_numpy(sample.mask)] = -100
        logits = model(ids[None]).logits[0]
        total = total + F.cross_entropy(logits[:-1], labels[1:], reduction="sum")
        num_tokens += sample.num_trained
    (total / num_tokens).backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    policy = make_policy(torch.float64)
    sums = accumulate_all(policy, [one_batch(samples)])
    assert sums.denominator == sums.imitation_tokens == num_tokens and sums.sampled_tokens == 0
    numbers = loss_metrics(sums)
    assert numbers["imitation/loss"] == pytest.approx(total.item() / num_tokens, rel=1e-12)
    assert numbers["loss"] == pytest.approx(0.5 * total.item() / num_tokens, rel=1e-12)
    assert numbers.keys() == OF_ALL
    assert_alike(gradients_of(policy) / sums.denominator, 0.5 * expected)


def test_packed_equals_unpacked_whatever_the_split():
    samples, results = shown(14), []
    for packing, split in ((True, 1000), (True, 40), (False, 1000), (False, 40)):
        policy = make_policy(torch.float64, packing=packing, micro_batch_tokens=split)
        accumulate_all(policy, form_micro_batches(samples, split))
        results.append(gradients_of(policy))
    for other in results[1:]:
        assert_alike(other, results[0])


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name != "gae"])
def test_beside_demonstrations_other_samples_are_trained_and_measured_as_without(name):
    """The gradient of both is the sum of either's; what is measured of sampled tokens is theirs alone."""
    algorithm = ALGORITHMS[name]
    samples = prepared(moved_policy(algorithm=algorithm), make_samples(10))
    if "teacher" in algorithm:
        samples = taught(samples, TeacherTermConfig(**algorithm["teacher"]))
    parts, demonstrations = [], shown(6, weight=0.3)
    together = [
        sample for pair in zip(samples[:6], demonstrations, strict=True) for sample in pair
    ] + samples[6:]
    for batch in (samples, demonstrations, together):
        policy = moved_policy(algorithm=algorithm)
        sums = accumulate_all(policy, [one_batch(batch)])
        parts.append((gradients_of(policy), loss_metrics(sums)))
    (alone, numbers), (imitated, _), (both, measured) = parts
    apart = moved_policy(algorithm=algorithm, micro_batch_tokens=16)
    assert loss_metrics(accumulate_all(apart, [one_batch(together)])) == pytest.approx(
        measured | {"forward/positions": pytest.approx(measured["forward/positions"], rel=1.0)}
    )
    assert_alike(both, alone + imitated)
    assert measured["imitation/token_share"] == pytest.approx(
        sum(s.num_trained for s in demonstrations) / sum(s.num_trained for s in together)
    )
    for metric in numbers.keys() - OF_ALL:
        assert measured[metric] == pytest.approx(numbers[metric]), metric


def test_what_is_measured_of_experts_is_of_sampled_tokens():
    """Also beside demonstrations, for which no engine has chosen experts."""
    samples, numbers = with_foreign(make_samples(6), experts=3), []
    for batch in (samples, [*shown(6), *samples]):
        router = {"router": {"balance": 0.1, "z": 0.1}}
        policy = make_policy(model=make_model("Mixtral"), replays_routes=True, algorithm=router)
        numbers.append(loss_metrics(accumulate_all(policy, [one_batch(batch)])))
    alone, beside = numbers
    for name in ("balance_loss", "z_loss"):
        assert beside[f"experts/{name}"] == pytest.approx(alone[f"experts/{name}"], rel=1e-4)
    for name in ("changed_tokens", "changed_layers", "logprob_gap_with", "logprob_gap_without"):
        assert beside[f"routes/{name}"] == pytest.approx(alone[f"routes/{name}"], rel=1e-4)

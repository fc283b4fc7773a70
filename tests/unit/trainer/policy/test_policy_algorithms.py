"""The policy under every algorithm: gradients whatever the split; reference model, value head, and the
imitation loss, alone and beside other samples."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tests.support.architectures import make_model
from tests.support.losses import with_statistics
from tests.support.models import (
    accumulate_all,
    assert_all_close,
    gradients_of,
    load_state,
    logprobs_of,
    make_policy,
    make_samples,
    one_batch,
    option_of,
    tiny_llama,
    train,
)
from tests.support.routes import with_foreign
from tests.support.samples import changed, taught
from tidemill.common.config.algorithm_sections import TeacherTermConfig
from tidemill.common.errors import ConfigError
from tidemill.services.trainer.algorithm.advantages.teacher import add_teacher
from tidemill.services.trainer.algorithm.losses.sums import loss_metrics
from tidemill.services.trainer.groups.bins import form_micro_batches
from tidemill.services.trainer.groups.sample import Sample
from tidemill.services.trainer.policy.reference import ReferenceModel
from tidemill.services.trainer.policy.transformers_policy import TransformersPolicy
from tidemill.services.trainer.policy.value_head import ValueHead

FROZEN: dict[str, Any] = {"reference": {"model": "frozen"}}
ROLLOUT: dict[str, Any] = {"old_logprobs": "rollout"}


ALGORITHMS: dict[str, dict[str, Any]] = {
    "ppo": ROLLOUT,
    "dual clip": {"dual_clip": 1.6, **ROLLOUT},
    "gspo": {"loss": "gspo", "clip_low": 0.1, "clip_high": 0.2, **ROLLOUT},
    "cispo": {"loss": "cispo", **ROLLOUT},
    "sapo": {"loss": "sapo", **ROLLOUT},
    "reinforce": {"loss": "reinforce"},
    "dppo": {"loss": "dppo_tv", "clip_low": 0.01, "clip_high": 0.01, "rollout_penalty": 0.1, **ROLLOUT},
    "dppo_kl": {"loss": "dppo_kl", "clip_low": 0.01, "clip_high": 0.01, **ROLLOUT},
    "truncated sequences": {"importance": {"level": "sequence", "high": 3.0}},
    "masked sequences": {"importance": {"mode": "mask", "level": "geometric", "low": 0.5}},
    "icepop": {"importance": {"mode": "mask", "low": 0.5, "high": 5.0}},
    "rejected sequences": {
        "rejection": {"bounds": {"seq_mean_k1": 4.0}, "veto": 0.005, "denominator": "kept"}
    },
    "top entropy": {"top_entropy_quantile": 0.4},
    "normalised weights": {"importance": {"level": "sequence", "normalise": True}},
    "clip_cov": {"loss": "clip_cov", "covariance": {"share": 0.2, "low": 0.1}, **ROLLOUT},
    "kl_cov": {"loss": "kl_cov", "covariance": {"share": 0.2}, **ROLLOUT},
    "gmpo": {"loss": "gmpo", **ROLLOUT},
    "vespo": {"loss": "vespo", "vespo": {"positive": [0.1, 0.01], "negative": [0.1, 0.01]}, **ROLLOUT},
    "off-policy mask": {"off_policy_threshold": 0.1},
    "rejected tokens": {"rejection": {"bounds": {"token_k3": 0.2}, "denominator": "kept"}, **ROLLOUT},
    "kl": {"kl": {"place": "loss", "estimator": "k3", "coefficient": 0.5}, **FROZEN},
    "corrected k3": {"kl": {"place": "loss", "estimator": "corrected_k3"}, **ROLLOUT, **FROZEN},
    "entropy": {"entropy_coefficient": 0.3},
    "gae": {"advantage": "gae"},
    "teacher in the reward": {"teacher": {"place": "reward", "gamma": 0.5}},
    "teacher in the loss": {"teacher": {"place": "loss", "estimator": "k3", "clip": 3.0}},
}


def prepared(policy: TransformersPolicy, samples: list[Sample], seed: int = 5) -> list[Sample]:
    """Samples with what the policy prepares, and made-up advantages and returns for each token."""
    rng = np.random.default_rng(seed)
    done = []
    for sample, tokens in zip(samples, policy.precompute(samples), strict=True):
        made_up: dict[str, Any] = {}
        if "values" in tokens:
            made_up = {name: rng.normal(size=len(sample.mask)) for name in ("advantage", "returns")}
        done.append(changed(sample, **tokens, **made_up))
    return with_statistics(done, policy._config.algorithm)


def moved_policy(**trainer: Any) -> TransformersPolicy:
    """A float64 policy whose weights, and value head, are no longer those it started with."""
    policy = make_policy(torch.float64, **trainer)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for _, parameter in policy._parameters:
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(0.02 * noise)
    return policy


def all_taught(samples: list[Sample], term: TeacherTermConfig) -> list[Sample]:
    """Every third has no teacher, the others two teachers of different weight."""
    rng = np.random.default_rng(4)
    done = []
    for number, sample in enumerate(samples):
        if number % 3:
            logprobs_A = rng.normal(-3.0, 1.0, sample.num_trained).astype(np.float32)
            sample = taught(sample, logprobs_A, 0.5 * (number % 3), f"t{number % 3}")
        add_teacher(sample, term)
        done.append(sample)
    return done


@pytest.mark.parametrize("normalisation", ["sequence", "token", "constant", "sequence_sum"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_gradient_does_not_depend_on_the_split_or_the_order(name, normalisation):
    algorithm = ALGORITHMS[name] | {"normalisation": normalisation}
    policy = moved_policy(model=tiny_llama(seed=2, num_hidden_layers=1), algorithm=algorithm)
    samples = prepared(policy, make_samples(14))
    if "teacher" in algorithm:
        samples = all_taught(samples, TeacherTermConfig(**algorithm["teacher"]))
    rng = np.random.default_rng(0)
    by_chance = []
    for indices in np.array_split(rng.permutation(14), 5):
        by_chance.append(one_batch([samples[i] for i in indices]))
    splits = [[one_batch(samples)], form_micro_batches(samples, 40)[::-1], by_chance]
    results = []
    for split in splits:
        metrics = accumulate_all(policy, split)
        results.append((gradients_of(policy) / metrics.denominator, metrics))
        policy.zero()
    whole, whole_metrics = results[0]
    assert whole.norm() > 0
    assert (whole_metrics.teacher_tokens > 0) == (name == "teacher in the loss")
    for gradient, metrics in results[1:]:
        assert ((gradient - whole).norm() / whole.norm()).item() < 1e-6
        assert metrics.keys() == whole_metrics.keys()
        for name_of_sum in metrics.keys() - {"positions"}:  # padding is of the split
            assert metrics[name_of_sum] == pytest.approx(whole_metrics[name_of_sum]), name_of_sum


def test_a_sample_without_a_teacher_is_trained_bit_by_bit_as_without_any():
    plain = make_samples(3)
    logprobs_A = np.full(plain[0].num_trained, -1.0, np.float32)
    beside = [taught(plain[0], logprobs_A, 0.0), *plain[1:]]
    gradients = []
    for samples in (plain, beside):
        policy = make_policy(algorithm=ALGORITHMS["teacher in the loss"])
        accumulate_all(policy, [one_batch(samples)])
        gradients.append(gradients_of(policy))
    assert torch.equal(*gradients)


def test_the_entropy_bonus_has_the_gradient_of_the_entropy():
    samples = make_samples(5)
    plain = make_policy(torch.float64)
    bonus = make_policy(torch.float64, algorithm={"entropy_coefficient": 0.3})
    accumulate_all(plain, [one_batch(samples)])
    accumulate_all(bonus, [one_batch(samples)])
    model = tiny_llama().double()
    entropy = torch.zeros((), dtype=torch.float64)
    for sample in samples:
        ids = torch.tensor(np.concatenate([sample.prompt_ids, sample.completion_ids])).long()
        logprobs = model(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
        positions = len(sample.prompt_ids) - 1 + np.flatnonzero(sample.mask)
        entropy = entropy - (logprobs[positions].exp() * logprobs[positions]).sum()
    entropy.backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    difference = gradients_of(bonus) - gradients_of(plain)
    # The model's norms compute in float32, where gradients do not add up exactly.
    assert ((difference + 0.3 * expected).norm() / (0.3 * expected).norm()).item() < 1e-5


class TestReference:
    def logprobs(self, policy: TransformersPolicy, samples: list[Sample]) -> list[np.ndarray]:
        return [tokens["reference_logprobs"] for tokens in policy.precompute(samples)]

    def test_is_the_starting_model_and_stays_it_over_a_restart(self):
        samples = make_samples(6)
        policy = make_policy(algorithm=FROZEN, optimizer={"lr": 0.1})
        start = logprobs_of(policy, samples)
        for _ in range(3):
            train(policy, [one_batch(prepared(policy, samples))])
        assert not np.allclose(logprobs_of(policy, samples)[0], start[0], atol=1e-3)
        assert not any(name.startswith("reference.") for name in policy.state().tensors)
        resumed = make_policy(algorithm=FROZEN)
        load_state(resumed, policy.state())
        for each in (policy, resumed):
            assert_all_close(self.logprobs(each, samples), start, 0.0)
        assert resumed.digest() == policy.digest()

    @pytest.mark.parametrize("mini_batches", [1, 2])
    def test_an_updated_one_follows_every_so_many_steps_and_is_in_the_checkpoint(self, mini_batches):
        samples = make_samples(6)
        updated = {"reference": {"model": "updated", "every": 2}, "loss": "reinforce"}
        settings = {"algorithm": updated, "optimizer": {"lr": 0.1}, "mini_batches": mini_batches}
        policy = make_policy(**settings)
        start = self.logprobs(policy, samples)
        for _ in range(2 * mini_batches):
            assert_all_close(self.logprobs(policy, samples), start, 0.0)
            train(policy, [one_batch(prepared(policy, samples))])
        assert_all_close(self.logprobs(policy, samples), logprobs_of(policy, samples), 0.0)
        train(policy, [one_batch(prepared(policy, samples))])
        resumed = make_policy(**settings)
        load_state(resumed, policy.state())
        assert_all_close(self.logprobs(resumed, samples), self.logprobs(policy, samples), 0.0)

    def test_mixup_moves_it_part_of_the_way(self):
        updated = {"reference": {"model": "updated", "every": 1, "mixup": 0.25}}
        policy = make_policy(torch.float64, algorithm=updated, optimizer={"lr": 0.1})
        reference = option_of(policy, ReferenceModel)
        start = {name: tensor.clone() for name, tensor in reference.tensors().items()}
        train(policy, [one_batch(prepared(policy, make_samples(6)))])
        for name, parameter in policy._model.named_parameters():
            expected = 0.75 * start[name] + 0.25 * parameter.detach()
            torch.testing.assert_close(reference.tensors()[name], expected)

    def test_in_bfloat16_it_is_near(self):
        samples = make_samples(6)
        policy = make_policy(algorithm={"reference": {"model": "frozen", "dtype": "bfloat16"}})
        logprobs = self.logprobs(policy, samples)
        assert_all_close(logprobs, logprobs_of(make_policy(), samples), 0.2)
        assert {values.dtype for values in logprobs} == {np.dtype(np.float32)}

    def test_it_is_scored_at_the_sampling_temperature(self):
        samples = make_samples(6)
        policy = make_policy(algorithm=FROZEN, temperature=1.6)
        assert_all_close(self.logprobs(policy, samples), logprobs_of(policy, samples, 1.6), 0.0)


PPO: dict[str, Any] = {"advantage": "gae", "value": {"clip": None}}


def with_returns(policy: TransformersPolicy, samples: list[Sample], target: float) -> list[Sample]:
    values = [tokens["values"] for tokens in policy.precompute(samples)]
    size = [np.full(len(sample.mask), target) for sample in samples]
    return [
        changed(s, values=v, returns=r, advantage=0.0) for s, v, r in zip(samples, values, size, strict=True)
    ]


CRITIC: dict[str, Any] = {"advantage": "gae", "value": {"model": "own", "clip": None}}


def values_of(policy: TransformersPolicy, samples: list[Sample]) -> np.ndarray:
    return np.concatenate([tokens["values"] for tokens in policy.precompute(samples)])


@pytest.mark.parametrize("algorithm", [PPO, CRITIC], ids=["on the policy", "of its own"])
class TestValues:
    def test_start_at_zero_and_learn_the_returns(self, algorithm):
        samples = make_samples(8)
        policy = make_policy(algorithm=algorithm, optimizer={"lr": 0.02}, steps=60)
        start = logprobs_of(policy, samples)
        assert not values_of(policy, samples).any()
        for _ in range(60):
            train(policy, [one_batch(with_returns(policy, samples, 0.7))])
        np.testing.assert_allclose(values_of(policy, samples), 0.7, atol=0.15)
        if algorithm is CRITIC:
            np.testing.assert_array_equal(logprobs_of(policy, samples)[0], start[0])

    def test_their_gradient_is_that_of_the_loss_written_out(self, algorithm):
        samples = make_samples(5)
        policy = moved_policy(algorithm=algorithm)
        policy.accumulate(one_batch(with_returns(policy, samples, 0.7)))
        head = option_of(policy, ValueHead)
        gradient = gradients_of(policy).clone()
        model = head.model if algorithm is CRITIC else policy._model
        policy.zero()
        loss = torch.zeros((), dtype=torch.float64)
        for sample in samples:
            ids = torch.tensor(np.concatenate([sample.prompt_ids, sample.completion_ids])).long()
            hidden = model.model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
            positions = len(sample.prompt_ids) - 1 + np.flatnonzero(sample.mask)
            loss = loss + 0.5 * 0.5 * (head.layer(hidden[positions]).squeeze(-1) - 0.7).square().sum()
        loss.backward()
        expected = gradients_of(policy)
        assert expected.any()
        torch.testing.assert_close(gradient[-len(expected) :], expected, rtol=1e-7, atol=1e-9)
        assert not gradient[: -len(expected)].any(), "with advantages of 0 the policy has no gradient"

    def test_are_in_checkpoint_and_digest_and_not_in_exported_weights(self, algorithm):
        samples = make_samples(5)
        policy = make_policy(algorithm=algorithm)
        resumed = make_policy(algorithm=algorithm)
        for _ in range(2):
            train(policy, [one_batch(with_returns(policy, samples, 0.7))])
        before = policy.digest()
        load_state(resumed, policy.state())
        assert resumed.digest() == before != make_policy(algorithm=algorithm).digest()
        for each in (policy, resumed):
            train(each, [one_batch(with_returns(each, samples, 0.7))])
        assert resumed.digest() == policy.digest() != before
        np.testing.assert_array_equal(values_of(resumed, samples), values_of(policy, samples))
        exported = {name for name, _ in policy.named_parameters_for_export()}
        assert exported == {name for name, _ in make_policy().named_parameters_for_export()}
        with torch.no_grad():
            option_of(policy, ValueHead).layer.bias.add_(1.0)
        assert policy.digest() != resumed.digest()
        for unlike in (make_policy(), make_policy(algorithm=PPO if algorithm is CRITIC else CRITIC)):
            with pytest.raises(ConfigError, match="the value head"):
                load_state(unlike, policy.state())

    def test_are_those_of_the_held_weights(self, algorithm):
        samples = make_samples(5)
        policy = make_policy(algorithm=algorithm, optimizer={"lr": 0.1}, mini_batches=2)
        for _ in range(2):
            train(policy, [one_batch(with_returns(policy, samples, 0.7))])
        start = values_of(policy, samples)
        policy.hold_weights()
        train(policy, [one_batch(with_returns(policy, samples, 0.7))])
        after = policy.digest()
        np.testing.assert_array_equal(values_of(policy, samples), start)
        assert policy.digest() == after
        policy.release_weights()
        assert not np.array_equal(values_of(policy, samples), start)


class TestValueHead:
    def test_detached_it_leaves_the_policy_alone(self):
        policy = make_policy(algorithm=PPO | {"value": {"detach": True}})
        batch = with_returns(policy, make_samples(5), 0.7)
        policy.accumulate(one_batch(batch))
        assert all(not p.grad.any() for p in policy._model.parameters() if p.grad is not None)
        assert option_of(policy, ValueHead).layer.bias.grad.item() != 0

    def test_has_a_learning_rate_of_its_own(self):
        policy = make_policy(
            algorithm=PPO | {"value": {"lr": 0.5}}, optimizer={"lr": 0.1, "schedule": "linear"}, steps=2
        )
        samples = make_samples(5)
        for rate in (0.1, 0.05):
            assert train(policy, [one_batch(with_returns(policy, samples, 0.7))]).lr == pytest.approx(rate)
            rates = {round(group["lr"], 9) for group in policy._optimizer.param_groups}
            assert rates == {rate, 5 * rate}


class TestCritic:
    def test_its_gradients_are_bounded_by_themselves(self):
        """Far returns give the critic a large gradient; the policy's update is that without a critic."""
        samples = [changed(sample, advantage=1.0) for sample in make_samples(5)]
        options: dict[str, Any] = {"optimizer": {"lr": 0.1, "eps": 1.0, "max_grad_norm": 0.01}}
        alone = make_policy(**options)
        norm = train(alone, [one_batch(samples)]).grad_norm
        policy = make_policy(algorithm=CRITIC, **options)
        far = [changed(s, advantage=1.0) for s in with_returns(policy, samples, 1e4)]
        assert train(policy, [one_batch(far)]).grad_norm == pytest.approx(norm, rel=1e-6)
        for expected, actual in zip(alone._model.parameters(), policy._model.parameters(), strict=True):
            torch.testing.assert_close(expected, actual, rtol=1e-6, atol=1e-8)


def test_nothing_is_prepared_that_the_algorithm_has_no_use_for():
    (tokens,) = make_policy().precompute(make_samples(1))
    assert tokens == {}
    (tokens,) = make_policy(mini_batches=2).precompute(make_samples(1))
    assert tokens.keys() == {"proximal_logprobs"}


OF_ALL = {"loss", "forward/positions", "forward/row_tokens", "imitation/loss", "imitation/token_share"}


def shown(count: int, weight: float = 1.0) -> list[Sample]:
    return [
        changed(sample, key=(1_000_000_000 + number, 0), advantage=0.0, imitation=weight)
        for number, sample in enumerate(make_samples(count, seed=9))
    ]


def assert_alike(mine: torch.Tensor, expected: torch.Tensor) -> None:
    """Up to the norms of the model's layers, which it computes in float32."""
    assert ((mine - expected).norm() / expected.norm()).item() < 1e-6


def test_loss_and_gradient_are_those_of_cross_entropy():
    samples = shown(6, weight=0.5)
    model = tiny_llama().double()
    total = torch.zeros((), dtype=torch.float64)
    num_tokens = 0
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
    samples = shown(14)
    results = []
    for packing, split in ((True, 1000), (True, 40), (False, 1000), (False, 40)):
        policy = make_policy(torch.float64, packing=packing, micro_batch_tokens=split)
        accumulate_all(policy, form_micro_batches(samples, split))
        results.append(gradients_of(policy))
    for gradient in results[1:]:
        assert_alike(gradient, results[0])


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name != "gae"])
def test_beside_demonstrations_other_samples_are_trained_and_measured_as_without(name):
    """The gradient of both is the sum of either's; what is measured of sampled tokens is theirs alone."""
    algorithm = ALGORITHMS[name]
    model = tiny_llama(seed=2, num_hidden_layers=1)
    policy = moved_policy(model=model, algorithm=algorithm)
    samples = prepared(policy, make_samples(10))
    if "teacher" in algorithm:
        samples = all_taught(samples, TeacherTermConfig(**algorithm["teacher"]))
    parts = []
    demonstrations = shown(6, weight=0.3)
    together = [
        sample for pair in zip(samples[:6], demonstrations, strict=True) for sample in pair
    ] + samples[6:]
    for batch in (samples, demonstrations, together):
        policy.zero()
        sums = accumulate_all(policy, [one_batch(batch)])
        parts.append((gradients_of(policy), loss_metrics(sums)))
    (alone, numbers), (imitated, _), (both, measured) = parts
    apart = make_policy(torch.float64, model=model, micro_batch_tokens=16, algorithm=algorithm)
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
    samples = with_foreign(make_samples(6), experts=3)
    numbers = []
    for batch in (samples, [*shown(6), *samples]):
        router = {"router": {"balance": 0.1, "z": 0.1}}
        policy = make_policy(model=make_model("Mixtral"), replays_routes=True, algorithm=router)
        numbers.append(loss_metrics(accumulate_all(policy, [one_batch(batch)])))
    alone, beside = numbers
    for name in ("balance_loss", "z_loss"):
        assert beside[f"experts/{name}"] == pytest.approx(alone[f"experts/{name}"], rel=1e-4)
    for name in ("changed_tokens", "changed_layers", "logprob_gap_with", "logprob_gap_without"):
        assert beside[f"routes/{name}"] == pytest.approx(alone[f"routes/{name}"], rel=1e-4)

"""Two ranks train what one does: the same losses, gradients and weights, checkpoints that either reads."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from common.config import RunConfig
from common.errors import ConfigError
from services.trainer.groups.micro_batches import MicroBatch, form_micro_batches
from services.trainer.groups.samples import Sample
from services.trainer.policy.fsdp.rank_policy import load_rank_policy, split_samples
from services.trainer.policy.fsdp.ranks import lead_ranks
from services.trainer.policy.fsdp.shard_files import ShardReader, rows_of, write_shard
from services.trainer.policy.fsdp.sharded_policy import ShardedPolicy, decode_call, encode_call
from services.trainer.policy.policy import MicroBatchMetrics, Policy, PolicyState, UpdateResult
from services.trainer.policy.transformers_policy import load_policy
from tests.support.models import emptied, make_samples, masked, run_config, tiny_model

STEPS = 3


def config_of(folder: Path, num_ranks: int) -> RunConfig:
    """Two updates a step, a frozen reference: everything that ranks do together."""
    return run_config(
        folder,
        trainer={
            "num_ranks": num_ranks,
            "device": "cpu",
            "groups_per_step": 4,
            "mini_batches": 2,
            "optimizer": {"lr": 1e-2, "eps": 1e-3},
            "algorithm": {"reference": {"model": "frozen"}, "kl": {"place": "loss"}},
        },
    )


@contextmanager
def two_ranks(folder: Path) -> Iterator[ShardedPolicy]:
    """This process leads one follower."""
    config = config_of(folder, 2)
    ranks = lead_ranks(config.trainer)
    assert ranks is not None
    ranks.broadcast(config.model_dump_json().encode())
    policy = ShardedPolicy(load_rank_policy(config, ranks), ranks)
    try:
        yield policy
    finally:
        policy.close()


def batches_of(step: int) -> tuple[list[Sample], list[Sample]]:
    """Two mini-batches of unequal lengths, one with samples that carry no loss."""
    samples = make_samples(18, seed=step)
    return samples[:9], [*samples[9:], masked(samples[0]), emptied(samples[1])]


def train(policy: Policy, steps: range) -> list[Any]:
    """Steps of two updates, the second with logprobs of the weights at the start; every number it gave."""
    numbers: list[Any] = []
    for step in steps:
        first, second = batches_of(step)
        numbers.append(update(policy, prepared(policy, first, proximal=False)))
        policy.hold_weights()
        numbers.append(update(policy, prepared(policy, second)))
        policy.release_weights()
    return numbers


def prepared(policy: Policy, samples: list[Sample], proximal: bool = True) -> list[Sample]:
    tokens = policy.prepare(samples)
    return [
        replace(
            sample,
            reference_logprobs=item.reference_logprobs,
            proximal_logprobs=item.proximal_logprobs if proximal else None,
        )
        for sample, item in zip(samples, tokens, strict=True)
    ]


def update(policy: Policy, samples: list[Sample]) -> tuple[MicroBatchMetrics, UpdateResult]:
    sums = sum((policy.accumulate(b) for b in form_micro_batches(samples, 80)), MicroBatchMetrics())
    return sums, policy.update(sums.denominator)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One rank and two, over the same steps."""
    folder = tmp_path_factory.mktemp("ranks")
    model = tiny_model(folder / "model")
    alone = load_policy(config_of(model, 1))
    found: dict[str, Any] = {"folder": folder, "model": model, "alone": train(alone, range(STEPS))}
    found["logprobs_alone"] = alone.logprobs(make_samples(7))
    alone.save_weights(folder / "alone")
    alone.save_state(folder / "state_alone")
    found["digest_alone"] = alone.digest()
    alone_later = train(alone, range(STEPS, STEPS + 1))
    with two_ranks(model) as policy:
        found["start_digest"] = policy.digest()
        found["sharded"] = train(policy, range(STEPS))
        found["logprobs_sharded"] = policy.logprobs(make_samples(7))
        policy.save_weights(folder / "sharded")
        policy.save_state(folder / "state_sharded")
        found["digest"] = policy.digest()
        found["later"] = train(policy, range(STEPS, STEPS + 1))
        found["skipped"] = update(policy, [masked(sample) for sample in make_samples(3)])
        policy.load_state(folder / "state_sharded")
        found["digest_loaded"] = policy.digest()
        found["later_loaded"] = train(policy, range(STEPS, STEPS + 1))
        policy.load_state(folder / "state_alone")
        found["digest_of_one"] = policy.digest()
        found["later_of_one"] = train(policy, range(STEPS, STEPS + 1))
    found["alone_later"] = alone_later
    return found


def assert_alike(mine: list[Any], expected: list[Any]) -> None:
    for (sums, result), (other_sums, other_result) in zip(mine, expected, strict=True):
        for name, value in asdict(other_sums).items():
            assert asdict(sums)[name] == pytest.approx(value, rel=1e-5, abs=1e-5), name
        assert result.grad_norm == pytest.approx(other_result.grad_norm, rel=1e-5)
        assert result.lr == other_result.lr


def test_two_ranks_have_the_losses_and_gradients_of_one(outcome):
    assert_alike(outcome["sharded"], outcome["alone"])


def test_two_ranks_have_the_weights_and_logprobs_of_one(outcome):
    mine, expected = (
        load_file(outcome["folder"] / name / "model.safetensors") for name in ("sharded", "alone")
    )
    assert mine.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(mine[name], tensor, atol=1e-5, rtol=1e-5)
    for left, right in zip(outcome["logprobs_sharded"], outcome["logprobs_alone"], strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-5)
    assert outcome["start_digest"] == load_policy(config_of(outcome["model"], 1)).digest()


def test_a_checkpoint_of_two_ranks_continues_bit_by_bit(outcome):
    assert outcome["digest_loaded"] == outcome["digest"] != outcome["start_digest"]
    assert outcome["later_loaded"] == outcome["later"]


def test_one_rank_continues_from_the_checkpoint_of_two_and_two_from_that_of_one(outcome):
    alone = load_policy(config_of(outcome["model"], 1))
    alone.load_state(outcome["folder"] / "state_sharded")
    assert alone.digest() == outcome["digest"]
    assert_alike(train(alone, range(STEPS, STEPS + 1)), outcome["later"])
    assert outcome["digest_of_one"] == outcome["digest_alone"]
    assert_alike(outcome["later_of_one"], outcome["alone_later"])


def test_each_rank_writes_only_its_own_rows(outcome):
    files = (outcome["folder"] / "state_sharded").glob("*.safetensors")
    sizes = [path.stat().st_size for path in files]
    whole = (outcome["folder"] / "state_alone" / "policy.safetensors").stat().st_size
    assert len(sizes) == 2
    assert max(sizes) < 0.6 * whole


def test_a_mini_batch_without_a_trained_token_is_skipped_on_every_rank(outcome):
    assert outcome["skipped"][1].skipped


def test_shares_are_balanced_by_tokens_and_hold_every_sample_once():
    samples = make_samples(40)
    shares = split_samples(samples, 3)
    assert sorted(i for share in shares for i in share) == list(range(40))
    loads = [sum(samples[i].num_tokens for i in share) for share in shares]
    assert max(loads) - min(loads) <= max(sample.num_tokens for sample in samples)
    assert split_samples(samples[:1], 2) == [[0], []]


def test_a_call_arrives_as_it_was_sent():
    sample = replace(make_samples(1)[0], advantage=np.array([0.5] * len(make_samples(1)[0].mask)))
    name, (batch,) = decode_call(encode_call("accumulate", [MicroBatch((sample,))]))
    assert name == "accumulate"
    for item in fields(Sample):
        mine, theirs = getattr(batch.samples[0], item.name), getattr(sample, item.name)
        assert np.array_equal(mine, theirs) if isinstance(theirs, np.ndarray) else mine == theirs, item.name
    assert decode_call(encode_call("save_state", [Path("a/b")])) == ("save_state", [Path("a/b")])
    assert decode_call(encode_call("update", [2.5])) == ("update", [2.5])


@pytest.mark.parametrize("num_rows", [1, 2, 5, 6])
@pytest.mark.parametrize("num_writers", [1, 2, 3])
def test_rows_written_by_some_ranks_are_read_by_any_number(tmp_path, num_rows, num_writers):
    whole = torch.arange(num_rows * 2.0).reshape(num_rows, 2)
    for rank in range(num_writers):
        start, stop = rows_of(num_rows, rank, num_writers)
        write_shard(tmp_path, rank, num_writers, {"a": whole[start:stop].contiguous()}, {"a": num_rows})
    reader = ShardReader(tmp_path)
    assert torch.equal(reader.read("a"), whole)
    for size in (1, 2, 4):
        parts = [reader.read("a", *rows_of(num_rows, rank, size)) for rank in range(size)]
        assert torch.equal(torch.cat(parts), whole)


def test_a_folder_without_a_state_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="holds no state"):
        PolicyState.read(tmp_path)
    with pytest.raises(ConfigError, match="holds no state"):
        ShardReader(tmp_path)


def test_another_number_of_ranks_than_torchrun_started_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match=r"torchrun started 4 ranks, trainer\.num_ranks is 2"):
        lead_ranks(config_of(Path("x"), 2).trainer)

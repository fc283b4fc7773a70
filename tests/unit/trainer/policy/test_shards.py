"""What ranks send each other and write: shares of a batch, calls, rows of a checkpoint."""

import os
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.models import make_samples, run_config
from tidemill.common.errors import ConfigError
from tidemill.services.trainer.durable.checkpoint import CheckpointStore, TrainerState
from tidemill.services.trainer.groups.samples import MicroBatch, Sample
from tidemill.services.trainer.policy.fsdp.rank_policy import split_samples
from tidemill.services.trainer.policy.fsdp.ranks import lead_ranks
from tidemill.services.trainer.policy.fsdp.sharded_policy import decode_call, encode_call
from tidemill.services.trainer.policy.state import PolicyState, Shard, ShardReader, rows_of


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
    assert decode_call(encode_call("save_state", [Path("a/b")])) == ("save_state", (Path("a/b"),))
    assert decode_call(encode_call("update", [2.5])) == ("update", (2.5,))


@pytest.mark.parametrize("num_rows", [1, 2, 5, 6])
@pytest.mark.parametrize("num_writers", [1, 2, 3])
def test_rows_written_by_some_ranks_are_read_by_any_number(tmp_path, num_rows, num_writers):
    whole = torch.arange(num_rows * 2.0).reshape(num_rows, 2)
    for rank in range(num_writers):
        start, stop = rows_of(num_rows, rank, num_writers)
        shard = Shard(rank, num_writers, {"a": num_rows})
        PolicyState({"a": whole[start:stop]}, shard=shard).write(tmp_path)
    reader = ShardReader(tmp_path)
    assert torch.equal(reader.read("a"), whole)
    for size in (1, 2, 4):
        parts = [reader.read("a", *rows_of(num_rows, rank, size)) for rank in range(size)]
        assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: os.truncate(path, path.stat().st_size - 1)])
def test_a_checkpoint_that_lacks_a_byte_of_one_rank_is_passed_over(tmp_path, damage):
    def write(folder: Path) -> None:
        for rank in range(2):
            shard = Shard(rank, 2, {"a": 4})
            PolicyState({"a": torch.ones(2, 3)}, {"updates": 1} if rank == 0 else {}, shard).write(folder)

    store = CheckpointStore(tmp_path, keep=2)
    first, second = (store.save(TrainerState(version=version), write) for version in (1, 2))
    assert store.load_latest().folder == second
    damage(second / "policy-00001-of-00002.safetensors")
    assert store.load_latest().folder == first


def test_a_folder_without_a_state_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="holds no state"):
        ShardReader(tmp_path)


def test_another_number_of_ranks_than_torchrun_started_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match=r"torchrun started 4 ranks, trainer\.num_ranks is 2"):
        lead_ranks(run_config(Path("x"), trainer={"num_ranks": 2, "device": "cpu"}).trainer)

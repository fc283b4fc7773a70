"""Ranks write their shards: the versions, deltas and digests are those of one rank."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.models import make_samples, run_config, save_weights, tiny_model
from tidemill.common.config import RunConfig
from tidemill.common.run.weight_files import read_chain, verified_files
from tidemill.common.weights.bits import read_safetensors
from tidemill.common.weights.delta import check_whole, write_whole
from tidemill.services.trainer.groups.samples import MicroBatch, form_micro_batches
from tidemill.services.trainer.policy.fsdp.rank_policy import load_rank_policy
from tidemill.services.trainer.policy.fsdp.ranks import lead_ranks
from tidemill.services.trainer.policy.fsdp.sharded_policy import ShardedPolicy
from tidemill.services.trainer.policy.transformers_policy import load_policy
from tidemill.services.trainer.weights.store import WeightStore

LORA = {"lora": {"rank": 4}, "optimizer": {"lr": 1e-2}, "algorithm": {"reference": {"model": "frozen"}}}


def config_of(folder: Path, num_ranks: int, **options: Any) -> RunConfig:
    trainer = {"num_ranks": num_ranks, "device": "cpu", "optimizer": {"lr": 1e-4}} | options
    config = run_config(folder, trainer=trainer)
    model = config.model.model_copy(update={"dtype": "bfloat16"})
    weights = config.weights.model_copy(update={"max_share_changed": 1.0})
    return config.model_copy(update={"model": model, "weights": weights})


def values(paths: list[Path]) -> dict[object, list[int]]:
    return {info: bits.tolist() for path in paths for info, bits in read_safetensors(path)}


@pytest.mark.parametrize(("num_ranks", "options"), [(3, {}), (4, LORA)], ids=["unequal shards", "adapters"])
def test_ranks_write_what_one_writes(tmp_path: Path, num_ranks: int, options: dict[str, Any]) -> None:
    model = tiny_model(tmp_path / "model")
    alone = load_policy(config_of(model, 1, **options))
    start, full = alone.digest(), save_weights(alone, tmp_path / "start")
    for batch in form_micro_batches(make_samples(6), 1000):
        alone.accumulate(batch)
    alone.update(6.0)
    alone.save_state(tmp_path / "state")
    trained = save_weights(alone, tmp_path / "trained")
    config = config_of(model, num_ranks, **options)
    ranks = lead_ranks(config.trainer)
    assert ranks is not None
    ranks.broadcast(config.model_dump_json().encode())
    policy = ShardedPolicy(load_rank_policy(config, ranks), ranks)
    run = tmp_path / "run"
    try:
        store = WeightStore(run, config.weights)
        first = store.write(0, policy)
        policy.load_state(tmp_path / "state")
        second = store.write(1, policy)
        assert policy.digest() == alone.digest() and policy.digest().startswith(second.digest)
        for one in (alone, policy):
            one.accumulate(MicroBatch(tuple(make_samples(6, seed=1))))
        assert policy.update(6.0).grad_norm == pytest.approx(alone.update(6.0).grad_norm, rel=0.02)
    finally:
        policy.close()
    assert start.startswith(first.digest) and values(verified_files(run, first)) == values([full])
    assert second.is_delta and len(second.files) == num_ranks
    base, *deltas = [verified_files(run, part) for part in read_chain(run, second)]
    (tmp_path / "whole").mkdir()
    paths = write_whole(base, deltas, tmp_path / "whole")
    check_whole(paths, second)
    assert values(paths) == values([trained])
    for version in (first, second):
        folder = run / "weights" / version.folder / "adapter"
        assert (folder / "adapter_model.safetensors").exists() is bool(options)

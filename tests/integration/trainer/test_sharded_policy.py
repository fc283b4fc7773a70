"""Ranks that rank 0 has started train and write what one does, seen as a policy like any other."""

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.models import make_samples, masked, run_config, save_state, save_weights, tiny_model
from tests.support.rank_runs import STEPS, Numbers, train, update
from tests.support.versions import write_version
from tidemill.common.config import RunConfig
from tidemill.common.files import StorageError
from tidemill.common.run.weight_files import read_chain, verified_files
from tidemill.common.weights.bits import read_safetensors
from tidemill.common.weights.delta import check_whole, write_whole
from tidemill.services.trainer.groups.bins import form_micro_batches
from tidemill.services.trainer.groups.micro_batch import MicroBatch
from tidemill.services.trainer.policy.loading import open_policy
from tidemill.services.trainer.weights.store import WeightStore


def training_config(folder: Path, num_ranks: int) -> RunConfig:
    """Two updates a step, a frozen reference, statistics of a mini-batch, coefficients that move: everything
    that ranks do together. With a smaller `eps`, Adam divides by so little that the rounding of float32 grows
    tenfold from update to update, differently on each CPU."""
    algorithm = {
        "reference": {"model": "frozen"}, "kl": {"place": "loss", "coefficient": 0.1},
        "kl_control": {"target": 0.01, "horizon": 20.0}, "entropy_control": {"target": 9.0, "delta": 0.05},
        "top_entropy_quantile": 0.8, "importance": {"normalise": True},
        "rejection": {"bounds": {"seq_mean_k3": 20.0}, "denominator": "kept"},
    }  # fmt: skip
    trainer = {
        "num_ranks": num_ranks, "device": "cpu", "groups_per_step": 4, "mini_batches": 2,
        "optimizer": {"lr": 1e-2, "eps": 1e-2}, "algorithm": algorithm,
    }  # fmt: skip
    return run_config(folder, trainer=trainer)


def assert_alike(mine: Numbers, expected: Numbers) -> None:
    """Sums and norms to 1e-5."""
    for (sums, result), (other_sums, other_result) in zip(mine, expected, strict=True):
        for name, value in other_sums.items():
            if name == "positions":  # what ranks share differs
                continue
            assert sums[name] == pytest.approx(value, rel=1e-5, abs=1e-5), name
        assert result.grad_norm == pytest.approx(other_result.grad_norm, rel=1e-5)
        assert result.lr == other_result.lr


def test_two_ranks_train_continue_and_skip_as_one_does(tmp_path):
    model = tiny_model(tmp_path / "model")
    samples = make_samples(7)
    later = range(STEPS, STEPS + 1)
    alone = open_policy(training_config(model, 1))
    config = training_config(model, 2)
    start = alone.digest()
    expected = train(alone, config.trainer, range(STEPS))
    save_state(alone, tmp_path / "one")
    ranks: Any = open_policy(config)
    with closing(ranks) as policy:
        assert policy.digest() == start
        assert_alike(train(policy, config.trainer, range(STEPS)), expected)
        for ours, right in zip(policy.precompute(samples), alone.precompute(samples), strict=True):
            assert ours.keys() == right.keys() >= {"proximal_logprobs", "reference_logprobs", "entropies"}
            for name, values in right.items():
                np.testing.assert_allclose(ours[name], values, rtol=1e-5, atol=1e-5)
        # Losses of both ranks are in the sums that are compared above.
        assert policy.coefficients() == alone.coefficients()
        assert policy.coefficients().kl == pytest.approx(0.1 * 1.2**STEPS)
        assert policy.coefficients().entropy == pytest.approx(0.05 * STEPS)
        save_state(policy, tmp_path / "two")
        trained = policy.digest()
        numbers = train(policy, config.trainer, later)
        assert update(policy, [masked(sample) for sample in samples])[1].skipped, "on every rank"
        policy.load_state(tmp_path / "two")
        assert policy.digest() == trained != start
        assert train(policy, config.trainer, later) == numbers, "bit by bit"
        policy.load_state(tmp_path / "one")
        assert policy.digest() == alone.digest()
    whole = (tmp_path / "one" / "policy.safetensors").stat().st_size
    sizes = [path.stat().st_size for path in (tmp_path / "two").glob("*.safetensors")]
    assert len(sizes) == 2 and max(sizes) < 0.6 * whole, "each rank writes its own rows alone"


LORA = {"lora": {"rank": 4}, "optimizer": {"lr": 1e-2}, "algorithm": {"reference": {"model": "frozen"}}}


def writing_config(folder: Path, num_ranks: int, **options: Any) -> RunConfig:
    trainer = {"num_ranks": num_ranks, "device": "cpu", "optimizer": {"lr": 1e-4}} | options
    config = run_config(folder, trainer=trainer)
    model = config.model.model_copy(update={"dtype": "bfloat16"})
    weights = config.weights.model_copy(update={"max_share_changed": 1.0})
    return config.model_copy(update={"model": model, "weights": weights})


def values(paths: list[Path]) -> dict[object, list[int]]:
    return {info: bits.tolist() for path in paths for info, bits in read_safetensors(path)}


@pytest.mark.parametrize(("num_ranks", "options"), [(3, {}), (4, LORA)], ids=["unequal shards", "adapters"])
def test_ranks_write_what_one_writes(tmp_path, num_ranks, options):
    model = tiny_model(tmp_path / "model")
    alone = open_policy(writing_config(model, 1, **options))
    start = alone.digest()
    full = save_weights(alone, tmp_path / "start")
    for batch in form_micro_batches(make_samples(6), 1000):
        alone.accumulate(batch)
    alone.update(6.0)
    save_state(alone, tmp_path / "state")
    trained = save_weights(alone, tmp_path / "trained")
    config = writing_config(model, num_ranks, **options)
    run = tmp_path / "run"
    ranks: Any = open_policy(config)
    with closing(ranks) as policy:
        store = WeightStore(run, config.weights)
        first = write_version(store, 0, policy)
        policy.load_state(tmp_path / "state")
        second = write_version(store, 1, policy)
        assert policy.digest() == alone.digest() and policy.digest().startswith(second.digest)
        for policy_to_train in (alone, policy):
            policy_to_train.accumulate(MicroBatch(tuple(make_samples(6, seed=1))))
        assert policy.update(6.0).grad_norm == pytest.approx(alone.update(6.0).grad_norm, rel=0.02)
    assert start.startswith(first.digest) and values(verified_files(run, first)) == values([full])
    assert second.is_delta and len(second.files) == num_ranks
    chain = [verified_files(run, link) for link in read_chain(run, second)]
    base, *deltas = chain
    (tmp_path / "whole").mkdir()
    paths = write_whole(base, deltas, tmp_path / "whole")
    check_whole(paths, second)
    assert values(paths) == values([trained])
    for version in (first, second):
        folder = run / "weights" / version.folder / "adapter"
        assert (folder / "adapter_model.safetensors").exists() is bool(options)


def test_where_a_disk_takes_no_adapters_all_ranks_write_the_version_again(tmp_path):
    ranks: Any = open_policy(writing_config(tiny_model(tmp_path / "model"), 2, **LORA))
    with closing(ranks) as policy:
        policy.compare_weights()
        full = tmp_path / "full"
        full.mkdir()
        (full / "adapter").touch()  # no folder can be made here
        written = policy.begin_writing(full, 0, -1)
        with pytest.raises(StorageError, match="rank 0"):
            written.result()
        manifest = write_version(WeightStore(tmp_path / "run"), 0, policy)
    check_whole(verified_files(tmp_path / "run", manifest), manifest)

"""Two ranks that rank 0 has started train what one does, seen as a policy like any other."""

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from tests.support.models import make_samples, masked, run_config, tiny_model
from tests.support.rank_runs import STEPS, Numbers, train, update
from tidemill.common.config import RunConfig
from tidemill.services.trainer.policy.fsdp.rank_policy import load_rank_policy
from tidemill.services.trainer.policy.fsdp.ranks import lead_ranks
from tidemill.services.trainer.policy.fsdp.sharded_policy import ShardedPolicy
from tidemill.services.trainer.policy.transformers_policy import load_policy


def config_of(folder: Path, num_ranks: int) -> RunConfig:
    """Two updates a step, a frozen reference, statistics of a mini-batch, coefficients that move: everything
    that ranks do together."""
    return run_config(
        folder,
        trainer={
            "num_ranks": num_ranks,
            "device": "cpu",
            "groups_per_step": 4,
            "mini_batches": 2,
            "optimizer": {"lr": 1e-2, "eps": 1e-3},
            "algorithm": {
                "reference": {"model": "frozen"},
                "kl": {"place": "loss", "coefficient": 0.1},
                "kl_control": {"target": 0.01, "horizon": 20.0},
                "entropy_control": {"target": 9.0, "delta": 0.05},
                "top_entropy_quantile": 0.8,
                "importance": {"normalise": True},
                "rejection": {"bounds": {"seq_mean_k3": 20.0}, "denominator": "kept"},
            },
        },
    )


def assert_alike(mine: Numbers, expected: Numbers) -> None:
    for (sums, result), (other_sums, other_result) in zip(mine, expected, strict=True):
        for name, value in asdict(other_sums).items():
            assert asdict(sums)[name] == pytest.approx(value, rel=1e-5, abs=1e-5), name
        assert result.grad_norm == pytest.approx(other_result.grad_norm, rel=1e-5)
        assert result.lr == other_result.lr


def test_two_ranks_train_continue_and_skip_as_one_does(tmp_path: Path) -> None:
    model, samples, later = tiny_model(tmp_path / "model"), make_samples(7), range(STEPS, STEPS + 1)
    alone, config = load_policy(config_of(model, 1)), config_of(model, 2)
    start, expected = alone.digest(), train(alone, config.trainer, range(STEPS))
    alone.save_state(tmp_path / "one")
    ranks = lead_ranks(config.trainer)
    assert ranks is not None
    ranks.broadcast(config.model_dump_json().encode())
    policy = ShardedPolicy(load_rank_policy(config, ranks), ranks)
    try:
        assert policy.digest() == start
        assert_alike(train(policy, config.trainer, range(STEPS)), expected)
        for left, right in zip(policy.logprobs(samples), alone.logprobs(samples), strict=True):
            np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-5)
        # Losses of both ranks are in the sums that are compared above.
        assert policy.coefficients() == alone.coefficients()
        assert policy.coefficients().kl == pytest.approx(0.1 * 1.2**STEPS)
        assert policy.coefficients().entropy == pytest.approx(0.05 * STEPS)
        policy.save_state(tmp_path / "two")
        trained, numbers = policy.digest(), train(policy, config.trainer, later)
        assert update(policy, [masked(sample) for sample in samples])[1].skipped, "on every rank"
        policy.load_state(tmp_path / "two")
        assert policy.digest() == trained != start
        assert train(policy, config.trainer, later) == numbers, "bit by bit"
        policy.load_state(tmp_path / "one")
        assert policy.digest() == alone.digest()
    finally:
        policy.close()
    whole = (tmp_path / "one" / "policy.safetensors").stat().st_size
    sizes = [path.stat().st_size for path in (tmp_path / "two").glob("*.safetensors")]
    assert len(sizes) == 2 and max(sizes) < 0.6 * whole, "each rank writes its own rows alone"

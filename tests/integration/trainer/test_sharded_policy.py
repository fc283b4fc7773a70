"""Two ranks train what one does: the same losses, gradients and weights, checkpoints that either reads."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.support import rank_runs
from tests.support.models import make_samples, masked, run_config, tiny_model
from tests.support.rank_runs import STEPS, Numbers, update
from tidemill.common.config import RunConfig
from tidemill.services.trainer.policy.fsdp.rank_policy import load_rank_policy
from tidemill.services.trainer.policy.fsdp.ranks import lead_ranks
from tidemill.services.trainer.policy.fsdp.sharded_policy import ShardedPolicy
from tidemill.services.trainer.policy.policy import Policy
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


def train(policy: Policy, steps: range) -> Numbers:
    return rank_runs.train(policy, config_of(Path("model"), 1).trainer, steps)


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
    found["coefficients_alone"] = alone.coefficients()
    alone_later = train(alone, range(STEPS, STEPS + 1))
    with two_ranks(model) as policy:
        found["start_digest"] = policy.digest()
        found["sharded"] = train(policy, range(STEPS))
        found["logprobs_sharded"] = policy.logprobs(make_samples(7))
        policy.save_weights(folder / "sharded")
        policy.save_state(folder / "state_sharded")
        found["digest"] = policy.digest()
        found["coefficients"] = policy.coefficients()
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


def test_coefficients_move_alike_on_all_ranks(outcome):
    """Losses of both ranks are in the sums that are compared above."""
    assert outcome["coefficients"] == outcome["coefficients_alone"]
    assert outcome["coefficients"].kl == pytest.approx(0.1 * 1.2**STEPS)
    assert outcome["coefficients"].entropy == pytest.approx(0.05 * STEPS)


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

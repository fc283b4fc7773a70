"""Processes that train one float64 model together, each forked from the test's process."""

import gc
import multiprocessing
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.support.losses import with_statistics
from tests.support.models import MAX_COMPLETION, emptied, make_relatives, masked, with_masks
from tests.support.samples import changed
from tests.support.sessions import session_samples
from tidemill.common.config.trainer import TrainerConfig
from tidemill.services.trainer.algorithm.losses.sums import EXPERTS, Sums
from tidemill.services.trainer.groups.bins import form_micro_batches
from tidemill.services.trainer.groups.micro_batch import MicroBatch
from tidemill.services.trainer.groups.sample import Sample
from tidemill.services.trainer.policy.fsdp.rank_policy import RankPolicy
from tidemill.services.trainer.policy.fsdp.ranks import Ranks, join_ranks
from tidemill.services.trainer.policy.policy import UpdateResult
from tidemill.services.trainer.policy.transformers_policy import TransformersPolicy
from tidemill.services.trainer.weights.peers import pack, unpack
from tidemill.services.trainer.weights.store import whole_tensor

STEPS = 3
TIMEOUT_S = 300.0
FIELDS: dict[str, Any] = {"groups_per_step": 4, "mini_batches": 2, "optimizer": {"lr": 1e-2, "eps": 1e-3}}

Numbers = list[tuple[Sums, UpdateResult]]


def batches_of(step: int) -> tuple[list[Sample], list[Sample]]:
    """Two mini-batches of unequal lengths, one with samples that carry no loss, both with sessions and with
    sampling masks."""
    samples = with_masks(make_relatives(18, seed=step), seed=step)
    sessions = with_masks(session_samples(6, seed=step), seed=step)
    return [*samples[:9], *sessions[:3]], [
        *samples[9:],
        *sessions[3:],
        masked(samples[0]),
        emptied(samples[1]),
    ]


def train(policy: Any, config: TrainerConfig, steps: range) -> Numbers:
    """Steps of two updates, the second with logprobs of the weights at the start; every number it gave."""
    numbers: Numbers = []
    for step in steps:
        first, second = batches_of(step)
        policy.hold_weights()
        numbers.append(update(policy, prepared(policy, config, first, proximal=False)))
        numbers.append(update(policy, prepared(policy, config, second)))
        policy.release_weights()
        policy.adapt(0.5, 3.0, 20.0)
    return numbers


def prepared(
    policy: Any, config: TrainerConfig, samples: list[Sample], proximal: bool = True
) -> list[Sample]:
    """The samples with what the policy precomputes; returns are the values plus 0.5."""
    done = []
    precomputed = policy.precompute(samples)
    if isinstance(policy, RankPolicy):  # rank 0 has it
        precomputed = unpack(policy._ranks.broadcast(pack(precomputed)))
    for sample, columns in zip(samples, precomputed, strict=True):
        kept = {name: values for name, values in columns.items() if proximal or name != "proximal_logprobs"}
        returns = {"returns": columns["values"] + 0.5} if "values" in columns else {}
        done.append(changed(sample, **kept, **returns))
    return with_statistics(done, config.algorithm)


def update(policy: Any, samples: list[Sample]) -> tuple[Sums, UpdateResult]:
    """One optimizer update over micro-batches of 80 tokens."""
    sums = sum((policy.accumulate(b) for b in form_micro_batches(samples, 80)), Sums())
    return sums, policy.update(sums.denominator)


def policy_on(
    ranks: Ranks | None, model: PreTrainedModel, config: TrainerConfig, **options: Any
) -> TransformersPolicy:
    """One process's policy in float64, or that of one of these ranks, laid out as the config says; the model
    gets its adapters."""
    settings = {"dtype": torch.float64, "temperature": 1.6, "max_completion_tokens": MAX_COMPLETION} | options
    if ranks is None:
        return TransformersPolicy(model, config, **settings)
    ranks.lay_out(config.shard_ranks, config.context_size, config.expert_size)
    return RankPolicy(model, config, ranks, **settings)


def gradient_of(policy: TransformersPolicy, batches: Iterable[MicroBatch] = ()) -> Tensor:
    """Gradient of these micro-batches and those before, as one vector."""
    for batch in batches:
        policy.accumulate(batch)
    if isinstance(policy, RankPolicy):
        policy._sum_held_gradients()
    gradients = [weight.grad for _, weight in policy._parameters if weight.grad is not None]
    return torch.cat([whole_tensor(gradient).flatten() for gradient in gradients])


def outcome_of(policy: TransformersPolicy, config: TrainerConfig) -> dict[str, Any]:
    """Three steps: every number, the digest before and the weights after them."""
    digest = policy.digest()
    numbers = train(policy, config, range(STEPS))
    weights = {name: whole_tensor(weight.detach()).clone() for name, weight in policy._parameters}
    return {"numbers": numbers, "weights": weights, "digest": digest}


def train_alone(model: PreTrainedModel, config: TrainerConfig) -> dict[str, Any]:
    """The outcome of training in one process."""
    return outcome_of(policy_on(None, model, config), config)


def on_ranks(size: int, work: Callable[[Ranks], Any], folder: Path) -> Any:
    """Run `work` on `size` processes that are forked from this one; returns its result on rank 0."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("fork")
    result = folder / f"rank-0-of-{size}-{port}.pt"
    arguments = [(rank, size, port, work, result) for rank in range(size)]
    processes = [context.Process(target=_run_rank, args=rank_arguments) for rank_arguments in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join(TIMEOUT_S)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [0] * size, f"exit codes of the ranks: {codes}"
    return torch.load(result, weights_only=False)


def _run_rank(rank: int, size: int, port: int, work: Callable[[Ranks], Any], result: Path) -> None:
    # What earlier tests left is never freed here: a group of ranks would wait for its threads, which a fork
    # does not have.
    gc.freeze()
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = join_ranks(address | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)})
    outcome = work(ranks)
    if ranks.is_leader:
        torch.save(outcome, result)
    ranks.close()


def train_cases(
    ranks: Ranks, cases: Sequence[tuple[str, PreTrainedModel, TrainerConfig]]
) -> dict[str, dict[str, Any]]:
    """The outcome of each case, one after the other in the same processes."""
    return {name: outcome_of(policy_on(ranks, model, config), config) for name, model, config in cases}


@contextmanager
def never_in_float32() -> Iterator[None]:
    """Keep float64 tensors from being cast to float32."""
    before = {name: getattr(Tensor, name) for name in ("to", "type", "float")}

    def keeping(change: Any) -> Any:
        def changed(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            wanted = [argument for argument in (*args, *kwargs.values()) if isinstance(argument, torch.dtype)]
            narrows = torch.float32 in wanted or change is before["float"]
            return self if self.dtype == torch.float64 and narrows else change(self, *args, **kwargs)

        return changed

    for name, change in before.items():
        setattr(Tensor, name, keeping(change))
    try:
        yield
    finally:
        for name, change in before.items():
            setattr(Tensor, name, change)


def assert_same_outcome(mine: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-12) -> None:
    for (sums, result), (other_sums, other_result) in zip(mine["numbers"], expected["numbers"], strict=True):
        assert sums.expert_counts == other_sums.expert_counts
        rank_sums = {name: value for name, value in sums.items() if not name.startswith(EXPERTS)}
        expected_sums = {name: value for name, value in other_sums.items() if not name.startswith(EXPERTS)}
        assert (rank_sums.pop("positions") > 0) == (
            expected_sums.pop("positions") > 0
        )  # what ranks share differs
        assert rank_sums == pytest.approx(expected_sums, rel=tolerance, abs=tolerance)
        assert result.grad_norm == pytest.approx(other_result.grad_norm, rel=tolerance)
        assert (result.lr, result.skipped) == (other_result.lr, False)
    assert mine["digest"] == expected["digest"]
    assert mine["weights"].keys() == expected["weights"].keys()
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(mine["weights"][name], weight, rtol=tolerance, atol=tolerance, msg=name)

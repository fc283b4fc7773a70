"""Losses, gradients and weights do not depend on the number of ranks: in float64, to 1e-12.

In bfloat16 one rank and several round in the same places, so that they are much nearer to each other than
either is to float32.
"""

import copy
from collections.abc import Iterable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from tests.support.architectures import make_model
from tests.support.models import logprobs_of, make_relatives, make_samples, masked, tiny_llama
from tests.support.rank_runs import (
    FIELDS,
    assert_same_outcome,
    gradient_of,
    on_ranks,
    policy_on,
    train_alone,
    train_cases,
    update,
)
from tests.support.samples import changed
from tidemill.common.config.trainer import TrainerConfig
from tidemill.services.trainer.groups.micro_batch import MicroBatch
from tidemill.services.trainer.policy.compiling import compile_model
from tidemill.services.trainer.policy.fsdp.ranks import Ranks
from tidemill.services.trainer.policy.usage import Usage, count_flops
from tidemill.services.trainer.weights.peers import pack, unpack

SUMS: dict[str, Any] = {
    "kl": {"place": "loss", "coefficient": 0.1},
    "kl_control": {"target": 0.01, "horizon": 20.0},
    "importance": {"normalise": True},
    "rejection": {"bounds": {"seq_mean_k3": 20.0}, "denominator": "kept"},
}
HEAD: dict[str, Any] = {"advantage": "gae"}
OPTIONS: dict[str, dict[str, Any]] = {
    "all sums": {"algorithm": {"reference": {"model": "frozen"}, **SUMS}},
    "a sum with every micro-batch": {"sum_gradients": "micro_batch"},
    "updated reference": {"algorithm": {"kl": {"place": "loss", "coefficient": 0.1},
        "reference": {"model": "updated", "every": 1}}},
    "value head": {"algorithm": HEAD},
    "critic": {"algorithm": HEAD | {"value": {"model": "own"}}},
    "adapters": {"lora": {"rank": 3, "alpha": 12}, "algorithm": HEAD | {"reference": {"model": "frozen"},
        "kl": SUMS["kl"]}},
    # Without trees: where rows meet in a token, its norms in float32 round the sum of their gradients.
    "routers": {"algorithm": {"router": {"balance": 0.1, "z": 0.01}}, "gradient_checkpointing": True,
        "packing": False},
    "compiled": {},
}  # fmt: skip
OF_FOUR: dict[str, dict[str, Any]] = {
    "all sums": {},
    "value head": {},
    "adapters": {},
    "routers": {"packing": False},
    "two copies": {"shard_ranks": 2},
}


@cache
def model_of(name: str) -> PreTrainedModel:
    """Norms of most models compute in float32, whatever their weights; those of GPT-NeoX do not."""
    if name == "routers":
        return make_model("Mixtral", experts_implementation="eager").double()
    model = make_model("GPTNeoX", num_hidden_layers=1 if name == "compiled" else 2).double()
    if name == "compiled":
        assert compile_model(model, backend="eager")
    return model


def config_of(name: str, **more: Any) -> TrainerConfig:
    return TrainerConfig.model_validate(FIELDS | OPTIONS.get(name, {}) | more)


@cache
def alone(name: str) -> dict[str, Any]:
    return train_alone(copy.deepcopy(model_of(name)), config_of(name))


@pytest.fixture(scope="module")
def of_two(tmp_path_factory):
    cases = [(name, model_of(name), config_of(name, num_ranks=2)) for name in OPTIONS]
    return on_ranks(2, partial(train_cases, cases=cases), tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def of_four(tmp_path_factory):
    cases = [(name, model_of(name), config_of(name, num_ranks=4, **more)) for name, more in OF_FOUR.items()]
    return on_ranks(4, partial(train_cases, cases=cases), tmp_path_factory.mktemp("four"))


@pytest.mark.parametrize("name", OPTIONS)
def test_two_ranks_are_one(name, of_two):
    assert_same_outcome(of_two[name], alone(name))


@pytest.mark.parametrize("name", OF_FOUR)
def test_four_ranks_are_one(name, of_four):
    assert_same_outcome(of_four[name], alone(name))


def train_and_mask(ranks: Ranks | None, model: PreTrainedModel) -> list[bool]:
    """Whether an update was skipped: of some samples, and then of the same without a token to train on."""
    config = config_of("", num_ranks=ranks.size if ranks else 1, algorithm={"normalisation": "sequence"})
    policy = policy_on(ranks, model, config)
    samples = make_samples(8)
    return [update(policy, batch)[1].skipped for batch in (samples, list(map(masked, samples)))]


def test_ranks_without_any_token_skip_the_update_as_one_does(tmp_path):
    model = tiny_llama().double()
    alone = train_and_mask(None, copy.deepcopy(model))
    assert on_ranks(2, partial(train_and_mask, model=model), tmp_path) == alone == [False, True]


def count_collectives(ranks: Ranks, model: PreTrainedModel) -> list[tuple[str, str]]:
    """Operation and dtype of every collective of an update with several micro-batches, in bfloat16."""
    config = TrainerConfig.model_validate(FIELDS | {"num_ranks": 2})
    policy = policy_on(ranks, model, config, dtype=torch.bfloat16)
    update(policy, make_samples(12))
    mode = Collectives()
    with mode:
        update(policy, make_samples(12))
    return mode.seen


class Collectives(TorchDispatchMode):
    """Notes what was reduced and gathered, and in which dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, str]] = []
        self.num_bytes: list[int] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "c10d" in str(function):
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            self.seen.append((str(function), str(tensors[0].dtype) if tensors else ""))
            self.num_bytes += [tensor.nbytes for tensor in tensors]
        return function(*args, **(kwargs or {}))


def test_gradients_are_reduced_once_an_update_and_weights_gathered_in_half_precision(tmp_path):
    layers = 2
    seen = on_ranks(2, partial(count_collectives, model=tiny_llama(num_hidden_layers=layers)), tmp_path)
    reduced = [dtype for name, dtype in seen if "reduce_scatter" in name]
    gathered = {dtype for name, dtype in seen if "allgather_base" in name}
    assert reduced == ["torch.float32"] * (layers + 1), seen
    assert gathered == {"torch.bfloat16"}


def largest_in_a_commit(ranks: Ranks, model: PreTrainedModel) -> int:
    """Bytes of the largest tensor that ranks exchange for the digest of a version with a critic."""
    policy = policy_on(ranks, model, config_of("critic", num_ranks=2))
    policy.compare_weights()
    mode = Collectives()
    with mode:
        policy.compare_weights()
    return max(mode.num_bytes)


def test_a_commit_gathers_no_weight_of_a_critic(tmp_path):
    assert on_ranks(2, partial(largest_in_a_commit, model=model_of("critic")), tmp_path) < 512


def bytes_received(ranks: Ranks, model: PreTrainedModel) -> list[int]:
    """By each rank, of the samples of a micro-batch."""
    policy = policy_on(ranks, model, config_of("", num_ranks=4))
    deal = ranks.deal
    received = [0]

    def counted(payloads: Sequence[bytes]) -> bytes:
        payload = deal(payloads)
        received[0] += len(payload)
        return payload

    ranks.deal = counted
    policy.accumulate(MicroBatch(tuple(make_samples(24))))
    return [unpack(packed) for packed in ranks.gather(pack(received[0]))]


def test_each_rank_receives_its_own_samples_alone(tmp_path):
    received = on_ranks(4, partial(bytes_received, model=tiny_llama()), tmp_path)
    whole = len(pack(make_samples(24)))
    assert received[0] == 0, "it has them"
    assert max(received) < 0.4 * whole and sum(received) < 0.85 * whole


def reference_logprobs(columns):
    return columns["reference_logprobs"].tolist()


def precomputed(ranks: Ranks, model: PreTrainedModel) -> list[list[Any]]:
    """Of one group's samples, alone and among those of others."""
    policy = policy_on(ranks, model, config_of("all sums", num_ranks=2), dtype=torch.float32)
    samples = [changed(sample, key=(n // 4, n % 4)) for n, sample in enumerate(make_relatives(16))]
    results = [policy.precompute(samples[4:8]), policy.precompute(samples)[4:8]]
    return [list(map(reference_logprobs, columns)) for columns in results]


def test_a_groups_numbers_are_the_same_bits_whichever_groups_come_with_it(tmp_path):
    alone, among = on_ranks(2, partial(precomputed, model=tiny_llama()), tmp_path)
    assert alone == among != []


IN_HALF: dict[str, dict[str, Any]] = {
    "Llama": {}, "Qwen3": {}, "Gemma2": {}, "Gemma4Text": {}, "GPTNeoX": {},
    "Mixtral": {"experts_implementation": "eager"}, "Mamba": {},
}  # fmt: skip


@cache
def unrounded(family: str) -> PreTrainedModel:
    """No weight is a number of bfloat16, norms' and embeddings' neither."""
    model = make_model(family, **IN_HALF[family])
    torch.manual_seed(5)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.02 * torch.randn_like(weight))
    return model


def in_dtype(
    ranks: Ranks | None, dtype: torch.dtype, families: Iterable[str] = IN_HALF
) -> dict[str, tuple[Tensor, Tensor]]:
    """Of each family, logprobs of some samples, and the gradient of a micro-batch as one vector."""
    results = {}
    for family in families:
        model = copy.deepcopy(unrounded(family))
        config = TrainerConfig.model_validate(FIELDS | {"num_ranks": ranks.size if ranks else 1})
        policy = policy_on(ranks, model, config, dtype=dtype)
        samples = make_samples(24)
        # Rank 0 has those of all, the others none.
        logprobs = torch.from_numpy(np.concatenate(logprobs_of(policy, samples) or [np.zeros(0)]))
        results[family] = logprobs, gradient_of(policy, [MicroBatch(tuple(samples))])
    return results


@pytest.fixture(scope="module")
def half_of_two(tmp_path_factory):
    return on_ranks(2, partial(in_dtype, dtype=torch.bfloat16), tmp_path_factory.mktemp("half"))


@pytest.mark.parametrize("family", IN_HALF)
def test_in_bfloat16_ranks_round_where_one_does(family, half_of_two):
    exact = in_dtype(None, torch.float32, [family])[family]
    one_rank = in_dtype(None, torch.bfloat16, [family])[family]
    for mine, of_two, true, allowed in zip(half_of_two[family], one_rank, exact, (0.05, 0.4), strict=True):
        # Gradients are rounded in each pass, and passes have other samples.
        assert (mine - of_two).norm() < allowed * (of_two - true).norm()


def use_and_profile(ranks: Ranks, folder: Path) -> Usage:
    policy = policy_on(ranks, tiny_llama(), config_of("", num_ranks=ranks.size))
    policy.profile(folder)
    policy.accumulate(MicroBatch(tuple(make_samples(8))))
    policy.profile(None)
    return policy.usage()


def test_each_rank_says_what_it_used_and_writes_its_profile(tmp_path):
    usage = on_ranks(2, partial(use_and_profile, folder=tmp_path), tmp_path)
    assert len(usage.peak_bytes) == 2 and usage.flops == count_flops(tiny_llama())
    assert sorted(path.name for path in tmp_path.glob("*.gz")) == ["rank-0.json.gz", "rank-1.json.gz"]

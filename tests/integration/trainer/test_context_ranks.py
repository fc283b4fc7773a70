"""Ranks that share forward passes give what one process gives: in float64, to 1e-12.

Models compute norms, and some of them more, in float32 whatever their weights. Here they do not: what is left
is the order of sums.
"""

import copy
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.support.architectures import make_model
from tests.support.models import logprobs_of, make_relatives, make_samples, save_state
from tests.support.rank_runs import (
    FIELDS,
    assert_same_outcome,
    gradient_of,
    never_in_float32,
    on_ranks,
    policy_on,
    train_alone,
    train_cases,
    update,
)
from tests.support.sessions import session_samples
from tidemill.common.config.trainer import TrainerConfig
from tidemill.common.errors import ConfigError
from tidemill.services.trainer.groups.micro_batch import MicroBatch
from tidemill.services.trainer.groups.sample import Sample
from tidemill.services.trainer.policy.compiling import compile_model
from tidemill.services.trainer.policy.fsdp.ranks import Ranks

SIZE = 4
MLA = {
    "q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 6,
    "num_key_value_heads": 4, "first_k_dense_replace": 1, "moe_intermediate_size": 16, "n_routed_experts": 4,
    "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "GPTNeoX": {}, "Llama": {"num_key_value_heads": 1}, "Qwen2": {}, "Qwen3": {}, "Mistral": {},
    "Gemma3Text": {}, "Gemma4Text": {}, "Olmo2": {}, "Mixtral": {"experts_implementation": "eager"},
    "DeepseekV3": MLA | {"experts_implementation": "eager"},
}  # fmt: skip
"""With one key head, two and four for four ranks; windows; heads of MLA."""
OPTIONS: dict[str, dict[str, Any]] = {
    "two of four share": {"context_ranks": 2, "algorithm": {"reference": {"model": "frozen"},
        "kl": {"place": "loss", "coefficient": 0.1}, "entropy_coefficient": 0.1,
        "importance": {"normalise": True}, "rejection": {"bounds": {"seq_mean_k3": 20.0},
        "denominator": "kept"}}},
    "all share": {"context_ranks": 4, "gradient_checkpointing": True},
    "two copies, adapters, value head": {"context_ranks": 2, "shard_ranks": 2, "lora": {"rank": 3,
        "alpha": 12}, "algorithm": {"advantage": "gae"}},
    "critic, moments on the host": {"context_ranks": 2, "offload_optimizer": True,
        "sum_gradients": "micro_batch", "algorithm": {"advantage": "gae", "value": {"model": "own"}}},
    "routers": {"context_ranks": 4, "algorithm": {"router": {"balance": 0.1, "z": 0.01}}},
    "compiled": {"context_ranks": 2},
}  # fmt: skip


@cache
def model_of(name: str) -> PreTrainedModel:
    if name == "routers":
        return make_model("Mixtral", experts_implementation="eager").double()
    model = make_model("GPTNeoX", num_hidden_layers=1 if name == "compiled" else 2).double()
    if name == "compiled":
        assert compile_model(model, backend="eager")
    return model


def config_of(name: str, **more: Any) -> TrainerConfig:
    return TrainerConfig.model_validate(FIELDS | OPTIONS[name] | more)


def train_all(ranks: Ranks, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    with never_in_float32():
        return train_cases(
            ranks, [(name, model_of(name), config_of(name, num_ranks=ranks.size)) for name in names]
        )


@pytest.fixture(scope="module")
def of_four(tmp_path_factory):
    *names, compiled = OPTIONS  # every rank compiles for itself, which takes most of the time
    return {
        **on_ranks(SIZE, partial(train_all, names=names), tmp_path_factory.mktemp("four")),
        **on_ranks(2, partial(train_all, names=[compiled]), tmp_path_factory.mktemp("two")),
    }


@pytest.mark.parametrize("name", OPTIONS)
def test_losses_gradients_and_weights_after_three_steps_are_those_of_one(name, of_four):
    with never_in_float32():
        alone = train_alone(copy.deepcopy(model_of(name)), config_of(name, context_ranks=1, shard_ranks=None))
    assert_same_outcome(of_four[name], alone)


def some_samples() -> list[list[Sample]]:
    """Micro-batches of odd lengths, with sessions; one of fewer tokens than there are ranks."""
    short = make_samples(1)[0]
    return [[*make_relatives(7), *session_samples(3)], [short], make_samples(5, seed=3)]


def of_families(ranks: Ranks | None, families: tuple[str, ...]) -> dict[str, tuple[Tensor, Tensor]]:
    """Logprobs of samples, and the gradient of micro-batches as one vector."""
    results = {}
    for family in families:
        with never_in_float32():
            model = make_model(family, **FAMILIES[family]).double()
            fields = {"num_ranks": SIZE, "context_ranks": SIZE} if ranks else {}
            policy = policy_on(ranks, model, TrainerConfig.model_validate(FIELDS | fields))
            batches = some_samples()
            logprobs = [values for batch in batches for values in logprobs_of(policy, batch)]
            gradient = gradient_of(policy, [MicroBatch(tuple(batch)) for batch in batches])
            results[family] = torch.from_numpy(np.concatenate(logprobs or [np.zeros(0)])), gradient
    return results


@pytest.fixture(scope="module")
def families_of_four(tmp_path_factory):
    return on_ranks(SIZE, partial(of_families, families=tuple(FAMILIES)), tmp_path_factory.mktemp("families"))


@pytest.mark.parametrize("family", FAMILIES)
def test_architectures_give_the_gradient_of_one(family, families_of_four):
    logprobs, gradient = families_of_four[family]
    own_logprobs, own_gradient = of_families(None, (family,))[family]
    torch.testing.assert_close(logprobs, own_logprobs, rtol=1e-6, atol=1e-6)  # handed over in float32
    assert ((gradient - own_gradient).norm() / own_gradient.norm()).item() < 1e-12


def refusals(ranks: Ranks) -> list[str]:
    results = []
    for family, more, changes in (
        ("Mamba", {}, {}),
        ("Llama", {"packing": False}, {}),
        ("Gemma2", {}, {}),
        ("Llama", {}, {"num_attention_heads": 2}),
    ):
        model = make_model(family, **changes).double()
        config = TrainerConfig.model_validate(FIELDS | {"num_ranks": 4, "context_ranks": 4} | more)
        try:
            policy_on(ranks, model, config)
        except ConfigError as error:
            results.append(str(error))
    return results


def test_what_cannot_be_shared_is_refused_by_name(tmp_path):
    messages = on_ranks(4, refusals, tmp_path)
    assert len(messages) == 4 and all("trainer.context_ranks" in message for message in messages)
    assert "mamba" in messages[0] and "take 2" in messages[3]


def digest_and_norm(ranks: Ranks, folder: Path, context_size: int, begins: bool = False) -> tuple[str, float]:
    config = TrainerConfig.model_validate(FIELDS | {"num_ranks": 4, "context_ranks": context_size})
    policy = policy_on(ranks, copy.deepcopy(model_of("all share")), config)
    if begins:
        update(policy, make_samples(9))
        save_state(policy, folder)
    else:
        policy.load_state(folder)
    digest = policy.digest()
    return digest, update(policy, make_samples(9, seed=1))[1].grad_norm


def test_a_state_is_continued_with_and_without_shared_passes(tmp_path):
    run = partial(digest_and_norm, folder=tmp_path / "state")
    digest, norm = on_ranks(4, partial(run, context_size=4, begins=True), tmp_path)
    again, same = on_ranks(4, partial(run, context_size=4), tmp_path)
    distant, near = on_ranks(4, partial(run, context_size=1), tmp_path)
    assert digest == again == distant
    assert norm == same == pytest.approx(near, rel=1e-9)

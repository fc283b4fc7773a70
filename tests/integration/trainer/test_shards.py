"""Shards are read from a model's files; states go from any number of ranks to any other, bit by bit."""

import copy
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DeepseekV3Config, PreTrainedModel

from tests.support.architectures import SIZES, make_model
from tests.support.models import read_policy_state, save_state
from tests.support.rank_runs import FIELDS, on_ranks, policy_on, train
from tidemill.common.config.run import ModelConfig
from tidemill.common.config.trainer import TrainerConfig
from tidemill.common.files import StorageError
from tidemill.services.trainer.policy import state as state_module
from tidemill.services.trainer.policy.fsdp.rank_policy import ShardedModel
from tidemill.services.trainer.policy.fsdp.ranks import Ranks
from tidemill.services.trainer.policy.model_loading import load_model, open_model
from tidemill.services.trainer.policy.state import PolicyState
from tidemill.services.trainer.policy.transformers_policy import TransformersPolicy
from tidemill.services.trainer.weights import pretrained
from tidemill.services.trainer.weights.pretrained import TensorInFile, give_storage
from tidemill.services.trainer.weights.store import model_tensors, whole_tensor

CPU = torch.device("cpu")
FAMILIES = ("Qwen3", "Mixtral", "Gemma4Text", "GPTNeoX", "DeepseekV3")
"""Tied embeddings, experts in one tensor, buffers that are weights, biases, compressed keys."""

MLA: dict[str, Any] = {
    "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "moe_intermediate_size": 16, "num_experts_per_tok": 2,
}  # fmt: skip


def written(family: str, folder: Path) -> ModelConfig:
    """33 rows of embeddings: no number of ranks gets equal shares."""
    if family == "DeepseekV3":
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(DeepseekV3Config(**SIZES | MLA | {"vocab_size": 33}))
    else:
        model = make_model(family, vocab_size=33)
    model.save_pretrained(folder / family, max_shard_size="20KB")
    return ModelConfig(path=str(folder / family), max_model_len=128)


def all_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    return model_tensors(model) | dict(model.named_buffers())


def load_shards(ranks: Ranks, configs: list[ModelConfig], shard_ranks: int | None) -> list[dict[str, Tensor]]:
    """Each model's tensors, gathered."""
    ranks.lay_out(shard_ranks)
    results = []
    for config in configs:
        model, weights = open_model(config, ranks.device)
        assert weights is not None and all(weight.is_meta for weight in model.parameters())
        root = ShardedModel(model, ranks, torch.float32)
        give_storage(root, ranks.device)
        weights.fill(model_tensors(model))
        results.append({name: whole_tensor(tensor).clone() for name, tensor in all_tensors(model).items()})
        assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == (
            model.config.get_text_config().tie_word_embeddings
        )
    return results


@pytest.mark.parametrize(("size", "shard_ranks"), [(1, None), (2, None), (4, 2)])
def test_shards_are_those_of_the_whole_model(size, shard_ranks, tmp_path):
    configs = [written(family, tmp_path) for family in FAMILIES]
    shards = on_ranks(size, partial(load_shards, configs=configs, shard_ranks=shard_ranks), tmp_path)
    for config, mine in zip(configs, shards, strict=True):
        expected = all_tensors(load_model(config, CPU))
        assert mine.keys() == expected.keys()
        for name, tensor in expected.items():
            assert mine[name].dtype == tensor.dtype and torch.equal(mine[name], tensor), (config.path, name)


def test_each_shard_is_read_alone(tmp_path, monkeypatch):
    """Of the files every element is asked for once, by the rows of one rank or of another."""
    config = written("Mixtral", tmp_path)
    read = []
    real = pretrained._read

    def noted(file, piece, start, stop):
        read.append((piece.info.name, stop - start))
        return real(file, piece, start, stop)

    monkeypatch.setattr(pretrained, "_read", noted)
    model, weights = open_model(config, CPU)
    give_storage(model, CPU)
    weights.fill(model_tensors(model))
    files = [load_file(path) for path in Path(config.path).glob("*.safetensors")]
    assert dict(read) == {name: tensor.numel() for file in files for name, tensor in file.items()}


def rewritten(config: ModelConfig, change: Any) -> None:
    tensors = {}
    for path in Path(config.path).glob("model*"):
        tensors |= load_file(path) if path.suffix == ".safetensors" else {}
        path.unlink()
    change(tensors)
    save_file(tensors, Path(config.path) / "model.safetensors", metadata={"format": "pt"})


def tie_twice(tensors: dict[str, Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()


def test_what_is_not_clear_is_read_whole(tmp_path, monkeypatch):
    """Both of two tied tensors, and a conversion of which nobody knows the elements."""
    tied = written("Qwen3", tmp_path)
    rewritten(tied, tie_twice)
    model, weights = open_model(tied, CPU)
    assert weights is None and not any(weight.is_meta for weight in model.parameters())
    monkeypatch.setattr(TensorInFile, "to", lambda *_, **__: torch.empty(()))
    mixed = written("Mixtral", tmp_path)
    model, weights = open_model(mixed, CPU)
    assert weights is None
    for name, tensor in all_tensors(load_model(mixed, CPU)).items():
        assert torch.equal(all_tensors(model)[name], tensor)


@cache
def model() -> PreTrainedModel:
    return make_model("GPTNeoX", num_hidden_layers=2).double()


def config_of(**more: Any) -> TrainerConfig:
    algorithm = {"advantage": "gae"}
    return TrainerConfig.model_validate(FIELDS | {"algorithm": algorithm} | more)


def alone() -> TransformersPolicy:
    config = config_of()
    return policy_on(None, copy.deepcopy(model()), config)


def pass_on(ranks: Ranks, source: Path, target: Path, config: TrainerConfig) -> str:
    """Read a checkpoint, copy the state, train on, and only then write the copy; the last rank's disk is full
    the first time."""
    policy = policy_on(ranks, copy.deepcopy(model()), config)
    policy.load_state(source)
    policy.stage_state()
    train(policy, config, range(1, 2))
    said = ""
    write = state_module.save_file
    if ranks.rank == ranks.shard_size - 1:
        state_module.save_file = full
    try:
        policy.begin_saving(target).result()
    except StorageError as error:
        said = str(error)
    state_module.save_file = write
    policy.begin_saving(target).result()
    policy.finish_writing()
    return said


def full(*_arguments: Any, **_options: Any) -> None:
    raise OSError(28, "No space left on device")


def test_states_are_the_same_bits_on_any_number_of_ranks(tmp_path):
    policy = alone()
    train(policy, config_of(), range(1))
    save_state(policy, tmp_path / "1")
    expected = read_policy_state(tmp_path / "1")
    source = tmp_path / "1"
    for size, copies in ((2, 1), (4, 1), (4, 2)):
        target = tmp_path / f"{size} ranks, {copies} copies"
        config = config_of(num_ranks=size, shard_ranks=size // copies)
        work = partial(pass_on, source=source, target=target, config=config)
        said = on_ranks(size, work, tmp_path)
        assert f"No space left on device (rank {size // copies - 1})" in said
        files = sorted(path.name for path in target.glob("*.safetensors"))
        parts = size // copies
        assert files == [f"policy-{rank:05}-of-{parts:05}.safetensors" for rank in range(parts)]
        assert_same(read_policy_state(target), expected)
        source = target
    again = alone()
    again.load_state(source)
    assert_same(again.state(), expected)
    assert train(again, config_of(), range(1, 2)) == train(policy, config_of(), range(1, 2))
    assert_same(again.state(), policy.state())


def assert_same(mine: PolicyState, expected: PolicyState) -> None:
    assert mine.values == expected.values
    assert mine.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        assert tensor.dtype == mine.tensors[name].dtype
        assert torch.equal(mine.tensors[name], tensor), name

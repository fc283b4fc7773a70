"""A checkpoint goes from one rank to two, four, two copies of two, and back: bit by bit, in float64."""

import copy
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from tests.support.architectures import make_model
from tests.support.models import read_policy_state, save_state
from tests.support.rank_runs import FIELDS, on_ranks, policy_on, train
from tidemill.common.config.trainer import TrainerConfig
from tidemill.common.files import StorageError
from tidemill.services.trainer.policy import state as state_module
from tidemill.services.trainer.policy.fsdp.ranks import Ranks
from tidemill.services.trainer.policy.state import PolicyState
from tidemill.services.trainer.policy.transformers_policy import TransformersPolicy


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

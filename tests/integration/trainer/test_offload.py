"""What waits in host memory is bit for bit what it would be on the device. Here both are the CPU's.

And what a resume takes: each tensor is read into its place.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.allocations import peak_bytes
from tests.support.architectures import make_model
from tests.support.models import make_samples, save_state
from tests.support.rank_runs import FIELDS, on_ranks, policy_on, prepared, update
from tidemill.common.config.trainer import TrainerConfig
from tidemill.services.trainer.policy.fsdp.rank_policy import RankPolicy
from tidemill.services.trainer.policy.fsdp.ranks import Ranks
from tidemill.services.trainer.policy.offload import OffloadedAdamW
from tidemill.services.trainer.policy.policy import UpdateResult
from tidemill.services.trainer.policy.shards import local
from tidemill.services.trainer.policy.transformers_policy import TransformersPolicy


def make_policy(ranks: Ranks | None, dtype: torch.dtype = torch.float32, **fields: Any) -> TransformersPolicy:
    torch.manual_seed(1)
    model = make_model("GPTNeoX")
    merged = FIELDS | {"optimizer": {"lr": 1e-2, "weight_decay": 0.1}} | fields
    config = TrainerConfig.model_validate(merged | {"num_ranks": ranks.size if ranks else 1})
    return policy_on(ranks, model, config, dtype=dtype)


def trained(policy: TransformersPolicy, steps: range) -> dict[str, Tensor]:
    """All that a checkpoint has, after these steps."""
    for step in steps:
        update(policy, prepared(policy, policy._config, make_samples(8, seed=step), proximal=False))
    digest = torch.tensor(list(policy.compare_weights().digest.encode()))
    tensors = {name: local(tensor).clone() for name, tensor in policy.state().tensors.items()}
    return tensors | {"digest": digest}


LEAVING: dict[str, dict[str, Any]] = {
    "a critic": {"algorithm": {"advantage": "gae", "value": {"model": "own"}}},
    "a reference that moves": {"algorithm": {"reference": {"model": "updated", "every": 1},
        "kl": {"place": "loss", "coefficient": 0.1}}, "offload_optimizer": True},
    "adapters": {"algorithm": {"reference": {"model": "frozen"}, "kl": {"place": "loss",
        "coefficient": 0.1}}, "lora": {"rank": 2}},
}  # fmt: skip


def leaving(policy: TransformersPolicy) -> TransformersPolicy:
    """It leaves its device after every update, alone also before it, and versions are compared in between."""
    update = policy.update

    def update_between(denominator: float) -> UpdateResult:
        if not isinstance(policy, RankPolicy):  # between backward and update, ranks hold gradients unsummed
            move()
        result = update(denominator)
        policy.compare_weights()
        move()
        return result

    def move() -> None:
        for go in (policy.leave, policy.enter):
            weights = [local(parameter.detach()) for _, parameter in policy._parameters]
            go()
            for tensor in weights:
                tensor.fill_(torch.nan)  # who still computes with what was left is found out

    policy.update = update_between
    return policy


def compare(ranks: Ranks | None, folder: Path) -> list[bool]:
    OffloadedAdamW.slice_size = 64  # most weights take several, and an end that is no whole one
    there = make_policy(ranks)
    here = make_policy(ranks, offload_optimizer=True)
    states = [trained(policy, range(3)) for policy in (there, here)]
    save_state(there, folder / "there")
    save_state(here, folder / "here")
    files = [sorted((folder / name).iterdir()) for name in ("there", "here")]
    are_same = [a.name == b.name and a.read_bytes() == b.read_bytes() for a, b in zip(*files, strict=True)]
    # Each goes on from what the other has written.
    there.load_state(folder / "here")
    resumed = make_policy(ranks, offload_optimizer=True)
    resumed.load_state(folder / "there")
    later = [trained(policy, range(3, 5)) for policy in (there, resumed)]
    both = LEAVING if ranks is None or ranks.size == 2 else {}
    stayed = [trained(make_policy(ranks, torch.bfloat16, **fields), range(3)) for fields in both.values()]
    moved = [
        trained(leaving(make_policy(ranks, torch.bfloat16, **fields)), range(3)) for fields in both.values()
    ]
    moments = [name for name in states[0] if name.endswith((".exp_avg", ".exp_avg_sq"))]
    return [
        *are_same,
        len(moments) > 20,
        max(len(local(p).flatten()) for _, p in here._parameters) > 64,
        *(
            torch.equal(first[name], second[name])
            for first, second in (states, later, *zip(stayed, moved, strict=True))
            for name in first
        ),
        not torch.equal(states[0][moments[0]], later[0][moments[0]]),
    ]


def test_moments_on_the_host_train_the_same(tmp_path):
    size = OffloadedAdamW.slice_size
    try:
        assert all(compare(None, tmp_path))
    finally:
        OffloadedAdamW.slice_size = size


@pytest.mark.parametrize("size", [2, 4])
def test_moments_on_the_hosts_of_ranks_train_the_same(size, tmp_path):
    assert all(on_ranks(size, partial(compare, folder=tmp_path), tmp_path))


def resume(ranks: Ranks | None, folder: Path) -> list[tuple[int, int]]:
    """What a resume takes beside the weights, and what it may: both moments and one tensor, twice where it is
    joined of two files."""
    policy = make_policy(ranks)
    trained(policy, range(1))
    save_state(policy, folder)
    sizes = [4 * local(p).numel() for _, p in policy._parameters]
    peaks = []
    for fields in ({}, {"offload_optimizer": True}):
        resumed = make_policy(ranks, **fields)
        peaks.append((peak_bytes(partial(resumed.load_state, folder)), 2 * sum(sizes) + 2 * max(sizes)))
    return peaks


def assert_small(peaks: list[tuple[int, int]]) -> None:
    for peak, allowed in peaks:
        assert allowed // 2 < peak < allowed + 10_000  # steps of the optimizer, and random states


def test_a_resume_holds_one_tensor_twice_and_no_more(tmp_path):
    assert_small(resume(None, tmp_path / "alone"))
    assert_small(on_ranks(2, partial(resume, folder=tmp_path / "ranks"), tmp_path))

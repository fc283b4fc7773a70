"""Ranks: how they meet, divide a host and a batch, what they send each other, and who is missed."""

import os
from collections import Counter
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from tests.support.models import make_policy, make_samples, run_config, save_state
from tests.support.samples import taught
from tidemill.common.errors import ConfigError
from tidemill.common.weights.bits import TensorInfo
from tidemill.services.trainer.groups.sample import Sample, SegmentTokens, TurnEnd
from tidemill.services.trainer.policy import transformers_policy
from tidemill.services.trainer.policy.fsdp import rank_policy, ranks
from tidemill.services.trainer.policy.fsdp.rank_policy import cores_beside, take_share
from tidemill.services.trainer.policy.fsdp.ranks import (
    JOIN_TIMEOUT,
    NCCL_TIMEOUT,
    SILENT_S,
    Heartbeats,
    Ranks,
    RankWatch,
    join_ranks,
    lead_ranks,
)
from tidemill.services.trainer.policy.model_loading import prepare_torch
from tidemill.services.trainer.policy.state import PolicyState, Shard, ShardReader
from tidemill.services.trainer.weights.peers import pack, unpack
from tidemill.services.trainer.weights.shadow import rows_of

VARIABLES = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.fixture
def group(monkeypatch):
    """Torch's calls, on a machine with a GPU."""
    calls = MagicMock(PrefixStore=lambda _, store: store)
    calls.rendezvous = lambda *_, timeout: iter([(timeout, 0, 4)])
    calls.new_subgroups_by_enumeration = lambda parts, timeout: ((parts, timeout), [])
    monkeypatch.setattr(ranks, "dist", calls)
    monkeypatch.setattr(ranks, "rendezvous", calls.rendezvous, raising=False)
    for name, answer in {"is_available": True, "device_count": 8, "set_device": None}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    return calls


def test_ranks_wait_longer_for_one_that_still_loads_than_for_one_that_hangs(group):
    join_ranks(VARIABLES)
    _, options = group.init_process_group.call_args
    assert options["timeout"] == NCCL_TIMEOUT < JOIN_TIMEOUT == options["store"]


def test_ranks_that_share_a_copy_wait_no_longer_for_each_other_than_all_do(group, monkeypatch):
    def mesh_of(groups, *_, **__):
        return groups

    monkeypatch.setattr(ranks.DeviceMesh, "from_group", mesh_of)
    joined = Ranks(3, 4, torch.device("cuda", 3))
    joined.lay_out(2)
    assert joined.mesh == [([[0, 2], [1, 3]], NCCL_TIMEOUT), ([[0, 1], [2, 3]], NCCL_TIMEOUT)]
    joined = Ranks(3, 8, torch.device("cuda", 3))
    joined.lay_out(4, expert_size=2)
    assert [parts for parts, _ in joined.expert_mesh] == [
        [[0, 4], [1, 5], [2, 6], [3, 7]],
        [[0, 2], [1, 3], [4, 6], [5, 7]],
        [[0, 1], [2, 3], [4, 5], [6, 7]],
    ], "other experts are with neighbours"


def test_another_number_of_ranks_than_torchrun_started_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match=r"torchrun started 4 ranks, trainer\.num_ranks is 2"):
        lead_ranks(run_config("x", trainer={"num_ranks": 2, "device": "cpu"}).trainer)


def test_ranks_meet_once_each_has_read_its_state(monkeypatch, tmp_path):
    """Else the fastest would wait for the others in a call on GPUs, which gives up after minutes."""
    policy = make_policy()
    events = []
    save_state(policy, tmp_path / "state")
    fill = transformers_policy.fill
    monkeypatch.setattr(transformers_policy, "fill", lambda *its: (events.append("read"), fill(*its)))
    policy.peers = SimpleNamespace(gather=lambda *_: events.append("met"))
    policy.load_state(tmp_path / "state")
    assert events == ["read"] * (len(events) - 1) + ["met"] != ["met"]


@pytest.fixture
def threads(monkeypatch):
    """The numbers of threads that torch is given, on a host of 16 cores."""
    counts: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", counts.append)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    return counts


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, [4]),
        ({"LOCAL_WORLD_SIZE": "2"}, [8]),
        ({"LOCAL_WORLD_SIZE": "32"}, [1]),
        ({"OMP_NUM_THREADS": "3"}, []),
    ],
)
def test_threads_are_divided_between_the_ranks_of_a_host(environment, expected, threads):
    take_share(torch.device("cpu"), 4, environment)
    assert threads == expected


def test_the_cores_beside_a_gpu_are_those_that_the_system_tells(tmp_path):
    (tmp_path / "0000:3b:00.0").mkdir()
    (tmp_path / "0000:3b:00.0" / "local_cpulist").write_text("0-2,8,10-11\n")
    assert cores_beside("0000:3b:00.0", tmp_path) == {0, 1, 2, 8, 10, 11}
    assert cores_beside("0000:5e:00.0", tmp_path) == set()


@pytest.mark.parametrize(("beside", "bound"), [({4, 5, 40}, [{4, 5}]), (set(), [])])
def test_a_rank_is_bound_to_those_of_them_that_it_may_use(beside, bound, threads, monkeypatch):
    addresses: list[str] = []
    monkeypatch.setattr(rank_policy, "cores_beside", lambda address: addresses.append(address) or beside)
    gpu = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    bound_to: list[set[int]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: bound_to.append(cores))
    take_share(torch.device("cuda"), 4, {})
    assert (addresses, bound_to) == (["0000:3b:00.0"], bound)


@pytest.mark.parametrize("environment", [{}, {"PYTORCH_CUDA_ALLOC_CONF": "a"}, {"PYTORCH_ALLOC_CONF": "b"}])
def test_segments_grow_unless_the_user_says_otherwise(environment, monkeypatch):
    monkeypatch.setattr(os, "environ", dict(environment))
    prepare_torch(run_config("x").trainer)
    assert os.environ == (environment or {"PYTORCH_ALLOC_CONF": "expandable_segments:True"})


def as_plain(value: Any) -> Any:
    """Arrays as their dtype and elements, and dataclasses as their fields."""
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.tolist()
    if isinstance(value, tuple):
        return [as_plain(item) for item in value]
    if isinstance(value, dict):
        return {name: as_plain(item) for name, item in value.items()}
    names = [item.name for item in fields(value)] if hasattr(value, "__dataclass_fields__") else []
    return {name: as_plain(getattr(value, name)) for name in names} if names else value


def test_calls_and_samples_arrive_as_they_were_sent():
    plain, sample = make_samples(2)
    with_teacher = taught(
        sample, np.full(sample.num_trained, -1.5), 0.5, advantage=np.full(len(sample.mask), 0.5)
    )
    arrived = unpack(pack([plain, with_teacher]), Sample, SegmentTokens, TurnEnd)
    assert all(isinstance(each, Sample) for each in arrived)
    assert [as_plain(each) for each in arrived] == [as_plain(each) for each in (plain, with_teacher)]
    assert unpack(pack(("save_state", [Path("a/b")]))) == ("save_state", (Path("a/b"),))
    assert unpack(pack(("update", [2.5]))) == ("update", (2.5,))


def test_fields_and_keys_may_be_called_as_what_is_packed():
    info = TensorInfo("norm", "BF16", (2,))
    assert unpack(pack([info]), TensorInfo) == (info,)
    plain = {"path": "a", "dtype": "b", "kind": "c"}
    assert unpack(pack(plain)) == plain


@pytest.mark.parametrize("num_rows", [1, 2, 5, 6])
@pytest.mark.parametrize("num_writers", [1, 2, 3])
def test_rows_written_by_some_ranks_are_read_by_any_number(tmp_path, num_rows, num_writers):
    whole = torch.arange(num_rows * 2.0).reshape(num_rows, 2)
    for rank in range(num_writers):
        start, stop = rows_of(num_rows, rank, num_writers)
        shard = Shard(rank, num_writers, {"a": start})
        PolicyState({"a": whole[start:stop]}, shard=shard).write(tmp_path)
    reader = ShardReader(tmp_path)
    assert torch.equal(reader.read("a"), whole)
    for size in (1, 2, 4):
        parts = [reader.read("a", *rows_of(num_rows, rank, size)) for rank in range(size)]
        assert torch.equal(torch.cat(parts), whole)


@dataclass
class Store:
    """Torch's, in this process."""

    numbers: Counter[str] = field(default_factory=Counter)
    is_gone: bool = False

    def add(self, key: str, amount: int) -> int:
        if self.is_gone:
            raise RuntimeError("connection refused")
        self.numbers[key] += amount
        return self.numbers[key]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_who_stands_still_is_named_and_who_counts_is_not():
    store = Store()
    clock = Clock()
    beating = [Heartbeats(store, rank, 3, clock) for rank in range(3)]
    for _ in range(4):
        assert [beats.look() for beats in beating] == ["", "", ""]
        clock.now += 0.9 * SILENT_S
    for _ in range(2):
        assert [beating[rank].look() for rank in (0, 2)] == ["", ""]
        clock.now += 0.9 * SILENT_S
    assert "rank 1" in beating[0].look()
    assert beating[2].look() == "", "rank 0 has counted"
    clock.now += 1.1 * SILENT_S
    assert "rank 0" in beating[2].look()


def test_a_count_that_does_not_come_back_is_noticed():
    clock = Clock()
    beats = Heartbeats(Store(), 1, 2, clock)
    beats.look()
    clock.now += 0.9 * SILENT_S
    assert not beats.is_stuck()
    clock.now += 0.2 * SILENT_S
    assert beats.is_stuck()


def test_a_store_that_is_gone_means_that_rank_0_is_unless_the_run_is_over(monkeypatch):
    monkeypatch.setattr(ranks, "BEAT_S", 0.001)
    watch = RankWatch()
    store = Store()
    watch.follow(Heartbeats(store, 1, 2))
    store.is_gone = True
    watch._lost.wait(60)
    watch.stop()
    assert "rank 0" in watch.loss()[0]
    monkeypatch.setattr(ranks, "BEAT_S", 60)  # the next one comes after the end
    watch = RankWatch()
    watch.follow(Heartbeats(store, 1, 2))
    watch.stop()
    assert not watch._lost.is_set()

"""Ranks of one host divide its cores between them."""

import os

import pytest
import torch

from tests.support.models import run_config
from tidemill.services.trainer.policy.fsdp import rank_policy
from tidemill.services.trainer.policy.fsdp.rank_policy import cores_beside, take_share
from tidemill.services.trainer.policy.model_loading import prepare_torch


@pytest.fixture
def threads(monkeypatch):
    """What torch was told."""
    told: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", told.append)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    return told


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
    gpu = type("Gpu", (), {"pci_domain_id": 0, "pci_bus_id": 0x3B, "pci_device_id": 0})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    taken: list[set[int]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: taken.append(cores))
    take_share(torch.device("cuda"), 4, {})
    assert (addresses, taken) == (["0000:3b:00.0"], bound)


@pytest.mark.parametrize("given", [{}, {"PYTORCH_CUDA_ALLOC_CONF": "a"}, {"PYTORCH_ALLOC_CONF": "b"}])
def test_segments_grow_unless_the_user_says_otherwise(given, monkeypatch):
    monkeypatch.setattr(os, "environ", dict(given))
    prepare_torch(run_config("x").trainer)
    assert os.environ == (given or {"PYTORCH_ALLOC_CONF": "expandable_segments:True"})

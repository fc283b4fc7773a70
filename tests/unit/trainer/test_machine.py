"""What `tidemill check --gpu` says of a machine, here without a GPU."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.models import run_config, tiny_model
from tidemill.services.trainer import machine
from tidemill.services.trainer.machine import GIB, Fact, examine


@pytest.fixture(autouse=True)
def little_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "DISK_BYTES", 8 << 20)


def facts_of(tmp_path: Path, **sections: Any) -> dict[str, Fact]:
    model = tiny_model(tmp_path / "model")
    request = {
        "config": run_config(model, **sections).model_dump(mode="json"),
        "runs": str(tmp_path / "not yet" / "runs"),
    }
    return {fact["what"]: Fact(**fact) for fact in examine(request)["facts"]}


def test_a_cpu_is_measured_and_what_is_left_out_is_named(tmp_path):
    facts = facts_of(tmp_path)
    assert list(facts) == [
        "driver", "compiler", "host memory", "host copies", "ranks", "/dev/shm", "disk", "checkpoints",
    ]  # fmt: skip
    assert "left out" in facts["driver"].text and str(tmp_path) in facts["disk"].text
    assert not any(fact.is_problem for name, fact in facts.items() if name != "/dev/shm")
    assert [path.name for path in tmp_path.iterdir()] == ["model"], "nothing stays"


def test_what_the_run_would_fail_at_is_a_problem_with_its_remedy(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(total=64 << 20, free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    facts = facts_of(tmp_path)
    for name, remedy in (("/dev/shm", "--shm-size"), ("checkpoints", "keep_checkpoints")):
        assert facts[name].is_problem and remedy in facts[name].remedy


def test_a_slow_disk_is_no_problem_but_has_a_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "SLOW_DISK", 1e15)
    disk = facts_of(tmp_path)["disk"]
    assert "checkpoint_every" in disk.remedy and not disk.is_problem


def test_a_folder_that_takes_nothing_is_a_problem(tmp_path, monkeypatch):
    def refuse(**_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(machine.tempfile, "NamedTemporaryFile", refuse)
    disk = facts_of(tmp_path)["disk"]
    assert disk.is_problem and "TIDEMILL_RUNS_DIR" in disk.remedy


GPUS: dict[str, Any] = {
    "is_available": lambda: True,
    "device_count": lambda: 2,
    "mem_get_info": lambda gpu: ((79 if gpu else 20) * GIB, 80 * GIB),
    "get_device_name": lambda _=0: "NVIDIA H100",
}


def test_a_gpu_that_another_process_uses_is_a_problem(monkeypatch):
    for name, value in GPUS.items():
        monkeypatch.setattr(machine.torch.cuda, name, value)
    links = "GPU 0: NVIDIA H100\n\t Link 0: 26.562 GB/s\n\t Link 1: 26.562 GB/s\n"
    monkeypatch.setattr(machine, "ask_driver", lambda *_: links)
    facts = {fact.what: fact for fact in machine._look_at_memory()}
    assert facts["GPU 0"].is_problem and not facts["GPU 1"].is_problem
    assert facts["NVLink"].text.startswith("2 links") and not facts["NVLink"].remedy
    monkeypatch.setattr(machine, "ask_driver", lambda *_: "")
    assert {fact.what: fact for fact in machine._look_at_memory()}["NVLink"].remedy


def test_a_driver_that_torch_cannot_use_is_a_problem(monkeypatch):
    monkeypatch.setattr(machine, "driver_list", lambda: "NVIDIA H100, 525.60")
    (fact,) = machine._look_at_driver()
    assert fact.is_problem and "driver" in fact.remedy


@pytest.mark.long
def test_ranks_sum_in_processes_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "RANKS_DEADLINE_S", 240.0)  # other tests may have the cores
    facts = facts_of(tmp_path, trainer={"num_ranks": 2})
    assert "GB/s of bus" in facts["gloo over 2 ranks"].text


@pytest.mark.long
def test_ranks_that_hang_are_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "RANKS_DEADLINE_S", 0.1)
    assert facts_of(tmp_path, trainer={"num_ranks": 2})["gloo over 2 ranks"].is_problem

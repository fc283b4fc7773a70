"""What vLLM is started with: on a CPU float32, a libnuma, and nothing to compile without a compiler."""

import argparse
import ctypes
import importlib.util
import os
import shutil
import sys
from importlib.machinery import ModuleSpec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.trajectories import make_config
from tidemill.common.config import RunConfig
from tidemill.common.errors import ConfigError
from tidemill.common.process import vllm_machine
from tidemill.common.process.vllm_machine import (
    add_torchvision,
    check_machine,
    check_records,
    machine_arguments,
    machine_environment,
    seeing_environment,
)
from tidemill.services.console.check.preflight import _check_engine
from tidemill.services.reward.remote.serving import check_local, server_command, server_environment
from tidemill.services.reward.remote.tokens import MODEL_TOKEN_VARIABLE
from tidemill.services.rollout.engines.vllm_launch import start_vllm

TOKEN = "a token of the run, long enough"


@pytest.fixture(params=[True, False], ids=["cpu", "gpu"])
def is_cpu(request, monkeypatch):
    monkeypatch.setattr(vllm_machine, "is_cpu_build", lambda: request.param)
    return bool(request.param)


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(vllm_machine, "is_cpu_build", lambda: True)


@pytest.fixture
def no_libnuma(on_cpu, monkeypatch):
    # `make unit` installs no vLLM.
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: ModuleSpec(name, None))
    monkeypatch.setattr(vllm_machine, "LIBNUMA", "libnowhere.so.1")


JUDGE: dict[str, Any] = {"judge": {"servers": "grader", "template": "{{ completion }}"}}
MODEL: dict[str, Any] = {"model": {"servers": "grader"}}


def command_of(config: RunConfig, *further: str) -> list[str]:
    options = argparse.Namespace(model="", host="::1", server_args=further)
    return server_command(config, "grader", options, 1)


def served(reward: dict[str, Any], **local: Any) -> RunConfig:
    servers = {"grader": {"model": "m", "local": local}}
    return make_config(reward={"rewards": {"r": reward}}, servers=servers)


def dtypes_of(command: list[str]) -> list[str]:
    return [after for before, after in pairwise(command) if before == "--dtype"]


@pytest.mark.parametrize("reward", [JUDGE, MODEL], ids=["judge", "model"])
def test_a_server_on_a_cpu_computes_in_float32(reward, is_cpu):
    assert dtypes_of(command_of(served(reward, engine="vllm"))) == (["float32"] if is_cpu else [])


@pytest.mark.parametrize("said", [("--dtype", "half"), ("--dtype=half",), ("--config", "theirs.yaml")])
def test_what_the_user_says_of_the_dtype_counts(said, on_cpu):
    for command in (command_of(served(JUDGE, args=said)), command_of(served(JUDGE), *said)):
        assert "float32" not in command and command[-len(said) :] == list(said)


def test_a_server_of_another_kind_is_given_nothing(no_libnuma):
    assert command_of(served(JUDGE, command=["serve", "{model}"])) == ["serve", "m"]
    assert "--dtype" not in command_of(served(MODEL))


@pytest.mark.parametrize("missing", ["compiler", "headers"])
def test_nothing_is_compiled_where_a_part_of_the_compiler_is_missing(missing, tmp_path, on_cpu, monkeypatch):
    (tmp_path / "g++").touch(mode=0o755)
    (tmp_path / "Python.h").touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    assert "TORCH_COMPILE_DISABLE" not in machine_environment({})
    (tmp_path / {"compiler": "g++", "headers": "Python.h"}[missing]).unlink()
    assert machine_environment({})["TORCH_COMPILE_DISABLE"] == "1"
    assert machine_environment({"TORCH_COMPILE_DISABLE": "0"})["TORCH_COMPILE_DISABLE"] == "0"


def test_a_libnuma_of_the_environment_is_found_by_all_processes_of_vllm(no_libnuma, tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_machine, "OWN_LIBRARIES", tmp_path)
    with pytest.raises(ConfigError, match="libnowhere"):
        check_machine("these tests")
    some_library = next(Path(torch.__file__).parent.glob("lib/libshm.so"))
    shutil.copy(some_library, tmp_path / "libnowhere.so.1")
    check_machine("these tests")
    config = served(JUDGE, env={"LD_LIBRARY_PATH": "/theirs"})
    command_environment = server_environment(config.servers["grader"], 0)
    assert command_environment["LD_LIBRARY_PATH"] == f"{tmp_path}:/theirs"


def test_without_libnuma_it_is_said_what_to_install(no_libnuma):
    command = "apt-get install libnuma1"
    config = served(JUDGE)
    with pytest.raises(ConfigError, match=f"servers.grader.*{command}"):
        check_local("r", config.reward.named["r"], config.servers["grader"])
    with pytest.raises(ConfigError, match=command):
        command_of(config)


def test_the_engine_and_the_preflight_say_it_too(no_libnuma):
    config = make_config(rollout={"engine": "vllm"})
    for look in (lambda: start_vllm(config, "w"), lambda: _check_engine(config)):
        with pytest.raises(ConfigError, match=r"rollout.engine is vllm.*libnuma1"):
            look()


def test_a_vllm_server_asks_for_the_runs_token(monkeypatch):
    monkeypatch.setenv(MODEL_TOKEN_VARIABLE, TOKEN)
    config = served(JUDGE)
    assert server_environment(config.servers["grader"], 0)["VLLM_API_KEY"] == TOKEN
    assert TOKEN not in " ".join(command_of(config))


def test_a_build_for_gpus_needs_and_gets_nothing(no_libnuma, monkeypatch):
    monkeypatch.setattr(vllm_machine, "is_cpu_build", lambda: False)
    check_machine("these tests")
    assert machine_environment({"A": "b"}) == {"A": "b"}
    assert machine_arguments([], "these tests") == []


def test_the_search_path_is_the_same_once_the_library_is_loaded(on_cpu, tmp_path, monkeypatch):
    """A library that is loaded is found by its name from then on, but only in the process that loaded it."""
    monkeypatch.setattr(vllm_machine, "OWN_LIBRARIES", tmp_path)
    monkeypatch.setattr(vllm_machine, "LIBNUMA", "libshm.so")
    shutil.copy(next(Path(torch.__file__).parent.glob("lib/libshm.so")), tmp_path)
    check_machine("these tests")
    ctypes.CDLL("libshm.so")
    assert machine_environment({})["LD_LIBRARY_PATH"] == str(tmp_path)


def test_masks_are_refused_on_a_cpu_with_what_to_take_instead(monkeypatch):
    monkeypatch.setattr(vllm_machine, "is_cpu_build", lambda: True)
    with pytest.raises(ConfigError, match=r"transformers; or rollout\.sampling_masks: false"):
        check_records(masks=True)
    monkeypatch.setattr(vllm_machine, "is_cpu_build", lambda: False)
    check_records(masks=True)


@pytest.fixture
def no_torchvision(monkeypatch, tmp_path):
    monkeypatch.setattr(vllm_machine, "find_spec", lambda name: None)
    monkeypatch.setattr(vllm_machine, "OWN_TORCHVISION", tmp_path / "torchvision")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "/theirs")
    return tmp_path / "torchvision"


def test_without_torchvision_an_engine_with_pictures_says_how_to_get_it(no_torchvision, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: ModuleSpec(name, None))
    monkeypatch.setattr("tidemill.services.console.check.preflight.check_machine", lambda whose: None)
    config = make_config(rollout={"engine": "vllm"}, images={})
    for look in (lambda: add_torchvision("images"), lambda: _check_engine(config)):
        with pytest.raises(ConfigError, match=r"images.*make torchvision.*transformers"):
            look()
    _check_engine(make_config(rollout={"engine": "vllm"}))


def test_torchvision_is_on_the_path_of_an_engine_with_pictures_and_its_processes_only(no_torchvision):
    (no_torchvision / "torchvision").mkdir(parents=True)
    assert str(no_torchvision) not in sys.path
    add_torchvision("images")
    assert sys.path[-1] == str(no_torchvision)
    assert os.environ["PYTHONPATH"] == f"/theirs{os.pathsep}{no_torchvision}"


def test_servers_of_a_judge_that_sees_have_torchvision_on_their_path_where_it_is_here(no_torchvision):
    assert seeing_environment({"A": "1"}) == {"A": "1"}
    no_torchvision.mkdir()
    assert seeing_environment({"A": "1"}) == {"A": "1", "PYTHONPATH": str(no_torchvision)}

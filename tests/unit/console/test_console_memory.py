"""What `tidemill check` says of memory: which machine, what it takes, what to set."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.checked_runs import write_run
from tidemill.common.config import RunConfig
from tidemill.common.errors import ConfigError
from tidemill.common.process import gpus
from tidemill.services.console.check import memory, preflight
from tidemill.services.console.check.memory import (
    GIB,
    check_memory,
    machine_named,
    print_machine,
    print_memory,
)
from tidemill.services.console.check.preflight import examine

PARTS = {
    "parts": {"master weights": 3.0 * GIB, "crumbs": 0.001 * GIB},
    "peak": 3.0 * GIB,
    "running": 3.0 * GIB,
}
FIT: dict[str, Any] = {
    "ranks": 2, "context": 1, "experts": 1, "tokens": 4096, "recomputed": True, "engines": 1, "ways": 2,
    "trainer": PARTS, "host": PARTS, "takes_turns": False,
    "engine": {"parts": {"weights": 1.0 * GIB}, "room": 2.0, "sequence": 1.0, "num_sequences": 2},
    "problems": [], "settings": {},
}  # fmt: skip
MACHINE = {"gpus": 4, "gpu_bytes": 8 * GIB, "host_bytes": None}


def config() -> RunConfig:
    return RunConfig.model_validate({"model": {"path": "m", "max_model_len": 8192}, "data": {"train": "t"}})


def answer(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    monkeypatch.setattr(memory, "compute_memory", lambda *_: FIT | changes)


def test_what_fits_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch)
    lines, problems = check_memory(config(), MACHINE)
    assert lines == [
        "trainer: 2 x 3.0 of 8.0 GiB, passes of 8,192 tokens, layers computed again: master weights 3.0",
        "engines: 1 on 2 GPUs each: weights 1.0; the KV cache holds 2 sequences of 8,192 tokens",
        "host: 3.0 GiB: master weights 3.0",
    ]
    assert problems == []


def test_what_does_not_fit_comes_with_fields_to_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = {"trainer.num_ranks": 4, "trainer.gradient_checkpointing": True, "trainer.shard_ranks": None}
    answer(monkeypatch, problems=["too large"], settings=settings)
    _, problems = check_memory(config(), MACHINE)
    assert problems[0] == "memory: too large"
    wanted = "trainer.num_ranks=4, trainer.gradient_checkpointing=true, trainer.shard_ranks=null"
    assert problems[1].endswith(wanted)
    (tmp_path / "c.yaml").write_text("model: {path: m}\ndata: {train: t}\n")
    with pytest.raises(ConfigError, match="too large"):
        print_memory(tmp_path / "c.yaml", [], MACHINE)
    with pytest.raises(ConfigError, match="has no GPU"):
        print_memory(tmp_path / "c.yaml", [], None)
    answer(monkeypatch, problems=["too large"])
    assert "take more GPUs" in check_memory(config(), MACHINE)[1][1]


def test_the_machine_is_the_one_named_else_this_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert machine_named(8, 80.0, None) == {"gpus": 8, "gpu_bytes": 80.0 * GIB, "host_bytes": None}
    monkeypatch.setattr(gpus, "TOOL", str(tmp_path / "nowhere"))
    assert machine_named(None, None, 10.0) is None
    with pytest.raises(ConfigError, match="--gpu-gib"):
        machine_named(8, None, None)
    tool = tmp_path / "tool"
    tool.write_text(
        '#!/bin/sh\n[ "$1" = -L ] && printf "GPU 0: A\\nGPU 1: B\\n" || printf "81559\\n40960\\n"\n'
    )
    tool.chmod(0o755)
    monkeypatch.setattr(gpus, "TOOL", str(tool))
    here = machine_named(None, None, None)
    assert here is not None and (here["gpus"], here["gpu_bytes"]) == (2, 40 * GIB), "the smaller of two"
    assert here["host_bytes"] > 0


def test_a_check_tells_memory_and_a_model_that_cannot_be_measured_is_no_mistake(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(preflight, "check_reward", lambda *_: {"called": [], "reads": {}})
    path = write_run(tmp_path)
    answer(monkeypatch)
    assert "2 x 3.0 of 8.0 GiB" in examine(path, machine=MACHINE).memory[0]
    answer(monkeypatch, problems=["too large"])
    with pytest.raises(ConfigError, match="too large"):
        examine(path, machine=MACHINE)

    def refuse(*_: Any) -> Any:
        raise ConfigError("no layers")

    monkeypatch.setattr(memory, "compute_memory", refuse)
    assert "was not computed: no layers" in examine(path, machine=MACHINE).notes[-1]
    assert examine(path).memory == []


def test_a_machine_on_which_the_run_would_fail_ends_the_check(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.yaml").write_text("model: {path: m}\ndata: {train: t}\n")
    slow = {"what": "disk", "text": "0.01 GB/s", "remedy": "take a local disk", "is_problem": False}
    full = {"what": "/dev/shm", "text": "64 MiB", "remedy": "--shm-size 8g", "is_problem": True}
    monkeypatch.setattr(memory, "examine_machine", lambda *_: [slow])
    print_machine(tmp_path / "c.yaml", [], as_json=False)
    assert "take a local disk" in capsys.readouterr().out
    monkeypatch.setattr(memory, "examine_machine", lambda *_: [slow, full])
    with pytest.raises(ConfigError, match="--shm-size 8g"):
        print_machine(tmp_path / "c.yaml", [], as_json=False)

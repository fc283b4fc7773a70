"""Containers for tests: of a real engine where `TIDEMILL_TEST_IMAGE` names an image, else of the stand-in."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import stand_in_docker

IMAGE = os.environ.get("TIDEMILL_TEST_IMAGE", "")
"""Image with `sleep`, on the engine that `docker` reaches; `make compose-test` sets it."""


class Containers:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        """The stand-in's; empty with a real engine."""

    def docker(self, *arguments: str) -> str:
        ended = subprocess.run(["docker", *arguments], capture_output=True, text=True, check=True)
        return ended.stdout.strip()

    def start(self, **labels: str) -> str:
        """Start a container; returns its id. Two underscores in a label's key are a dot."""
        options = []
        for key, value in labels.items():
            options += ["--label", f"{key.replace('__', '.')}={value}"]
        return self.docker("run", "-d", "--network", "none", *options, IMAGE or "image", "sleep", "600")

    @property
    def ids(self) -> set[str]:
        listed = self.docker("ps", "-a", "--no-trunc", "--format", '{{.ID}}\t{{.Label "tidemill.test"}}')
        return {line.split("\t")[0] for line in listed.splitlines()}

    @contextlib.contextmanager
    def engine_away(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """While the engine does not answer."""
        with monkeypatch.context() as patch:
            if IMAGE:
                patch.setenv("DOCKER_HOST", f"unix://{self.folder}/nobody.sock")
            else:
                (self.folder / "away").touch()
            yield
        (self.folder / "away").unlink(missing_ok=True)


class HangingRemoval:
    """A `docker` for the front of PATH, whose removals do not end: for who is killed meanwhile."""

    def __init__(self, folder: Path) -> None:
        program = folder / "hanging" / "docker"
        program.parent.mkdir()
        self._pids = folder / "removals"
        program.write_text(
            f'#!/bin/sh\n[ "$1" = rm ] && echo $$ >> {self._pids} && exec sleep 600\n'
            f'exec {shutil.which("docker")} "$@"\n'
        )
        program.chmod(0o755)
        self.path = f"{program.parent}:{os.environ['PATH']}"

    @property
    def has_begun(self) -> bool:
        return self._pids.exists() and bool(self._pids.read_text())

    def end(self) -> None:
        """Kill what hangs; nothing has been removed by it."""
        for pid in self._pids.read_text().split():
            os.kill(int(pid), signal.SIGKILL)


@contextlib.contextmanager
def containers_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Containers]:
    """Containers of one test; those that it leaves are removed."""
    folder.mkdir()
    if not IMAGE:
        program = folder / "bin" / "docker"
        program.parent.mkdir()
        # Not by the test's environment: programs of users get a part of it.
        where = f"{stand_in_docker.FOLDER}={folder}"
        run = f'{sys.executable} -I -S {stand_in_docker.__file__} "$@"'
        program.write_text(f"#!/bin/sh\n{where} exec {run}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    containers = Containers(folder)
    before = containers.ids
    try:
        yield containers
    finally:
        if new := containers.ids - before:
            containers.docker("rm", "-f", "-v", *new)

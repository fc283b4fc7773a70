"""A Docker engine and Compose: the ones of this machine, or an engine of the test's own."""

import contextlib
import os
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

START_TIMEOUT_S = 60.0
MAX_STARTS = 3
COMMAND_TIMEOUT_S = 1800.0


class MissingError(Exception):
    """Something that the test needs is not on this machine."""


class Docker:
    """`docker` commands on one engine; an engine that was started here is stopped at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = dict(os.environ)
        self._engine: Engine | None = None

    def __enter__(self) -> "Docker":
        if shutil.which("docker") is None:
            raise MissingError("docker is not on PATH: install Docker (Debian: docker.io)")
        if self.succeeds("version"):
            return self
        self._start_engine()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._engine is not None:
            self._engine.stop()

    def __call__(self, *arguments: str, timeout_s: float = COMMAND_TIMEOUT_S, **options: Any) -> str:
        """Run one docker command; returns what it printed."""
        return run(["docker", *arguments], self.env, timeout_s, **options)

    def succeeds(self, *arguments: str) -> bool:
        ended = subprocess.run(["docker", *arguments], env=self.env, capture_output=True, timeout=60)
        return ended.returncode == 0

    def has_image(self, name: str) -> bool:
        return self.succeeds("image", "inspect", name)

    def compose_command(self) -> list[str]:
        if self.succeeds("compose", "version"):
            return ["docker", "compose"]
        if executable := shutil.which("docker-compose"):
            return [executable]
        raise MissingError("no Compose: install the plugin of Docker, or docker-compose 1.29 or newer")

    def _start_engine(self) -> None:
        """No engine answers: start one with a folder and a socket of its own."""
        self._engine = Engine(self.folder)
        self._engine.start()
        self.env["DOCKER_HOST"] = self._engine.address


class Engine:
    """A Docker engine with a folder and a socket of its own."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self.address = f"unix://{folder}/docker.sock"
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, also after it was killed; returns when it answers."""
        if os.geteuid() != 0 or shutil.which("dockerd") is None:
            raise MissingError("no Docker engine answers, and starting one takes root and dockerd")
        self.folder.mkdir(parents=True, exist_ok=True)
        # It gives up where its containerd takes more than 15 seconds, as on a busy machine.
        for _ in range(MAX_STARTS):
            self._process = self._launch()
            if self._answers(self._process):
                return
        tail = (self.folder / "dockerd.log").read_text(errors="replace")[-1500:]
        raise MissingError(f"the Docker engine did not start:\n{tail}")

    def _launch(self) -> "subprocess.Popen[bytes]":
        paths = ["--data-root", f"{self.folder}/data", "--exec-root", f"{self.folder}/exec"]
        command = ["dockerd", *paths, "--pidfile", f"{self.folder}/dockerd.pid", "-H", self.address]
        with open(self.folder / "dockerd.log", "ab") as log:
            return subprocess.Popen(
                [*command, *self._options], stdout=log, stderr=log, start_new_session=True
            )

    def _answers(self, process: "subprocess.Popen[bytes]") -> bool:
        """Wait until it answers; False where it has ended, or takes too long."""
        deadline = time.monotonic() + START_TIMEOUT_S
        ask = ["docker", "-H", self.address, "version"]
        while subprocess.run(ask, capture_output=True).returncode:
            if process.poll() is not None:
                return False
            if time.monotonic() > deadline:
                process.kill()
                process.wait()
                return False
            time.sleep(0.2)
        return True

    def kill(self) -> None:
        """SIGKILL to the engine: its containers run on."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        (self.folder / "dockerd.pid").unlink(missing_ok=True)

    def stop(self) -> None:
        """Stop it, and its containers; also what an engine that was killed has left."""
        assert self._process is not None
        self._process.terminate()
        self._process.wait(START_TIMEOUT_S)
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if f"{self.folder}/exec/containerd/containerd.sock" in process.cmdline():
                    process.kill()
        mounted = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        for folder in sorted(mounted, reverse=True):
            if folder.startswith(f"{self.folder}/"):
                subprocess.run(["umount", "-l", folder], check=True)


def run(command: list[str], env: dict[str, str], timeout_s: float = COMMAND_TIMEOUT_S, **options: Any) -> str:
    """Run a command; an error ends the test with what it said."""
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout_s, **options)
    if ended.returncode:
        said = (ended.stdout + ended.stderr)[-3000:]
        raise RuntimeError(f"{' '.join(command)}: exit code {ended.returncode}\n{said}")
    return ended.stdout

"""One node: a Compose project with an .env of its own."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from infra.make_env import filled
from tests.compose.docker import Docker, run
from tests.compose.images import Images
from tests.support.preloaded import REPO

POLL_S = 1.0
T = TypeVar("T")


class Project:
    """Compose commands for one node; `settings` go into its .env."""

    def __init__(self, docker: Docker, name: str, env_file: Path, images: Images, *profiles: str) -> None:
        self.docker = docker
        self.name = name
        self.env_file = env_file
        self._left_out = images.left_out
        self._command = [*docker.compose_command(), "-p", name, "--env-file", str(env_file)]
        self._command += ["-f", str(REPO / "docker-compose.yml")]
        self._profiles = [word for profile in profiles for word in ("--profile", profile)]
        self.set(**images.settings)

    def set(self, **settings: str) -> None:
        self.env_file.write_text(filled(self.env_file.read_text(), settings))

    def compose(self, *arguments: str, timeout_s: float = 600.0) -> str:
        return run([*self._command, *self._profiles, *arguments], self.docker.env, timeout_s, cwd=REPO)

    def up(self, services: tuple[str, ...]) -> None:
        self.compose("up", "-d", *(name for name in services if name not in self._left_out))

    def scale(self, service: str, count: int) -> None:
        """As an operator does it, while everything runs."""
        self.compose("up", "-d", "--no-recreate", "--scale", f"{service}={count}", service)

    def containers(self, service: str) -> list[str]:
        """Ids of the running containers of a service."""
        labels = [
            f"label=com.docker.compose.project={self.name}",
            f"label=com.docker.compose.service={service}",
        ]
        filters = [word for label in labels for word in ("--filter", label)]
        return self.docker("ps", "-q", *filters).split()

    def inspect(self, container: str) -> dict[str, Any]:
        facts: dict[str, Any] = json.loads(self.docker("inspect", container))[0]
        return facts

    def kill(self, service: str) -> str:
        """SIGKILL a container's processes without asking Docker, which must find out; returns its id."""
        container = self.containers(service)[0]
        os.kill(self.inspect(container)["State"]["Pid"], signal.SIGKILL)
        return container

    def restarts_of(self, container: str) -> int:
        """How often Docker has started a container again."""
        return int(self.inspect(container)["RestartCount"])

    def status(self) -> dict[str, Any]:
        try:
            status: dict[str, Any] = json.loads(self.console("status", "--json"))
        except (RuntimeError, ValueError):
            return {}
        return status

    def console(self, *arguments: str) -> str:
        return self.compose("run", "--rm", "-T", "console", *arguments, timeout_s=180)

    def logs(self, service: str) -> str:
        return self.compose("logs", "--no-color", service)

    def down(self) -> None:
        self.compose("down", "-v", "-t", "5", "--remove-orphans")


def wait_for(awaited: str, check: Callable[[], T], timeout_s: float) -> T:
    """The first true answer of `check`.

    Raises:
        RuntimeError: it does not come in time.
    """
    deadline = time.monotonic() + timeout_s
    while not (value := check()):
        if time.monotonic() > deadline:
            raise RuntimeError(f"not within {timeout_s:g} s: {awaited}")
        time.sleep(POLL_S)
    print(f"  {awaited}", flush=True)
    return value

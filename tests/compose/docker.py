"""The Docker engine and the Compose of this machine."""

import shutil
import subprocess
from typing import Any

COMMAND_TIMEOUT_S = 1800.0


class MissingError(Exception):
    """Something that the test needs is not on this machine."""


class Docker:
    """`docker` commands on this machine's engine."""

    def __call__(self, *arguments: str) -> str:
        """Run one docker command; returns what it printed."""
        return run(["docker", *arguments])

    def succeeds(self, *arguments: str) -> bool:
        return subprocess.run(["docker", *arguments], capture_output=True, timeout=60).returncode == 0

    def compose_command(self) -> list[str]:
        """`docker compose`, or the older `docker-compose`.

        Raises:
            MissingError: there is no Docker, no engine that answers, or no Compose.
        """
        if shutil.which("docker") is None or not self.succeeds("version"):
            raise MissingError("no Docker engine answers: install Docker (Debian: docker.io) and start it")
        if self.succeeds("compose", "version"):
            return ["docker", "compose"]
        if found := shutil.which("docker-compose"):
            return [found]
        raise MissingError("no Compose: install the plugin of Docker, or docker-compose 1.29 or newer")


def run(command: list[str], timeout_s: float = COMMAND_TIMEOUT_S, **options: Any) -> str:
    """Run a command; an error ends the test with what it said."""
    ended = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, **options)
    if ended.returncode:
        said = (ended.stdout + ended.stderr)[-3000:]
        raise RuntimeError(f"{' '.join(command)}: exit code {ended.returncode}\n{said}")
    return ended.stdout

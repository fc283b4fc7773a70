"""Lists and removes containers of sessions through the command of Docker or Podman; never another one."""

import asyncio
import contextlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidemill.services.rollout.containers.names import SessionName, read_name

LABELS = (
    "tidemill.session",
    "verifiers.run",
    "com.docker.compose.project",
    "io.podman.compose.project",
)
"""Labels that may have a session's name: ours, that of verifiers (`VF_RUN_ID`), those of Compose
(`COMPOSE_PROJECT_NAME`)."""
NUM_FIELDS = 3
"""Fields of a container before its labels: id, state and status."""
TIMEOUT_S = 30.0
REMOVAL_TIMEOUT_S = 120.0
GONE = ("No such container", "no such container", "is already in progress")
"""What the engine says of a container that somebody else removes or has removed."""
EXITED = re.compile(r"Exited \((\d+)\)")
RUNNING = frozenset({"running", "restarting", "paused", "created"})


class EngineAwayError(Exception):
    """The command cannot be run, or the container engine does not answer."""


@dataclass(frozen=True, slots=True)
class Container:
    container_id: str
    session: SessionName
    state: str
    """As the engine says it: `running`, `exited`, `dead`."""
    status: str = ""
    """The same in words, such as `Exited (137) 2 seconds ago`."""

    @property
    def is_running(self) -> bool:
        return self.state in RUNNING

    @property
    def exit_code(self) -> int | None:
        """None while it runs, and where the engine does not say it."""
        match = EXITED.search(self.status)
        return int(match[1]) if match and not self.is_running else None


class ContainerCommand:
    def __init__(self, program: str) -> None:
        """`program`: docker or podman."""
        self.program = program

    async def list_containers(self) -> list[Container]:
        """All containers on this node that carry the name of a session, of any run.

        Raises:
            EngineAwayError: the engine does not answer.
        """
        if self.program == "podman":
            rows = _podman_rows(await self._run("ps", "-a", "--no-trunc", "--format", "json"))
        else:
            # Docker's JSON has all labels in one string, in which a value may look like another label.
            fields = ["{{.ID}}", "{{.State}}", "{{.Status}}"]
            fields += [f'{{{{.Label "{label}"}}}}' for label in LABELS]
            output = await self._run("ps", "-a", "--no-trunc", "--format", "\t".join(fields))
            rows = [line.split("\t") for line in output.splitlines()]
        containers = []
        for row in rows:
            # The label of a container that is not ours may have a line break: what follows is no container.
            if len(row) < NUM_FIELDS:
                continue
            container_id, state, status, *values = row
            session = next(filter(None, map(read_name, values)), None)
            if session is not None:
                containers.append(Container(container_id, session, state, status))
        return containers

    async def remove(self, containers: Iterable[Container]) -> int:
        """Kill and remove containers with their anonymous volumes; returns how many.

        Raises:
            EngineAwayError: the engine does not answer, or refuses.
        """
        ids = [container.container_id for container in containers]
        if not ids:
            return 0
        await self._run("rm", "-f", "-v", *ids, timeout_s=REMOVAL_TIMEOUT_S, is_fine=_says_gone)
        return len(ids)

    async def read_data_folder(self) -> Path:
        """The folder of the engine's data, on whose disk containers write; the engine's machine has it.

        Raises:
            EngineAwayError: the engine does not answer, or does not say it.
        """
        field = "{{.DockerRootDir}}" if self.program == "docker" else "{{.Store.GraphRoot}}"
        folder = (await self._run("info", "--format", field)).strip()
        if not folder.startswith("/"):
            raise EngineAwayError(
                f"{self.program} info: expected the folder of its data, got {folder!r:.200}"
            )
        return Path(folder)

    async def _run(self, *arguments: str, timeout_s: float = TIMEOUT_S, is_fine: Any = None) -> str:
        """Run the command; returns what it wrote. `is_fine` reads the errors of one that failed."""
        command = f"{self.program} {arguments[0]}"
        pipe = asyncio.subprocess.PIPE
        nothing = asyncio.subprocess.DEVNULL
        try:
            process = await asyncio.create_subprocess_exec(
                self.program, *arguments, stdin=nothing, stdout=pipe, stderr=pipe, start_new_session=True
            )
        except OSError as error:
            raise EngineAwayError(f"{command} cannot be run: {error}") from error
        try:
            # Not `wait_for`: in Python 3.11 it loses a cancellation that comes as the command ends.
            async with asyncio.timeout(timeout_s):
                output, errors = await process.communicate()
        except TimeoutError:
            raise EngineAwayError(f"{command} has not ended after {timeout_s:.0f} s") from None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
        said = errors.decode(errors="replace").strip()
        if process.returncode and not (is_fine is not None and is_fine(said)):
            raise EngineAwayError(f"{command} ended with exit code {process.returncode}: {said[-500:]}")
        return output.decode(errors="replace")


def _says_gone(errors: str) -> bool:
    """Whether every error is of a container that is gone, or going."""
    others = errors.splitlines()
    for words in GONE:
        others = [line for line in others if words not in line]
    return not others


def _podman_rows(output: str) -> list[list[str]]:
    """The rows of podman's list. Raises EngineAwayError: it is none, as where a warning goes before it."""
    try:
        return [_podman_row(entry) for entry in json.loads(output or "[]") or ()]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise EngineAwayError(f"podman ps: expected a list in JSON, got {output[:200]!r}") from error


def _podman_row(entry: dict[str, Any]) -> list[str]:
    labels = entry.get("Labels") or {}
    values = [str(labels.get(label, "")) for label in LABELS]
    status = f"Exited ({entry.get('ExitCode')})" if entry.get("Exited") else ""
    return [str(entry["Id"]), str(entry.get("State", "")), status, *values]

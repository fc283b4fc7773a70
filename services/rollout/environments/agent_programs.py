"""Agent programs: a function, or a command. Each play of one has a process, killed with all it started."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

import psutil
import structlog

from tidemill.common.errors import ConfigError, EnvironmentFaultError
from tidemill.common.process.children import (
    frame_of,
    kill_group,
    receive,
    variables_for_users,
)
from tidemill.common.process.programs import Child, ending_in_words
from tidemill.common.process.worker_process import StartupError, WorkerProcess
from tidemill.services.rollout.environments.agent_host import result_of, variables_of
from tidemill.services.rollout.gateway.program_errors import ProgramError, cause_in

log = structlog.get_logger(__name__)

COMMAND = "$ "
SESSION, WORKER = "TIDEMILL_SESSION", "TIDEMILL_WORKER"
"""Variables by which what a dead worker has left is found."""
LONGEST_VARIABLE = 100_000
"""Linux refuses to start a program with a longer one; a row is on stdin, too."""
TAIL_BYTES = 16_384
TAIL_CHARS = 2_000
PIPES_CLOSE_S = 1.0


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a program is given for one session."""

    name: str
    row: Mapping[str, Any]
    root: str
    key: str
    model: str

    @property
    def offered(self) -> dict[str, Any]:
        """The arguments of a function."""
        urls = {"base_url": f"{self.root}/v1", "anthropic_base_url": self.root}
        return {"row": dict(self.row), **urls, "api_key": self.key, "model": self.model}

    @property
    def row_json(self) -> str:
        return json.dumps(self.row, default=str)

    @property
    def variables(self) -> dict[str, str]:
        """The variables of its process."""
        return {
            **variables_of(self.root, self.key, self.model),
            SESSION: self.name,
            WORKER: _mark_of(psutil.Process()),
        }


@dataclass(frozen=True, slots=True)
class Result:
    """What a program says about its session."""

    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    is_truncated: bool = False
    """An error ended it, and the session is scored by what is there."""


class AgentProgram(Protocol):
    """Plays sessions. Cancelling `run` kills the process of that session."""

    is_heavy_to_start: bool
    """Whether each session starts a new interpreter, or whatever it is."""

    async def start(self) -> None:
        """Be ready. Raises ConfigError: the program cannot be run."""

    async def run(self, assignment: Assignment) -> Result:
        """Play one session. Raises EnvironmentFaultError: it failed."""

    async def close(self) -> None:
        """End what was started."""


def program_of(agent: str, model: str = "model") -> AgentProgram:
    """That of the config's field, for a model of that name."""
    if agent.startswith(COMMAND):
        return CommandProgram(agent.removeprefix(COMMAND))
    return HostedFunction(agent, model)


class CommandProgram:
    """A command of the shell; the last line of its output may be a result in JSON."""

    is_heavy_to_start = True

    def __init__(self, command: str) -> None:
        self._command = command

    async def start(self) -> None:
        """Nothing to load."""

    async def run(self, assignment: Assignment) -> Result:
        """Start it, give it the row, and wait for its end."""
        row = assignment.row_json
        short = {"TIDEMILL_ROW": row} if len(row.encode()) < LONGEST_VARIABLE else {}
        process = _started(self._command, variables_for_users() | assignment.variables | short)
        assert process.stdin and process.stdout and process.stderr
        tails = [asyncio.create_task(_tail(pipe)) for pipe in (process.stdout, process.stderr)]
        try:
            await _give(process.stdin, row.encode())
            await _ended(process)
        finally:
            kill_group(process)
            # What left the group may hold the pipes open.
            await asyncio.wait(tails, timeout=PIPES_CLOSE_S)
            output, errors = (task.result() if task.done() else b"" for task in tails)
            for task in tails:
                task.cancel()
            code = await asyncio.to_thread(process.wait)
        said = errors.decode(errors="replace").strip()[-TAIL_CHARS:]
        if code:
            cause = cause_in(errors.decode(errors="replace"), code)
            raise ProgramError(f"the agent's command ended with {ending_in_words(code)}: {said}", cause)
        return _last_line(output)

    async def close(self) -> None:
        """Every session has killed its own."""


class HostedFunction:
    """A Python function, plain or async, that a host process runs in a fork of its own for each session."""

    is_heavy_to_start = False

    def __init__(self, reference: str, model: str) -> None:
        self._reference, self._model = reference, model
        self._folder: Path | None = None
        self._host: WorkerProcess | None = None
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        """Import the function, in the host."""
        self._folder = Path(tempfile.mkdtemp(prefix="tidemill-agent-"))
        self._host = WorkerProcess(Child.AGENTS, f"rollout.environment.agent {self._reference}")
        spec = {"agent": self._reference, "path": str(self._socket), "model": self._model}
        try:
            await self._host.start(spec)
        except StartupError as error:
            await self.close()
            raise ConfigError(str(error)) from None

    async def run(self, assignment: Assignment) -> Result:
        """Have the host fork, and wait for the result. A host that has died is started again."""
        async with self._starting:
            if self._host is None or not self._host.is_sound:
                await self.close()
                await self.start()
        pid = 0
        try:
            reader, writer = await asyncio.open_unix_connection(self._socket)
            try:
                pid = (await receive(reader))["pid"]
                offered = json.loads(json.dumps(assignment.offered, default=str))
                writer.write(frame_of({"offered": offered, "variables": assignment.variables}))
                result = await receive(reader)
            finally:
                writer.close()
                if pid:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.killpg(pid, signal.SIGKILL)
        except (OSError, asyncio.IncompleteReadError):
            raise EnvironmentFaultError(
                f"the process of the agent {self._reference} ended without a result; its output is in the "
                "log of the rollout worker",
                "died",
            ) from None
        if error := result.get("error"):
            raise ProgramError(f"the agent {self._reference} failed: {error}", result["cause"])
        return Result(**result)

    async def close(self) -> None:
        """End the host; the kernel ends what it has forked."""
        if self._host is not None:
            self._host.kill()
            await self._host.wait()
        if self._folder is not None:
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    @property
    def _socket(self) -> Path:
        assert self._folder is not None, "the program was never started"
        return self._folder / "host"


def end_leftovers(played: Container[str] = ()) -> int:
    """Kill what sessions have left on this machine; returns how many processes that were.

    That is what dead workers have left, and what of this one belongs to no session in `played`, which
    may change meanwhile: programs that left their group (`setsid`) before their session ended.
    """
    num_ended, own = 0, _mark_of(psutil.Process())
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            variables = process.environ()
            worker = variables.get(WORKER, "")
            is_left = variables.get(SESSION) not in played if worker == own else not _is_alive(worker)
            if worker and is_left:
                process.kill()
                num_ended += 1
    if num_ended:
        log.warning("killed what agents had left after their session", processes=num_ended)
    return num_ended


def _mark_of(process: psutil.Process) -> str:
    """Tells a process from others that have the same number later."""
    return f"{process.pid}:{process.create_time():.2f}"


def _is_alive(mark: str) -> bool:
    try:
        return _mark_of(psutil.Process(int(mark.partition(":")[0]))) == mark
    except (psutil.Error, ValueError):
        return False


def _started(command: str, variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """The process of a command, in a session and a group of its own."""
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, shell=True, stdin=pipe, stdout=pipe, stderr=pipe, env=variables, start_new_session=True
    )


async def _ended(process: subprocess.Popen[bytes]) -> None:
    """Wait for the end of a process, which is not reaped: so its number, and that of its group, stay its own
    until what it has left in the group is killed."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def end() -> None:
        if not ended.done():
            ended.set_result(None)

    def wait() -> None:
        # Already reaped, or the loop has ended: nobody waits any more.
        with contextlib.suppress(ChildProcessError, RuntimeError):
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            loop.call_soon_threadsafe(end)

    threading.Thread(target=wait, daemon=True).start()
    await ended


async def _give(pipe: IO[bytes], data: bytes) -> None:
    """Have it written, and the pipe closed after it."""
    transport, _ = await asyncio.get_running_loop().connect_write_pipe(asyncio.Protocol, pipe)
    transport.write(data)
    transport.close()


async def _tail(pipe: IO[bytes]) -> bytes:
    """The end of what comes out of a pipe."""
    stream, tail = asyncio.StreamReader(), b""
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), pipe
    )
    try:
        while chunk := await stream.read(TAIL_BYTES):
            tail = (tail + chunk)[-TAIL_BYTES:]
    finally:
        transport.close()
    return tail


def _last_line(output: bytes) -> Result:
    """The result in the last line of JSON, where there is one."""
    lines = output.decode(errors="replace").strip().splitlines()
    try:
        found = json.loads(lines[-1]) if lines else None
    except ValueError:
        return Result()
    if not isinstance(found, dict) or not found.keys() & {"reward", "metrics"}:
        return Result()
    return Result(**result_of(found, "the last line of its output says"))

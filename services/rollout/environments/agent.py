"""`use: agent`: sessions of a program that only knows an address and a key.

Guarantees: every play has an address of its own, and all ids, logprobs and versions that pass it are kept; a
program that never asks the model, or fails because of the machine, is an environment's fault, and played
again; one that fails because of the model (for unknown causes see `on_program_error`), or runs too long after
the model has answered, ends its session; what it started is killed as its play ends, however it ends.
"""

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Container
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import structlog

from tidemill.common.config.run import RunConfig
from tidemill.common.data.dataset import PROMPT
from tidemill.common.errors import ConfigError, EnvironmentFaultError, MachineFaultError
from tidemill.common.process.children import frame_of, receive
from tidemill.common.process.programs import Child
from tidemill.common.process.shortage import fault_in, is_machine_fault, machine_faults, make_fault
from tidemill.common.process.worker_process import StartupError, WorkerProcess
from tidemill.common.wire.messages import Ticket
from tidemill.services.rollout.environments.agent_host import COMMAND
from tidemill.services.rollout.environments.environment import Closing, Row, chat_of, row_of
from tidemill.services.rollout.environments.program_errors import ProgramError
from tidemill.services.rollout.environments.stages import check_machine
from tidemill.services.rollout.gateway.pace import EnginePace
from tidemill.services.rollout.gateway.server import Gateway
from tidemill.services.rollout.gateway.session import GatewaySession
from tidemill.services.rollout.sessions.chat import ChatFormat
from tidemill.services.rollout.sessions.parts import Recording
from tidemill.services.rollout.sessions.picture_parts import with_data_urls
from tidemill.services.rollout.sessions.player import Ask, Decode, OpenChat, Played, Player, Read

if TYPE_CHECKING:
    from tidemill.services.rollout.sessions.pictures import SessionPictures

log = structlog.get_logger(__name__)

PICTURES_S = 0.1
"""Between two looks at the time of a session whose pictures are being stored or read."""
SWEEP_S = 5.0
"""How long after the end of a session leftover processes are looked for, with those of sessions that end
meanwhile."""
START_S = 10.0
"""A program that has not asked after this long no longer takes a place among those that start."""
GRACE_S = 5.0
"""A program whose session has ended gets so long to remove its containers."""
READ_BYTES = 65_536
PROGRAM_ERROR = "program_error"
"""Metric of a session: 1 if an error of its program ended it."""
NOT_IN_ALIAS = re.compile(r"[^A-Za-z0-9._-]+")
"""Clients read a slash or a colon in a model's name as the end of a provider's."""
SESSION = "TIDEMILL_SESSION"
WORKER = "TIDEMILL_WORKER"
"""Environment variables by which leftover processes are found."""
SESSION_NAME = "TIDEMILL_SESSION_NAME"
"""Environment variable with the label for the session's containers."""


class AgentProgram:
    """A Python function, plain or async, or a shell command. A host process forks a process for each session,
    which is killed with all it started."""

    def __init__(self, agent: str, model: str = "model", placeholder_key: str = "none") -> None:
        self._agent = agent
        self._spec = {"agent": agent, "model": model, "placeholder_key": placeholder_key}
        self.is_heavy_to_start = agent.startswith(COMMAND)
        """Whether each session starts a new program, such as an interpreter."""
        self._folder: Path | None = None
        self._host: WorkerProcess | None = None
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        """Load the program, in the host.

        Raises:
            ConfigError: it cannot be run.
            MachineFaultError: this machine is short of something.
        """
        # Only this user may enter a folder of mkdtemp: access to the socket in it lets one run the program.
        with machine_faults("the folder of the agent's host could not be made"):
            self._folder = Path(tempfile.mkdtemp(prefix="tidemill-agent-"))
        try:
            self._host = WorkerProcess(Child.AGENTS, f"rollout.environment.agent {self._agent}")
            await self._host.start(self._spec | {"path": str(self._folder / "host")})
        except StartupError as error:
            await self.close()
            if error.shortage:
                raise make_fault(error.shortage, "the agent's host could not start", str(error)) from None
            raise ConfigError(str(error)) from None
        except MachineFaultError:
            await self.close()
            raise

    async def run(self, row: Row, root: str, session: GatewaySession, name: str = "") -> Closing:
        """Play the session at the address `root`: have the host fork, and wait for the result. A host that
        has died is started again. Cancelling it kills the session's processes; where the session has a `name`
        for containers, its program is first asked to end.

        Raises:
            ProgramError: the program failed.
            EnvironmentFaultError: its process died.
            MachineFaultError: no process can be started for it: this machine is short of something.
        """
        # Many sessions find a dead host at once: one of them starts it, the others wait for that.
        async with self._starting:
            host = self._host
            if host is None or not host.is_sound:
                await self.close()
                if host is not None:
                    # Only now: the reason is known once its exit code is.
                    log.warning(
                        "the process that forks for each session has died; it is started again",
                        agent=self._agent,
                        reason=host.end_reason,
                    )
                await self.start()
        assert self._folder is not None
        variables = {SESSION: session.token, WORKER: _mark_of(psutil.Process())}
        if name:
            variables |= variables_for_containers(name)
        asked = {"row": row, "root": root, "key": session.key, "variables": variables}
        pid = 0
        result: dict[str, Any] | None = None
        try:
            reader, writer = await asyncio.open_unix_connection(self._folder / "host")
            try:
                # Before the row is sent: however this ends, the group to kill is known.
                begun = await receive(reader)
                check_begun(begun, "the agent's process could not be forked")
                pid = begun["pid"]
                # Through JSON, which writes what a frame cannot hold, such as dates, as text.
                writer.write(frame_of(json.loads(json.dumps(asked, default=str))))
                result = await receive(reader)
            finally:
                if name and pid and result is None:
                    await _ask_to_end(pid, reader)
                writer.close()
                # The group's leader lives until this kill, so its id cannot have been reused.
                if pid:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.killpg(pid, signal.SIGKILL)
        except (OSError, asyncio.IncompleteReadError) as error:
            fault = fault_in(error, f"the host of the agent {self._agent} cannot be reached")
            if fault is not None:
                raise fault from error
            raise EnvironmentFaultError(
                f"the process of the agent {self._agent} ended without a result; its output is in the log of "
                "the rollout worker",
                "died",
            ) from None
        check_begun(result, "the agent's program could not be started")
        reason = result.get("error")
        if reason:
            problem = f"the agent {self._agent} failed: {reason}"
            if result.get("shortage"):
                check_machine(problem, result["shortage"])
            raise ProgramError(problem, result["cause"])
        return Closing(**result)

    async def close(self) -> None:
        if self._host is not None:
            self._host.kill()
            await self._host.wait()
            self._host = None
        if self._folder is not None:
            # A folder with one socket. Not on a thread: where none can be started, it would stay.
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def variables_for_containers(name: str) -> dict[str, str]:
    """Variables by which a program's libraries label the containers of its session."""
    return {
        SESSION_NAME: name,
        "VF_RUN_ID": name,
        "COMPOSE_PROJECT_NAME": name,
        # Its mark of a container's owner is the pid of a process that may be gone while the session goes on.
        "AGENTBOX_REAP_ORPHANS": "0",
    }


async def _ask_to_end(pid: int, reader: asyncio.StreamReader) -> None:
    """SIGTERM to the group of a session's program, which gets `GRACE_S` to remove its containers."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGTERM)
    with contextlib.suppress(TimeoutError, OSError):
        async with asyncio.timeout(GRACE_S):
            # Its end closes the connection; the leader of the group stays.
            while await reader.read(READ_BYTES):
                pass


def check_begun(answer: dict[str, Any], doing: str) -> None:
    """Check what the host said of a start.

    Raises:
        MachineFaultError: the machine was short of something.
        EnvironmentFaultError: it failed for another reason.
    """
    reason = answer.get("refused")
    if reason is None:
        return
    if answer["shortage"]:
        raise make_fault(answer["shortage"], doing, reason)
    raise EnvironmentFaultError(f"{doing}: {reason}", "start")


class AgentPlayer(Player):
    chat: ChatFormat

    def __init__(
        self,
        config: RunConfig,
        decode: Decode,
        open_chat: OpenChat,
        read: Read | None = None,
        pictures: "SessionPictures | None" = None,
    ) -> None:
        super().__init__(config, decode, open_chat, read, pictures)
        section = self.section
        self._max_model_len = config.model.max_model_len
        # What agents call the model: the last part of its path.
        model = NOT_IN_ALIAS.sub("-", config.model.path.rstrip("/").rpartition("/")[2]).strip("-") or "model"
        self._gateway = Gateway(model, section.gateway_host, section.structured_output == "refuse")
        self._pace = EnginePace()
        self._program = AgentProgram(section.agent, model, self._gateway.placeholder_key)
        self._starts = asyncio.Semaphore(len(os.sched_getaffinity(0)))
        """Places for programs that are starting: one for each core."""
        self._has_ended = asyncio.Event()
        self._sweeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Load the program and the tokenizer, and listen. Raises ConfigError: one of them cannot be used."""
        # Before anything starts: what a killed worker has left takes cores, ports and memory.
        await asyncio.to_thread(end_leftovers)
        self.chat = await asyncio.to_thread(self.open_chat)
        await self._program.start()
        await self._gateway.start()
        self._sweeper = asyncio.create_task(self._sweep(), name="sweeper")

    async def close(self) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.wait({self._sweeper})
        await self._gateway.close()
        await self._program.close()
        await asyncio.to_thread(end_leftovers)

    async def _sweep(self) -> None:
        """After sessions have ended, kill what left their groups: this looks at all processes."""
        while True:
            await self._has_ended.wait()
            await asyncio.sleep(SWEEP_S)
            self._has_ended.clear()
            try:
                await asyncio.to_thread(end_leftovers, self._gateway.sessions)
            except (OSError, RuntimeError) as error:
                # Short of threads or descriptors: what is left over now is found by the next look.
                if not is_machine_fault(error):
                    raise
                self._has_ended.set()

    async def play_once(self, ticket: Ticket, name: str, ask: Ask, num_faults: int) -> Played:
        container_name = await self.containers.begin(ask.session if isinstance(ask, Recording) else None)
        session = GatewaySession(
            self.chat,
            self.decode,
            ask,
            ticket.sampling,
            self.section,
            self._max_model_len,
            self.read,
            self._pace,
            self.pictures,
        )
        try:
            row = await self._row(ticket)
            with self._gateway.serving(session) as root:
                program = await self._start(row, root, session, container_name)
                try:
                    result = await self._watched(program, session)
                    # Before the session is closed, which ends what the engine has not answered yet.
                    fault = session.find_fault(result.is_late)
                    await self.containers.check(container_name, result.reward)
                finally:
                    # Inside `serving`: the program is killed before its address and its claims are removed.
                    program.cancel()
                    await asyncio.wait({program})
        finally:
            # After the program and its address have ended: no client waits for what is still generated.
            await session.close()
            self._has_ended.set()
            await self.containers.end(container_name)
        if not session.histories.recorded:
            raise EnvironmentFaultError(
                "the agent ended without an answer of the model; it must ask at the address it is given "
                "(base_url or OPENAI_BASE_URL)",
                "start",
            )
        if fault is not None:
            raise fault
        if not session.read_histories:
            raise EnvironmentFaultError("no answer of the model has reached the agent's program", "lost")
        if result.is_late and session.end == "done":
            session.late = "program"
            session.reached.append("timeout")
        played = session.played(result.reward, result.metrics, num_faults, ticket.images)
        return replace(played, finish="length") if result.is_truncated else played

    async def _row(self, ticket: Ticket) -> Row:
        """The row as the program gets it: with pictures its prompt is a chat in OpenAI's form, which the
        program can send as it is."""
        row = row_of(ticket)
        if self.pictures is None or not ticket.images:
            return row
        files = await self.pictures.read(ticket.images)
        return {**row, PROMPT: with_data_urls(chat_of(row[PROMPT]), files)}

    async def _start(
        self, row: Row, root: str, session: GatewaySession, container_name: str
    ) -> "asyncio.Task[Closing]":
        """Start the program. At most one for each core may be starting, until it asks: an interpreter and its
        libraries take seconds of a core, and with more at once they run into their own timeouts."""
        start_slot = contextlib.ExitStack()
        if self._program.is_heavy_to_start:
            await self._starts.acquire()
            start_slot.callback(self._starts.release)
            # Waiting for a place does not count as silence of the program.
            session.active_at = time.monotonic()
        program = asyncio.create_task(self._program.run(row, root, session, container_name))
        # Whichever comes first gives the place back; closing it again does nothing.
        program.add_done_callback(lambda _: start_slot.close())
        session.asked.add_done_callback(lambda _: start_slot.close())
        asyncio.get_running_loop().call_later(START_S, start_slot.close)
        return program

    async def _watched(self, program: "asyncio.Task[Closing]", session: GatewaySession) -> Closing:
        """Wait for the program's result, within the limits of time."""
        begun = time.monotonic()
        while not program.done():
            deadline = begun + self.section.session_timeout_s + session.taken_in_s
            now = time.monotonic()
            is_waiting = session.num_running > 0 or session.is_taking_in
            silent_s = 0.0 if is_waiting else now - session.active_at
            if silent_s >= self.section.call_timeout_s or now >= deadline:
                is_over = now >= deadline
                if session.read_histories and (is_over or self.section.truncates_late):
                    session.late = "session" if is_over else "program"
                    # Once the model has answered, it may be the reason that the program does not end: the
                    # session is truncated. It stays so, also if a turn ends before the program is killed.
                    session.reached.append("timeout" if session.end == "done" else session.end)
                    return Closing(self.section.program_error_value, is_late=is_over)
                raise EnvironmentFaultError(
                    f"the agent neither asked the model nor ended for {silent_s:.0f} s "
                    "(rollout.environment.call_timeout_s, session_timeout_s)",
                    "timeout",
                )
            left_s = min(deadline - now, self.section.call_timeout_s - silent_s)
            if session.is_taking_in:  # the deadline moves on meanwhile
                left_s = max(left_s, PICTURES_S)
            both: set[asyncio.Future[Any]] = {program, session.failed}
            # Not `wait_for`: at its limit it would cancel what it waits for.
            await asyncio.wait(both, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if session.failed.done():
                break
        # Before the program's own end: with an engine that fails every program fails as well.
        if session.failed.done():
            session.failed.result()
        try:
            return program.result()
        except ProgramError as error:
            return self._ended_by(error, session)

    def _ended_by(self, error: ProgramError, session: GatewaySession) -> Closing:
        """The result of a session whose program failed. Raises ProgramError: it is to be played again."""
        if session.reached:
            # Noted once more: a limit that one branch met counts now, even if other branches went on since.
            session.reached.append(session.reached[-1])
        value = self.section.program_error_value
        is_cut = session.end != "done"
        counts_unknown = self.section.on_program_error != "fault"
        is_models_fault = error.cause == "model" or (error.cause == "unknown" and counts_unknown)
        is_policys = error.cause != "machine" and (is_models_fault or is_cut)
        if not session.read_histories or not is_policys:
            raise error
        log.warning(
            "a program ended with an error, at a limit or because the model was wrong",
            end=session.end,
            outcome="truncated" if value is None else "value",
            error=str(error).rstrip().splitlines()[-1],
        )
        if value is not None:
            return Closing(value, {PROGRAM_ERROR: 1.0})
        return Closing(metrics={PROGRAM_ERROR: 1.0}, is_truncated=True)


def end_leftovers(played: Container[str] = ()) -> int:
    """Kill leftover processes of sessions on this machine; returns how many.

    They are those of dead workers, and those of this one that belong to none of the sessions `played`, which
    may change meanwhile: programs that left their group (`setsid`) before their session ended.
    """
    num_ended = 0
    own_mark = _mark_of(psutil.Process())
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            # Found by variables: a program that left its group and its parent has kept them.
            variables = process.environ()
            worker = variables.get(WORKER, "")
            if worker == own_mark:
                is_left_over = variables.get(SESSION) not in played
            else:
                is_left_over = not _is_alive(worker)
            if worker and is_left_over:
                process.kill()
                num_ended += 1
    if num_ended:
        log.warning("killed what agents had left after their session", processes=num_ended)
    return num_ended


def _mark_of(process: psutil.Process) -> str:
    """Identifies a process, also if its pid is reused later."""
    return f"{process.pid}:{process.create_time():.2f}"


def _is_alive(mark: str) -> bool:
    try:
        return _mark_of(psutil.Process(int(mark.partition(":")[0]))) == mark
    except (psutil.Error, ValueError):
        return False

"""Keeps the processes of a run alive until the run is over.

Invariant: a process that dies is started again, with growing pauses, as long as that makes sense. It does
not when the process says that the user made a mistake (exit code 2), when it ends on an instruction that this
CPU lacks, when it dies of the same cause at each of a few starts, or when it dies soon after its start many
times in a row; then all stop, and the message has the end of its log. When `run` returns, no process is left.
"""

import asyncio
import contextlib
import os
import re
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from tidemill.common.errors import ConfigError
from tidemill.common.process.failures import is_logged
from tidemill.common.process.programs import ending_in_words, is_illegal_instruction
from tidemill.common.process.shortage import is_machine_fault, make_fault, shortage_number
from tidemill.services.console.run.guard import Guard
from tidemill.services.console.run.service_status import ServiceStatus
from tidemill.services.console.text.formats import printable
from tidemill.services.console.up.forks import Forked, ForkServer
from tidemill.services.console.up.specs import ServiceSpec

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
HEALTHY_AFTER_S = 60.0
"""After a process has lived this long, the pause before its next start is the first one again."""
MAX_EARLY_DEATHS = 10
MAX_SAME_DEATHS = 5
SAME_WITHIN_S = 600.0
"""So many deaths in a row that name one cause, each within this time of its start, end the run: a start may
take minutes. A process that a signal ended names none."""
REAP_S = 5.0
MAX_REASON_CHARACTERS = 300
LEASING = ("rollout", "reward")
"""Roles whose workers hold entries of streams under leases."""
TAIL_BYTES = 8192
TAIL_LINES = 15


class ServiceProcess:
    """One start of one service.

    It is the leader of a session of its own, so that the terminal's Ctrl-C reaches only the console, which
    stops all in order. Its output goes to a log file that is appended to over restarts.
    """

    def __init__(
        self,
        spec: ServiceSpec,
        process: asyncio.subprocess.Process | Forked,
        log: Path,
        log_start: int,
        guard: Guard,
    ) -> None:
        self.spec = spec
        self.log = log
        self.pid = process.pid
        self.started = time.monotonic()
        self._process = process
        self._log_start = log_start
        self._guard = guard

    @classmethod
    async def start(
        cls,
        spec: ServiceSpec,
        env: Mapping[str, str],
        log: Path,
        guard: Guard,
        server: ForkServer | None = None,
    ) -> "ServiceProcess":
        """Start the process, with its output appended to `log`."""
        # To append: children of the start before may still write, and neither overwrites the other.
        with log.open("ab") as output:
            log_start = output.tell()
            forked = await server.start(spec, env, log) if server else None
            process = forked or await asyncio.create_subprocess_exec(
                *spec.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                env={**env, **spec.env},
                start_new_session=True,
            )
        # At once: a console that is killed before this line leaves the process unwatched.
        guard.watch(process.pid, "service")
        return cls(spec, process, log, log_start, guard)

    async def wait(self) -> int:
        """Wait for its end; returns the exit code, negative for a signal.

        Children that it left behind, such as the pool of a killed reward worker, are ended too.
        """
        code = await self._process.wait()
        # While the group has members its number is not reused; after that the guard must not use it.
        self.kill()
        self._guard.forget(self.pid)
        return code

    def terminate(self) -> None:
        """Ask it to finish or hand back what it holds, and to end."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """End its whole process group at once."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def output_tail(self) -> list[str]:
        """The last lines that this start has written."""
        with contextlib.suppress(OSError), open(self.log, "rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(self._log_start, end - TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()[-TAIL_LINES:]
        return []


class Ending(StrEnum):
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """How it ended; all but `ending` are those of a failure.

    Example: of a trainer that refuses its config: `exit_code` 2, `summary` "trainer cannot do this run (exit
    code 2)", `error` "model.path /m/x does not exist".
    """

    ending: Ending
    reason: str = ""
    """Why, with the end of the log."""
    exit_code: int = 0
    summary: str = ""
    """Why, in one line."""
    error: str = ""
    """The last error of the process, in one line."""
    log: Path | None = None


class SameCauses:
    """Counts the deaths in a row that name the same cause."""

    def __init__(self) -> None:
        self._last = ""
        self._count = 0

    def count(self, reason: str, code: int, age_s: float) -> int:
        """How many deaths, this one included, have named its cause; 0 where it names none."""
        # Times, ports and process ids differ from start to start.
        cause = re.sub(r"\d+", "#", reason) if code > 0 and age_s < SAME_WITHIN_S else ""
        self._count = self._count + 1 if cause and cause == self._last else int(bool(cause))
        self._last = cause
        return self._count


async def _never() -> bool:
    return False


class Supervisor:
    """Runs the processes of `specs` to the end of the run. `stop` drains them, `kill` does not."""

    def __init__(
        self,
        specs: Sequence[ServiceSpec],
        logs: Path,
        grace_s: float,
        on_event: Callable[[str], None],
        first_pause_s: float = FIRST_PAUSE_S,
        lease_s: float = 0.0,
    ) -> None:
        """Args:
        specs: the processes
        logs: the folder of their logs
        grace_s: how long they may take to end once they are asked to
        on_event: gets a line about each start after the first, and about each process that is killed
        first_pause_s: before a process is started again; doubled at each further early death
        lease_s: how long others wait for what a killed worker held; 0 where that is not said
        """
        self.specs = specs
        self.logs = logs
        self.grace_s = grace_s
        self.on_event = on_event
        self.first_pause_s = first_pause_s
        self.lease_s = lease_s
        self.statuses = {spec.name: ServiceStatus(spec.name, spec.role) for spec in specs}
        self._processes: dict[str, ServiceProcess] = {}
        self._outcome: RunOutcome | None = None
        self._over = asyncio.Event()
        self._killed = asyncio.Event()

    async def run(
        self,
        env: Mapping[str, str],
        guard: Guard,
        is_finished: Callable[[], Awaitable[bool]] = _never,
        server: ForkServer | None = None,
        is_done: Callable[[], Awaitable[bool]] = _never,
    ) -> RunOutcome:
        """Start everything; return when the run is over and every process has ended.

        `is_finished` says whether the run is over; it is asked when a process that `ends_run` ends with 0.
        `is_done` says whether workers have nothing left to do; it is asked when another one ends with 0,
        which is then not started again.
        """
        self._env = env
        self._guard = guard
        self._is_finished = is_finished
        self._server = server
        self._is_done = is_done
        keepers = [asyncio.create_task(self._keep(spec), name=spec.name) for spec in self.specs]
        try:
            # Set before processes are ended: a keeper that sees one end starts no other.
            await self._over.wait()
            await self._drain(keepers)
        finally:
            for process in self._processes.values():
                process.kill()
            # The keepers see their processes end; one that waits for an answer of Redis is cancelled.
            await asyncio.wait(keepers, timeout=REAP_S)
            for keeper in keepers:
                keeper.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)
        assert self._outcome is not None
        return self._outcome

    def stop(self) -> None:
        """Ask all to finish or hand back what they hold."""
        self._end(RunOutcome(Ending.STOPPED))

    def fail(self, reason: str, exit_code: int = 1) -> None:
        """End the run because something it needs is gone."""
        summary = next(iter(reason.splitlines()), "")
        self._end(RunOutcome(Ending.FAILED, reason, exit_code, summary))

    def _fail_with(self, process: ServiceProcess, event: str, code: int, exit_code: int) -> None:
        """End the run because of one of its processes."""
        summary = f"{process.spec.name} {event} ({_how(code)})"
        tail = process.output_tail()
        reason = f"{summary}{_why(tail, process.log)}"
        self._end(RunOutcome(Ending.FAILED, reason, exit_code, summary, _last_error(tail, code), process.log))

    def kill(self) -> None:
        self.stop()
        self._killed.set()

    def _end(self, outcome: RunOutcome) -> None:
        # The first outcome stands: processes that are stopped for it end with codes of their own.
        self._outcome = self._outcome or outcome
        self._over.set()

    async def _drain(self, keepers: Sequence[asyncio.Task[None]]) -> None:
        """SIGTERM to all, then wait until they are gone, time is up, or `kill` is called."""
        for name, process in self._processes.items():
            self.statuses[name].state = "stopping"
            process.terminate()
        ends: list[asyncio.Task[Any]] = [
            # In a task that may be cancelled: `wait` leaves the keepers alone, `gather` would cancel them.
            asyncio.create_task(asyncio.wait(keepers)),
            asyncio.create_task(self._killed.wait()),
        ]
        await asyncio.wait(ends, timeout=self.grace_s, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
        if self._processes and not self._killed.is_set():
            late = ", ".join(sorted(self._processes))
            self.on_event(f"still running after {self.grace_s:g} s and killed: {late}")

    async def _keep(self, spec: ServiceSpec) -> None:
        """Start one service again and again, until the run is over."""
        status = self.statuses[spec.name]
        early_deaths = 0
        log = self.logs / f"{spec.name}.log"
        causes = SameCauses()
        num_refused = 0
        while not self._over.is_set():
            try:
                process = await ServiceProcess.start(spec, self._env, log, self._guard, self._server)
            except OSError as error:
                if not is_machine_fault(error):
                    self.fail(f"cannot start {spec.name}: {error}")
                    return
                # The others of the run go on meanwhile: as they end, there may be room for this one.
                num_refused += 1
                pause_s = min(self.first_pause_s * 2 ** (num_refused - 1), LONGEST_PAUSE_S)
                if is_logged(num_refused):
                    fault = make_fault(
                        shortage_number(error), f"{spec.name} could not be started", str(error)
                    )
                    self.on_event(f"{fault}; trying again in {pause_s:g} s")
                status.state = "waiting for the machine"
                await self._pause(pause_s)
                continue
            num_refused = 0
            code = await self._watch(process, status)
            if self._over.is_set() or await self._is_over(process, code):
                break
            if code == 0 and not spec.ends_run and await self._is_done():
                break
            age_s = time.monotonic() - process.started
            early_deaths = early_deaths + 1 if age_s < HEALTHY_AFTER_S else 1
            if early_deaths > MAX_EARLY_DEATHS:
                self._fail_with(process, f"died {early_deaths} times in a row; giving up", code, 1)
                break
            # The last line of its output mostly is the reason.
            last = next((line.strip() for line in reversed(process.output_tail()) if line.strip()), "")
            if causes.count(last, code, age_s) >= MAX_SAME_DEATHS:
                reason = f"died {MAX_SAME_DEATHS} times in a row of the same cause; giving up"
                self._fail_with(process, reason, code, 1)
                break
            pause_s = min(self.first_pause_s * 2 ** (early_deaths - 1), LONGEST_PAUSE_S)
            why = f" ({printable(last, MAX_REASON_CHARACTERS)})" if says_error(last, code) else ""
            self.on_event(
                f"{spec.name} ended {_how(code)}{why}; starting it again in {pause_s:g} s"
                f"{self._about_leases(spec, code)}"
            )
            status.state = f"restarting ({_how(code)})"
            await self._pause(pause_s)
            status.restarts += 1
        status.state = "stopped"
        status.pid = 0

    def _about_leases(self, spec: ServiceSpec, code: int) -> str:
        """Why a step may take longer now: a worker that a signal ended has handed nothing back."""
        if code >= 0 or spec.role not in LEASING or not self.lease_s:
            return ""
        return f". What it held is taken up once its leases end (streams.lease_s: {self.lease_s:g})"

    async def _pause(self, pause_s: float) -> None:
        """Wait so long, or until the run ends."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._over.wait()

    async def _watch(self, process: ServiceProcess, status: ServiceStatus) -> int:
        # Registered before `_over` is checked: a process that `_drain` does not find is ended by the check.
        self._processes[status.name] = process
        status.state = "running"
        status.pid = process.pid
        if self._over.is_set():  # the run ended while it started
            process.terminate()
        try:
            return await process.wait()
        finally:
            del self._processes[status.name]
            status.pid = 0

    async def _is_over(self, process: ServiceProcess, code: int) -> bool:
        """Whether this end of a process is the end of the run."""
        if code == ConfigError.exit_code or is_illegal_instruction(code):
            self._fail_with(process, "cannot do this run", code, code)
        # A trainer that was told to stop ends with 0 as well: its last commit decides.
        elif code == 0 and process.spec.ends_run and await self._is_finished():
            self._end(RunOutcome(Ending.FINISHED))
        return self._over.is_set()


def _how(code: int) -> str:
    return f"{'by' if code < 0 else 'with'} {ending_in_words(code)}"


def _why(tail: Sequence[str], log: Path) -> str:
    """The error with which a service ended, and where its log is; the end of the log where it wrote none."""
    errors = [index for index, line in enumerate(tail) if line.startswith("tidemill ")]
    if errors:
        first, *more = tail[errors[-1] :]
        _, _, error = first.partition(": ")
        text = "\n".join([f"  {error or first}", *(f"  {line}" for line in more if line.strip())])
        return f":\n{text}\n  Its log: {log}"
    text = "\n".join(f"  {line}" for line in tail or ["(it wrote nothing)"])
    return f". The end of {log}:\n{text}"


def _last_error(lines: Sequence[str], code: int) -> str:
    """The line that says why a service ended with this code: the last one that it wrote as its error,
    else the last; empty where that line cannot say it."""
    written = [line.strip() for line in lines if line.strip()]
    errors = [line for line in written if line.startswith("tidemill ")]
    last = (errors or written or [""])[-1]
    return printable(last, MAX_REASON_CHARACTERS) if says_error(last, code) else ""


_LOG_LINE = re.compile(r'\d\d:\d\d:\d\d \[(\w+) *\] |\{.*"level": ?"(\w+)"')
"""A line of a service's log, as text and as JSON, with its level."""
ERROR_LEVELS = ("error", "critical", "exception")


def says_error(line: str, code: int) -> bool:
    """Whether the last line of a process that ended with this code may say why.

    `ValueError: no` may, `17:54:08 [info     ] joined the run` may not. Of a process that was killed, which
    can say nothing of it, only an error in its log may.
    """
    log_line = _LOG_LINE.match(line)
    if log_line is not None:
        return (log_line[1] or log_line[2]) in ERROR_LEVELS
    return bool(line) and code != -signal.SIGKILL

"""Runs environments within limits of time: on the worker's loop, or in processes if they may block.

A session stays in the process in which it was opened; each process holds any number of them, one thread each.
A call that is late costs its process: it takes no new session, and is killed when its other sessions have
ended. When a process dies, the sessions in it fail, as faults, and no others; a new one replaces it.

In a process (`main`) the design is loaded once. A session's thread has an event loop for async methods, so an
environment sees one thread from its making to its close. When the worker closes the socket or dies, every
environment is closed, within `CHILD_GRACE_S`; then the process ends, whatever is still running.
"""

import asyncio
import os
import queue
import signal
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict
from itertools import count
from typing import Any, TypeVar

import structlog

from tidemill.common.config.environment import EnvironmentConfig
from tidemill.common.errors import ConfigError, EnvironmentFaultError, MachineFaultError
from tidemill.common.process.children import Send, become_child, read_frame, sender, startup_failure
from tidemill.common.process.programs import Child
from tidemill.common.process.shortage import find_shortage, is_machine_fault, make_fault, shortage_number
from tidemill.common.process.worker_process import ProcessEndedError, StartupError, WorkerProcess
from tidemill.services.rollout.environments import load
from tidemill.services.rollout.environments.environment import (
    Act,
    Closing,
    Design,
    Environment,
    Opening,
    Row,
    invalid_call,
)
from tidemill.services.rollout.environments.users_code import described

log = structlog.get_logger(__name__)

T = TypeVar("T")

CHILD_GRACE_S = 5
"""How long a process that has to end may take to close its environments."""
GRACE_S = CHILD_GRACE_S + 1.0
CLOSE = {"op": "close", "id": 0, "arguments": []}


class TimedEnvironment(Environment, ABC):
    """An environment whose calls have a time limit, wherever it runs."""

    def __init__(self, call_timeout_s: float) -> None:
        self.call_timeout_s = call_timeout_s

    async def reset(self, row: Row) -> Opening:
        return await self.operate(Opening, "reset", dict(row))

    async def restore(self, mark: Any) -> None:
        await self.operate(type(None), "restore", mark)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Act:
        """Execute a tool call. If it is late and the session can go on, the model gets an error."""
        try:
            return await self.operate(Act, "call", name, dict(arguments))
        except EnvironmentFaultError as fault:
            if fault.kind != "timeout" or not await self.recover():
                raise
        return invalid_call(f"{name} took longer than {self.call_timeout_s:g} s and was stopped")

    async def step(self, text: str) -> Act:
        return await self.operate(Act, "step", text)

    async def finish(self) -> Closing:
        return await self.operate(Closing, "finish")

    async def close(self) -> None:
        try:
            await self.operate(type(None), "close")
        except MachineFaultError as fault:
            log.warning("an environment could not be closed", error=str(fault))
        except EnvironmentFaultError as fault:
            if fault.kind != "died":
                log.warning("an environment could not be closed", error=str(fault))

    @abstractmethod
    async def operate(self, kind: type[T], op: str, *arguments: Any) -> T:
        """Call its method `op` that returns a `kind`.

        Raises:
            EnvironmentFaultError: it fails, or is late.
            MachineFaultError: this machine is short of something.
        """

    @abstractmethod
    async def recover(self) -> bool:
        """Recover from a call that was late. Returns whether the session can go on."""

    def late(self, op: str) -> EnvironmentFaultError:
        limit = f"{self.call_timeout_s:g} s (rollout.environment.call_timeout_s)"
        return EnvironmentFaultError(f"{op} took longer than {limit}", "timeout")


class LocalStage:
    """Makes environments on the worker's loop, where a call that is late is cancelled."""

    def __init__(self, design: Design, call_timeout_s: float) -> None:
        self._design = design
        self._timeout_s = call_timeout_s
        self.kind_of = design.kind_of

    async def open(self, row: Row) -> Environment:
        return LocalEnvironment(self._design.make(row), self._timeout_s)

    async def close(self) -> None:
        """Nothing was started."""


class LocalEnvironment(TimedEnvironment):
    def __init__(self, inner: Environment, call_timeout_s: float) -> None:
        super().__init__(call_timeout_s)
        self._inner = inner

    async def operate(self, kind: type[T], op: str, *arguments: Any) -> T:
        try:
            async with asyncio.timeout(self.call_timeout_s):
                returned: T = await getattr(self._inner, op)(*arguments)
        # Of our limit: a TimeoutError of users' code has become a fault or an observation by now.
        except TimeoutError:
            raise self.late(op) from None
        except EnvironmentFaultError as error:
            number = shortage_number(error)
            if number:
                check_machine(str(error), number)
            raise
        return returned

    async def recover(self) -> bool:
        return True  # the call was cancelled, and nothing else has happened


class ProcessStage:
    """Spreads sessions over at most `config.processes` processes."""

    def __init__(self, design: Design, config: EnvironmentConfig) -> None:
        self.kind_of = design.kind_of
        self.config = config
        self.spec = {"config": config.model_dump(mode="json")}
        self.session_numbers = count(1)
        self.num_sessions: dict[WorkerProcess, int] = {}
        """Process that runs -> its sessions; also of one that takes no new session."""

    async def open(self, row: Row) -> Environment:
        remote = RemoteEnvironment(self, row, self.kind_of(row).is_stateless)
        await remote.open()
        return remote

    async def close(self) -> None:
        # Forgotten first: sessions that end while their processes do must not end these once more.
        processes = list(self.num_sessions)
        self.num_sessions = {}
        await asyncio.gather(*(process.end(GRACE_S) for process in processes))

    def enter(self) -> WorkerProcess:
        """The process for a new session: an unused one, else a new one up to the limit, else the emptiest.

        Raises:
            MachineFaultError: no process can be started, and none is there.
        """
        sound = [process for process in self.num_sessions if process.is_sound]
        chosen = min(sound, key=self.num_sessions.__getitem__, default=None)
        if chosen is None or (self.num_sessions[chosen] and len(sound) < self.config.processes):
            try:
                chosen = WorkerProcess(Child.ENVIRONMENTS, self.config.use)
            except MachineFaultError as fault:
                if chosen is None:
                    raise
                log.warning("a further process of environments could not be started", problem=str(fault))
            else:
                self.num_sessions[chosen] = 0
        self.num_sessions[chosen] += 1
        return chosen

    def leave(self, process: WorkerProcess) -> None:
        """A session has ended. The last one of a process that takes no new ones ends it."""
        if process in self.num_sessions:  # else all are ended already
            self.num_sessions[process] -= 1
        for idle in [p for p, number in self.num_sessions.items() if not number and not p.is_sound]:
            del self.num_sessions[idle]
            idle.kill()


class RemoteEnvironment(TimedEnvironment):
    def __init__(self, stage: ProcessStage, row: Row, is_stateless: bool) -> None:
        super().__init__(stage.config.call_timeout_s)
        self._stage = stage
        self._row = row
        self._is_stateless = is_stateless
        self._process: WorkerProcess | None = None
        self._session = 0

    async def open(self) -> None:
        self._process = self._stage.enter()
        self._session = next(self._stage.session_numbers)
        try:
            await self.operate(type(None), "open", dict(self._row))
        # Also where it was cancelled: a process with a session that is never left would never end.
        except BaseException:
            self._leave()
            raise

    async def close(self) -> None:
        if self._process is not None:
            try:
                await super().close()
            finally:
                self._leave()

    async def operate(self, kind: type[T], op: str, *arguments: Any) -> T:
        process = self._process
        if process is None:
            raise EnvironmentFaultError(f"{op}: the environment is gone", "died")
        frame = {"session": self._session, "op": op, "arguments": list(arguments)}
        try:
            await process.start(self._stage.spec)
            answer = await process.ask(frame, self.call_timeout_s)
        except StartupError as error:
            if error.shortage:
                raise make_fault(error.shortage, "an environment could not start", str(error)) from None
            raise EnvironmentFaultError(str(error), "start") from None
        except ProcessEndedError as error:
            raise EnvironmentFaultError(str(error), "died") from None
        except TimeoutError:
            # A thread cannot be stopped: the process takes no new session, and is killed once it has none.
            process.is_sound = False
            self._leave()
            raise self.late(op) from None
        if "fault" in answer:
            if answer.get("shortage"):
                # It may be this process alone: the environment leaks descriptors, say.
                process.is_sound = False
                check_machine(answer["fault"], answer["shortage"], answer.get("is_ours", False))
            raise EnvironmentFaultError(answer["fault"], answer["kind"])
        return kind(**answer["returned"])

    async def recover(self) -> bool:
        """A stateless environment is replaced by a new one in another process."""
        if self._is_stateless:
            await self.open()
        return self._is_stateless

    def _leave(self) -> None:
        process = self._process
        self._process = None
        if process is not None:
            self._stage.leave(process)


def check_machine(problem: str, number: int, is_ours: bool = False) -> None:
    """Find out whether this machine is short of something, as the exception behind `problem` says.

    `is_ours`: it was our own start that failed, which proves it. An exception of users' code proves nothing:
    `find_shortage` decides.

    Raises:
        MachineFaultError: it is.
    """
    if is_ours:
        raise make_fault(number, "a session could not be started", problem)
    shortage = find_shortage()
    if shortage is not None:
        raise MachineFaultError(f"{problem}. {shortage}", shortage.number)


def main(descriptor: int, parent: int) -> None:
    """Run sessions for the worker at the other end of the socket `descriptor`, until it closes that."""
    with become_child(descriptor, parent, may_outlive=True) as channel, channel.makefile("rb") as frames:
        spec = read_frame(frames)
        send = sender(channel)
        if spec is None:
            return
        try:
            design = load(EnvironmentConfig.model_validate(spec["config"]))
            assert isinstance(design, Design)
        except Exception as error:
            if not isinstance(error, ConfigError) and not is_machine_fault(error):
                raise
            send(startup_failure(error))
            return
        send({})
        sessions: dict[int, SessionThread] = {}
        while (frame := read_frame(frames)) is not None:
            number = frame["session"]
            if frame["op"] == "open":
                # One thread for the whole session: objects of many libraries may be used by one thread only.
                session = SessionThread(design, send)
                try:
                    session.start()
                except RuntimeError as error:
                    # The sessions beside it go on.
                    send(failure_of(frame, error, is_ours=True))
                    continue
                sessions[number] = session
            thread = sessions.get(number)
            if thread is not None:
                thread.frames.put(frame)
            # The thread ends by itself once it has closed; its number is never used again.
            if frame["op"] == "close":
                sessions.pop(number, None)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(CHILD_GRACE_S)  # the kernel ends this process then, also in the middle of a call
        for thread in sessions.values():
            thread.frames.put(CLOSE)
        for thread in sessions.values():
            thread.join()
        # `_exit` flushes nothing; an orderly end could hang in exit handlers of users' code.
        sys.stdout.flush()
        os._exit(0)


def failure_of(frame: dict[str, Any], error: BaseException, is_ours: bool = False) -> dict[str, Any]:
    """The answer to a frame that failed. `is_ours`: nothing of the user's has run."""
    is_fault = isinstance(error, EnvironmentFaultError)
    return {
        "id": frame["id"],
        "fault": str(error) if is_fault else described(error),
        "kind": error.kind if isinstance(error, EnvironmentFaultError) else frame["op"],
        "shortage": shortage_number(error),
        "is_ours": is_ours,
    }


class SessionThread(threading.Thread):
    def __init__(self, design: Design, send: Send) -> None:
        super().__init__(daemon=True)
        self.frames: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._design = design
        self._send = send
        self._environment: Environment | None = None

    def run(self) -> None:
        # One loop for all of the session: async objects mostly belong to the loop that made them.
        runner = asyncio.Runner()
        try:
            runner.get_loop()
        except OSError as error:  # a loop takes descriptors
            self._send(failure_of(self.frames.get(), error, is_ours=True))
            return
        with runner:
            self._serve(runner)

    def _serve(self, runner: asyncio.Runner) -> None:
        while True:
            frame = self.frames.get()
            try:
                answer = runner.run(self._do(frame))
                self._send({"id": frame["id"], "returned": answer})
            except BaseException as error:  # also an answer that cannot be sent, or an interrupt
                self._send(failure_of(frame, error))
            if frame["op"] == "close":
                return

    async def _do(self, frame: dict[str, Any]) -> dict[str, Any]:
        if frame["op"] == "open":
            self._environment = self._design.make(*frame["arguments"])
        if frame["op"] == "open" or self._environment is None:  # or it could not be made
            return {}
        returned = await getattr(self._environment, frame["op"])(*frame["arguments"])
        return {} if returned is None else asdict(returned)

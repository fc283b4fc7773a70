"""Environments in processes of their own: those that may block.

A session stays in the process in which it was opened; each process holds any number of them, one thread each.
A call that is late costs its process: it takes no new session, lets its others end, and is killed. When a
process dies, the sessions in it fail, as faults, and no others. The next session replaces it.
"""

import asyncio
import contextlib
import itertools
from collections.abc import Mapping
from typing import Any

import structlog

from tidemill.common.config.environment import EnvironmentConfig
from tidemill.common.errors import EnvironmentFaultError
from tidemill.common.process.children import frame_of, kill_group, receive, spawn
from tidemill.common.process.programs import Child, ending_in_words
from tidemill.services.rollout.environments.environment import Act, Closing, Environment, Kind, Opening, Row
from tidemill.services.rollout.environments.loading import Design
from tidemill.services.rollout.environments.local import late, late_call

log = structlog.get_logger(__name__)

START_TIMEOUT_S = 120.0
"""Longest time a process may take to import the environment."""
GRACE_S = 5.0
"""How long a process that has to end may take to close its environments."""


class ProcessStage:
    """Spreads sessions over at most `config.processes` processes."""

    def __init__(self, design: Design, config: EnvironmentConfig) -> None:
        self._design, self._config = design, config
        self._processes: list[EnvironmentProcess] = []
        self._all: set[EnvironmentProcess] = set()

    def kind_of(self, row: Row) -> Kind:
        """What plays with this row."""
        return self._design.kind_of(row)

    async def open(self, row: Row) -> Environment:
        """Make one in the process with the fewest."""
        remote = RemoteEnvironment(self, row, self.kind_of(row).is_stateless)
        await remote.open()
        return remote

    async def close(self) -> None:
        """Let all processes close what they hold, and end them."""
        processes, self._processes = list(self._all), []
        await asyncio.gather(*(process.end() for process in processes))

    @property
    def pids(self) -> list[int]:
        """Ids of the processes that are there."""
        return [process.pid for process in self._all]

    @property
    def call_timeout_s(self) -> float:
        """Limit of one call."""
        return self._config.call_timeout_s

    def choose(self) -> "EnvironmentProcess":
        """The process for a new session; another one is started while there may be more."""
        self._processes = [process for process in self._processes if process.is_sound]
        free = min(self._processes, key=lambda process: process.num_sessions, default=None)
        if free is None or (free.num_sessions and len(self._processes) < self._config.processes):
            free = EnvironmentProcess(self._config)
            self._processes.append(free)
            self._all.add(free)
            free.on_end = self._all.discard
        return free


class EnvironmentProcess:
    """One process, as its worker sees it: operations go in with a number, answers come back with it."""

    def __init__(self, config: EnvironmentConfig) -> None:
        self._config = config
        self._process, self._channel = spawn(Child.ENVIRONMENTS)
        self._writer: asyncio.StreamWriter | None = None
        self._loading = asyncio.ensure_future(self._load())
        self._loading.add_done_callback(lambda loading: loading.cancelled() or loading.exception())
        self._reading: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._numbers = itertools.count(1)
        self.on_end: Any = lambda process: None
        self.num_sessions = 0
        self.is_sound = True
        """Whether it may be given another session."""

    @property
    def pid(self) -> int:
        """Its process id, which is that of its group too."""
        return self._process.pid

    def begin(self) -> int:
        """A session begins in it; returns the session's number."""
        self.num_sessions += 1
        return next(self._numbers)

    def leave(self) -> None:
        """A session in it has ended."""
        self.num_sessions -= 1
        self._end_if_idle()

    def retire(self) -> None:
        """It has a thread that does not come back: no more sessions, and the end after those it has."""
        self.is_sound = False
        self._end_if_idle()

    async def ask(self, session: int, op: str, timeout_s: float, **arguments: Any) -> dict[str, Any]:
        """Have it do one operation of a session.

        Raises:
            EnvironmentFaultError: the environment failed, or the process died.
            TimeoutError: there is no answer in time.
        """
        await asyncio.shield(self._loading)
        if self._writer is None or self._writer.is_closing():
            raise self._death("its process has died")
        number = next(self._numbers)
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            self._writer.write(frame_of({"id": number, "session": session, "op": op, **arguments}))
            await asyncio.wait({answer}, timeout=timeout_s)
            if not answer.done():
                raise TimeoutError
            found = answer.result()
        finally:
            self._waiting.pop(number, None)
            answer.cancel()
        if "fault" in found:
            raise EnvironmentFaultError(found["fault"], found["kind"])
        return found

    async def end(self) -> None:
        """Let it close its environments for a moment; then kill it with all that it started."""
        self.is_sound = False
        with contextlib.suppress(EnvironmentFaultError):
            self._loading.cancel()
        if self._writer is not None and not self._writer.is_closing():
            with contextlib.suppress(OSError):
                self._writer.write_eof()
                await asyncio.wait_for(asyncio.to_thread(self._process.wait, GRACE_S + 1), None)
        self._kill()
        await asyncio.to_thread(self._process.wait)
        if self._reading is not None:
            await asyncio.gather(self._reading, return_exceptions=True)

    async def _load(self) -> None:
        reader, self._writer = await asyncio.open_connection(sock=self._channel)
        self._writer.write(frame_of({"config": self._config.model_dump(mode="json")}))
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                answer = await receive(reader)
        except TimeoutError:
            self._kill()
            raise EnvironmentFaultError(
                f"importing the environment took longer than {START_TIMEOUT_S:g} s", "start"
            ) from None
        except (asyncio.IncompleteReadError, ConnectionError):
            raise await self._obituary("start") from None
        if "fault" in answer:
            self._kill()
            raise EnvironmentFaultError(answer["fault"], "start")
        self._reading = asyncio.create_task(self._read_for_ever(reader))

    async def _read_for_ever(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                frame = await receive(reader)
                answer = self._waiting.get(frame["id"])
                if answer is not None and not answer.done():
                    answer.set_result(frame)
        fault = await self._obituary("died")
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(fault)

    async def _obituary(self, kind: str) -> EnvironmentFaultError:
        self._kill()  # it is ending already, and its exit code stands; what it started may linger
        code = await asyncio.to_thread(self._process.wait)
        return self._death(f"its process died ({ending_in_words(code)})", kind)

    def _death(self, reason: str, kind: str = "died") -> EnvironmentFaultError:
        return EnvironmentFaultError(f"{self._config.use}: {reason}", kind)

    def _end_if_idle(self) -> None:
        if not self.is_sound and self.num_sessions <= 0:
            self._kill()

    def _kill(self) -> None:
        self.is_sound = False
        kill_group(self._process)
        if self._writer is not None:
            self._writer.transport.abort()
        self.on_end(self)


class RemoteEnvironment:
    """One session's environment in a process."""

    def __init__(self, stage: ProcessStage, row: Row, is_stateless: bool) -> None:
        self._stage, self._row, self._is_stateless = stage, row, is_stateless
        self._timeout_s = stage.call_timeout_s
        self._process: EnvironmentProcess | None = None
        self._session = 0

    async def open(self) -> None:
        """Have it made."""
        self._process = self._stage.choose()
        self._session = self._process.begin()
        try:
            await self._ask("open", row=dict(self._row))
        except BaseException:
            self._drop()
            raise

    async def reset(self, row: Row) -> Opening:
        """The session begins."""
        found = await self._ask("reset", row=dict(row))
        return Opening(found["added"], found["messages"])

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Act:
        """The model calls a tool. Functions that are late are replaced, and the model is told so."""
        try:
            return _act(await self._ask("call", name=name, arguments=dict(arguments)))
        except EnvironmentFaultError as fault:
            if not self._is_stateless or fault.kind != "timeout":
                raise
        await self.open()
        return late_call(name, self._timeout_s)

    async def step(self, text: str) -> Act:
        """The model said something."""
        return _act(await self._ask("step", text=text))

    async def finish(self) -> Closing:
        """The session has ended."""
        found = await self._ask("finish")
        return Closing(found["reward"], found["metrics"])

    async def close(self) -> None:
        """Never raises; a thread that does not come back costs its process."""
        if self._process is None:
            return
        try:
            await self._ask("close")
        except EnvironmentFaultError as fault:
            if fault.kind not in ("died", "timeout"):
                log.warning("an environment could not be closed", error=str(fault))
        finally:
            self._drop()

    async def _ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        if self._process is None:
            raise EnvironmentFaultError(f"{op}: the environment is gone", "died")
        try:
            return await self._process.ask(self._session, op, self._timeout_s, **arguments)
        except TimeoutError:
            self._process.retire()
            self._drop()
            raise late(op, self._timeout_s) from None

    def _drop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.leave()


def _act(found: dict[str, Any]) -> Act:
    return Act(found["messages"], found["reward"], found["is_done"], found["is_wrong"])

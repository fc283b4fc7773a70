"""Environments in processes of their own: those that may block.

A session stays in the process in which it was opened; each process holds any number of them, one thread each.
A call that is late costs its process: it takes no new session, lets its others end, and is killed. When a
process dies, the sessions in it fail, as faults, and no others. The next session replaces it.
"""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from tidemill.common.config.environment import EnvironmentConfig
from tidemill.common.errors import EnvironmentFaultError
from tidemill.common.process.programs import Child
from tidemill.common.process.worker_process import ProcessEndedError, StartupError, WorkerProcess
from tidemill.services.rollout.environments.environment import Design, Environment, Kind, Row
from tidemill.services.rollout.environments.local import LimitedEnvironment

T = TypeVar("T")

GRACE_S = 6.0
"""How long a process that has to end may take to close its environments; it has its own limit before."""


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
        await asyncio.gather(*(process.end(GRACE_S) for process in processes))

    @property
    def pids(self) -> list[int]:
        """Ids of the processes that are there."""
        return [process.pid for process in self._all]

    @property
    def call_timeout_s(self) -> float:
        return self._config.call_timeout_s

    def choose(self) -> "EnvironmentProcess":
        """The process for a new session; another one is started while there may be more."""
        self._processes = [process for process in self._processes if process.is_sound]
        free = min(self._processes, key=lambda process: process.num_sessions, default=None)
        if free is None or (free.num_sessions and len(self._processes) < self._config.processes):
            free = EnvironmentProcess(self._config, self._all.discard)
            self._processes.append(free)
            self._all.add(free)
        return free


class EnvironmentProcess(WorkerProcess):
    """One process, with any number of sessions."""

    def __init__(self, config: EnvironmentConfig, on_end: "Callable[[EnvironmentProcess], None]") -> None:
        super().__init__(Child.ENVIRONMENTS, config.use)
        self._spec, self._on_end = {"config": config.model_dump(mode="json")}, on_end
        self._sessions = itertools.count(1)
        self.num_sessions = 0

    def begin(self) -> int:
        """A session begins in it; returns the session's number."""
        self.num_sessions += 1
        return next(self._sessions)

    def leave(self) -> None:
        """A session in it has ended."""
        self.num_sessions -= 1
        self._end_if_idle()

    def retire(self) -> None:
        """It has a thread that does not come back: no more sessions, and the end after those it has."""
        self.is_sound = False
        self._end_if_idle()

    async def operate(
        self, session: int, op: str, arguments: Sequence[Any], timeout_s: float
    ) -> dict[str, Any]:
        """Have it do one operation of a session; returns the fields of what that returned.

        Raises:
            EnvironmentFaultError: the environment failed, or the process died.
            TimeoutError: there is no answer in time.
        """
        try:
            await self.start(self._spec)
            frame = {"session": session, "op": op, "arguments": list(arguments)}
            found = await self.ask(frame, timeout_s)
        except StartupError as error:
            raise EnvironmentFaultError(str(error), "start") from None
        except ProcessEndedError as error:
            raise EnvironmentFaultError(str(error), "died") from None
        if "fault" in found:
            raise EnvironmentFaultError(found["fault"], found["kind"])
        returned: dict[str, Any] = found["returned"]
        return returned

    def kill(self) -> None:
        """Kill it with all that it started."""
        super().kill()
        self._on_end(self)

    def _end_if_idle(self) -> None:
        if not self.is_sound and self.num_sessions <= 0:
            self.kill()


class RemoteEnvironment(LimitedEnvironment):
    """One session's environment in a process."""

    def __init__(self, stage: ProcessStage, row: Row, is_stateless: bool) -> None:
        super().__init__(stage.call_timeout_s)
        self._stage, self._row, self._is_stateless = stage, row, is_stateless
        self._process: EnvironmentProcess | None = None
        self._session = 0

    async def open(self) -> None:
        self._process = self._stage.choose()
        self._session = self._process.begin()
        try:
            await self.operate(type(None), "open", dict(self._row))
        except BaseException:
            self._drop()
            raise

    async def close(self) -> None:
        """Never raises; a thread that does not come back costs its process."""
        if self._process is not None:
            try:
                await super().close()
            finally:
                self._drop()

    async def operate(self, kind: type[T], op: str, *arguments: Any) -> T:
        if self._process is None:
            raise EnvironmentFaultError(f"{op}: the environment is gone", "died")
        try:
            returned = await self._process.operate(self._session, op, arguments, self.call_timeout_s)
        except TimeoutError:
            # A thread cannot be stopped: the process takes no new session, and is killed once it has none.
            self._process.retire()
            self._drop()
            raise self.late(op) from None
        return kind(**returned)

    async def recover(self) -> bool:
        """Functions that are late are replaced by the same ones in another process."""
        if self._is_stateless:
            await self.open()
        return self._is_stateless

    def _drop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.leave()

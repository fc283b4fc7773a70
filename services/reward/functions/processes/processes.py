"""A pool of scoring processes for one function.

Plain functions get `size` processes, each with as many calls at once as `Sizing` says; async ones get a
single process with any number. A call that is late, breaks off or dies costs its process; what else that
process was running goes on to its end there, or is run again. A process that is gone is replaced by the next
call.
"""

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Any

from common.telemetry import metrics
from services.reward.functions.processes.capacity import Sizing
from services.reward.functions.processes.child_loop import Blockage
from services.reward.functions.processes.scoring_process import ScoringProcess
from services.reward.functions.processes.suspects import Suspects
from services.reward.functions.request import Request
from services.reward.results.outcome import AttemptError, Outcome


@dataclass(eq=False, slots=True)
class Call:
    """One call, from its first try until it has a result."""

    request: Request
    timeout_s: float
    is_abandoned: bool = False
    """Nobody waits for it any more."""


@dataclass(eq=False, slots=True)
class Death:
    """The end of a process in the middle of its calls.

    `culprit` is the one that is known to have caused it. Where nobody is known, each of several is suspect.
    """

    reason: str
    calls: list[Call]
    is_timeout: bool = False
    culprit: Call | None = None
    clearing: "asyncio.Task[None] | None" = None
    """The search for it, once somebody has begun one."""

    def error(self) -> AttemptError:
        """What the culprit is told."""
        return AttemptError(self.reason, is_timeout=self.is_timeout)


class ProcessLostError(Exception):
    """The process that ran a call is gone; it says nothing about this call yet."""

    def __init__(self, death: Death) -> None:
        super().__init__(death.reason)
        self.death = death


class MainThreadError(Exception):
    """The call ran beside others, and wanted what only the main thread can do; it has to be made again."""


ANY_NUMBER = 1 << 30


class ProcessPool:
    """A call that ends, in any way, frees a place."""

    def __init__(
        self,
        spec: dict[str, Any],
        size: int,
        threads: int = 1,
        is_async: bool = False,
    ) -> None:
        self._spec, self._size, self._is_async = spec, size, is_async
        self._sizing = Sizing(threads)
        self._processes: list[ScoringProcess] = []
        self._line: deque[asyncio.Future[None]] = deque()
        self._reapers: set[asyncio.Task[int]] = set()
        self._suspects = Suspects(self._start_apart)
        self.blockage = Blockage(str(spec["reference"]).rpartition(":")[2])

    @property
    def capacity(self) -> int:
        """Calls that run at once."""
        return self._size * self._calls_each

    async def run(self, request: Request, timeout_s: float) -> list[Outcome]:
        """Run a call in the next free place. Waiting for one does not count as its time.

        Raises:
            AttemptError: the function failed, its time ran out, or it ended its process.
        """
        call = Call(request, timeout_s)
        while True:
            if self._suspects.is_known(call):
                return await self._suspects.run(call)
            try:
                return await self._once(call)
            except ProcessLostError as lost:
                if lost.death.culprit is call:
                    raise lost.death.error() from None
                if lost.death.culprit is None:
                    return await self._suspects.run(call, lost.death)
            except MainThreadError:
                pass  # `_release` saw to it that it runs alone now

    async def close(self) -> None:
        """Kill all processes and wait until they are gone."""
        await self._suspects.close()
        for process in list(self._processes):
            self._discard(process)
        await asyncio.gather(*self._reapers)

    @property
    def _calls_each(self) -> int:
        return ANY_NUMBER if self._is_async else self._sizing.calls

    async def _once(self, call: Call) -> list[Outcome]:
        process = await self._place()
        try:
            await process.load_function(self._spec)
            return await process.run(call)
        finally:  # also where this call was cancelled
            self._release(process)

    async def _place(self) -> ScoringProcess:
        """A process with a place for one call; the place is taken."""
        while (process := self._free()) is None:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._line.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._wake()  # the place that was meant for it is for the next
                raise
        process.num_taken += 1
        return process

    def _free(self) -> ScoringProcess | None:
        """The process with the fewest calls: an idle one, a new one, or one that takes one more."""
        sound = [process for process in self._processes if process.is_sound]
        best = min(sound, key=lambda process: process.num_taken, default=None)
        if (best is None or best.num_taken) and len(sound) < self._size:
            best = ScoringProcess(self._is_async, self.blockage.note)
            self._processes.append(best)
            return best
        return best if best is not None and best.num_taken < self._calls_each else None

    def _release(self, process: ScoringProcess) -> None:
        process.num_taken -= 1
        if process.is_main_only:
            self._sizing.pin()
        self._sizing.observe(process.load, bool(self._line))
        process.load = None
        if not process.is_sound and not process.num_taken:
            self._discard(process)
        self._wake()

    def _wake(self) -> None:
        """Let as many look for a place as there may be places."""
        taken = sum(process.num_taken for process in self._processes if process.is_sound)
        for _ in range(min(len(self._line), max(1, self.capacity - taken))):
            turn = self._line.popleft()
            if not turn.done():
                turn.set_result(None)

    async def _start_apart(self) -> ScoringProcess:
        """A process beside the pool's, for suspects."""
        process = ScoringProcess(self._is_async, self.blockage.note)
        try:
            await process.load_function(self._spec)
        except BaseException:
            process.kill()
            await process.wait()
            raise
        return process

    def _discard(self, process: ScoringProcess) -> None:
        if process in self._processes:
            self._processes.remove(process)
            if process.num_taken or not process.is_sound:
                metrics.SCORING_PROCESSES_KILLED.inc()
        process.kill()
        reaper = asyncio.create_task(process.wait())
        self._reapers.add(reaper)
        reaper.add_done_callback(self._reapers.discard)

"""Where a reward function runs: cheap ones on the worker's loop, all others in processes of their own.

Invariant: `Execution.run` takes no longer than its limit of time, once it has begun to run, and nothing that
a function does, blocking, computing or dying, holds up this process: its leases and heartbeats go on.

In a pool, plain functions get `size` processes, each with as many calls at once as `Sizing` says; async ones
get a single process with any number. A call that is late, breaks off or dies costs its process; what else
that process was running goes on to its end there, or is run again. The next call replaces the process.
"""

import asyncio
import time
from collections import deque
from typing import Any, Protocol

import structlog

from tidemill.common.telemetry import metrics
from tidemill.services.reward.functions.processes.crash_bisection import CrashBisection
from tidemill.services.reward.functions.processes.scoring_process import (
    Call,
    MainThreadError,
    ProcessLostError,
    ScoringProcess,
)
from tidemill.services.reward.functions.request import Callee, Request
from tidemill.services.reward.outcome import RewardOutcome

log = structlog.get_logger(__name__)

SAMPLES_PER_PROCESS = 8
"""Enough to keep a process busy; more would keep samples from workers that have nothing to do."""
ANY_NUMBER = 1 << 30
IDLE, BUSY, FULL = 0.35, 0.6, 0.95
"""Loads, as shares of a core: below the first the number doubles, below the second it grows by one, above the
last it shrinks by one."""
SHOWN_S = 60.0
"""How long the heartbeat tells of a loop that was blocked."""


class Execution(Protocol):
    @property
    def slots(self) -> int | None:
        """Samples it makes sense to hold at once; None where only memory sets a limit."""

    @property
    def parallel(self) -> int | None:
        """Samples that are scored at once; None where only `slots` sets a limit."""

    @property
    def notes(self) -> list[str]:
        """What is wrong with how the function behaves, in words."""

    async def run(self, request: Request, timeout_s: float) -> list[RewardOutcome]:
        """One outcome for each sample of the request, or an `AttemptError`."""

    async def close(self) -> None:
        """Stop what was started."""


def execution_of(function: Callee, num_processes: int, threads: int = 1) -> Execution:
    """The way in which this function has to run."""
    if function.is_cheap and not function.is_async:
        return InlineExecution(function)
    return ProcessExecution(function, num_processes, threads)


class InlineExecution:
    """Calls functions of microseconds directly: anything else would cost more than they do."""

    slots: int | None = None
    parallel: int | None = None

    def __init__(self, function: Callee) -> None:
        self._function = function
        self.notes: list[str] = []

    async def run(self, request: Request, timeout_s: float) -> list[RewardOutcome]:
        return self._function.call(request)

    async def close(self) -> None:
        """Nothing was started."""


class ProcessExecution:
    """Calls a function in processes. Evaluation has its own, as many, so that it never queues.

    An async function has one process, whose loop awaits any number of calls.
    """

    def __init__(self, function: Callee, num_processes: int, threads: int = 1) -> None:
        self._is_async = function.is_async
        self._least = SAMPLES_PER_PROCESS * num_processes
        size = 1 if function.is_async else num_processes
        self._training, self._evaluation = (
            ProcessPool(function.spec(), size, threads, function.is_async) for _ in range(2)
        )

    @property
    def slots(self) -> int | None:
        """Twice what runs: while one call ends, the next sample is there."""
        return None if self._is_async else max(self._least, 2 * self._training.capacity)

    @property
    def parallel(self) -> int | None:
        """As many as the processes take at once now; it follows what is measured."""
        return None if self._is_async else self._training.capacity

    @property
    def notes(self) -> list[str]:
        """Where an async function blocks."""
        return [text for pool in (self._training, self._evaluation) if (text := pool.blockage.note_text)]

    async def run(self, request: Request, timeout_s: float) -> list[RewardOutcome]:
        """Call the function in a process; see `ProcessPool.run`."""
        pool = self._evaluation if request.samples[0].is_evaluation else self._training
        return await pool.run(request, timeout_s)

    async def close(self) -> None:
        await self._training.close()
        await self._evaluation.close()


class Sizing:
    """How many calls each process of a pool takes at once; all of them run the same function."""

    def __init__(self, most: int) -> None:
        self._most, self.calls = most, 1

    def observe(self, load: float | None, is_wanted: bool) -> None:
        """A call has ended; `load` was measured, `is_wanted` says whether others wait for a place."""
        if load is None:
            return
        if load > FULL:
            self.calls = max(1, self.calls - 1)
        elif is_wanted and load < BUSY:
            self.calls = min(self._most, 2 * self.calls if load < IDLE else self.calls + 1)

    def pin(self) -> None:
        """The function works in main threads only: one call at a time from now on."""
        self._most = self.calls = 1


class Blockage:
    """What the scoring processes of one function report of their event loops."""

    def __init__(self, name: str) -> None:
        self._name, self._where = name, ""
        self._seen_at, self._num_seen, self._longest_s = float("-inf"), 0, 0.0

    def note(self, beat: dict[str, Any]) -> None:
        """A loop stands still; logged the 1st time, the 2nd, the 4th, and so on."""
        if time.monotonic() - self._seen_at > SHOWN_S:
            self._longest_s = 0.0
        self._where, self._seen_at = beat["where"], time.monotonic()
        self._longest_s = max(self._longest_s, beat["blocked_s"])
        self._num_seen += 1
        if self._num_seen & (self._num_seen - 1) == 0:
            log.warning(
                "an async reward function blocks its event loop: it scores one sample at a time",
                reward=self._name,
                blocked_s=round(beat["blocked_s"], 1),
                where=self._where,
                remedy="await what takes time, or declare it with plain `def`: then it runs in threads",
            )

    @property
    def note_text(self) -> str:
        """What there is to say now; empty where all is well."""
        if time.monotonic() - self._seen_at > SHOWN_S:
            return ""
        return f"{self._name} blocks its event loop, up to {self._longest_s:.1f} s: {self._where}"


class ProcessPool:
    """A call that ends, in any way, frees a place."""

    def __init__(self, spec: dict[str, Any], size: int, threads: int = 1, is_async: bool = False) -> None:
        self._spec, self._size, self._is_async = spec, size, is_async
        self._sizing = Sizing(threads)
        self._processes: list[ScoringProcess] = []
        self._line: deque[asyncio.Future[None]] = deque()
        self._reapers: set[asyncio.Task[int]] = set()
        self._bisection = CrashBisection(self._start_apart)
        self.blockage = Blockage(str(spec["reference"]).rpartition(":")[2])

    @property
    def capacity(self) -> int:
        """Calls that run at once."""
        return self._size * self._calls_each

    async def run(self, request: Request, timeout_s: float) -> list[RewardOutcome]:
        """Run a call in the next free place. Waiting for one does not count as its time.

        Raises:
            AttemptError: the function failed, its time ran out, or it ended its process.
        """
        call = Call(request, timeout_s)
        while True:
            if self._bisection.is_known(call):
                return await self._bisection.run(call)
            try:
                return await self._once(call)
            except ProcessLostError as lost:
                if lost.death.crashing_call is call:
                    raise lost.death.error() from None
                if lost.death.crashing_call is None:
                    return await self._bisection.run(call, lost.death)
            except MainThreadError:
                pass  # `_release` saw to it that it runs alone now

    async def close(self) -> None:
        """Kill all processes and wait until they are gone."""
        await self._bisection.close()
        for process in list(self._processes):
            self._discard(process)
        await asyncio.gather(*self._reapers)

    @property
    def _calls_each(self) -> int:
        return ANY_NUMBER if self._is_async else self._sizing.calls

    async def _once(self, call: Call) -> list[RewardOutcome]:
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

"""Where a reward function runs: cheap ones on the worker's loop, all others in processes of their own.

Invariant: `run` takes no longer than its limit of time, once it has begun to run, and nothing that a function
does, blocking, computing or dying, holds up this process: its leases and heartbeats go on.
"""

from typing import Protocol

from services.reward.functions.processes.processes import ProcessPool
from services.reward.functions.request import Callee, Request
from services.reward.results.outcome import Outcome


class Execution(Protocol):
    """Runs one function."""

    @property
    def slots(self) -> int | None:
        """Samples it makes sense to hold at once; None where only memory sets a limit."""

    @property
    def parallel(self) -> int | None:
        """Samples that are scored at once; None where only `slots` sets a limit."""

    @property
    def notes(self) -> list[str]:
        """What is wrong with how the function behaves, in words."""

    async def run(self, request: Request, timeout_s: float) -> list[Outcome]:
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

    async def run(self, request: Request, timeout_s: float) -> list[Outcome]:
        """Call the function."""
        return self._function.call(request)

    async def close(self) -> None:
        """Nothing was started."""


SAMPLES_PER_PROCESS = 8
"""Enough to keep a process busy; more would keep samples from workers that have nothing to do."""


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

    async def run(self, request: Request, timeout_s: float) -> list[Outcome]:
        """Call the function in a process; see `ProcessPool.run`."""
        pool = self._evaluation if request.samples[0].is_evaluation else self._training
        return await pool.run(request, timeout_s)

    async def close(self) -> None:
        """Kill all processes."""
        await self._training.close()
        await self._evaluation.close()

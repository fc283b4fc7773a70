"""Where a reward function runs: cheap ones and coroutines on the event loop, plain ones in processes.

Invariant: `run` takes no longer than its limit of time, once it has begun to run. The one exception no
one can help is an async function that computes instead of awaiting: it holds up the loop.
"""

import asyncio
from typing import Protocol

from services.reward.outcome import AttemptError, Outcome
from services.reward.processes import ProcessPool
from services.reward.request import Callee, Request


class Execution(Protocol):
    """Runs one function."""

    slots: int | None
    """Samples it makes sense to hold at once; None where only memory sets a limit."""

    async def run(self, request: Request, timeout_s: float) -> list[Outcome]:
        """One outcome for each sample of the request, or an `AttemptError`."""

    async def close(self) -> None:
        """Stop what was started."""


def execution_of(function: Callee, num_processes: int) -> Execution:
    """The way in which this function has to run."""
    if function.is_async:
        return LoopExecution(function)
    return InlineExecution(function) if function.is_cheap else ProcessExecution(function, num_processes)


class InlineExecution:
    """Calls functions of microseconds directly: anything else would cost more than they do."""

    slots: int | None = None

    def __init__(self, function: Callee) -> None:
        self._function = function

    async def run(self, request: Request, timeout_s: float) -> list[Outcome]:
        """Call the function."""
        return self._function.call(request)

    async def close(self) -> None:
        """Nothing was started."""


class LoopExecution:
    """Awaits async functions, any number of them at once."""

    slots: int | None = None

    def __init__(self, function: Callee) -> None:
        self._function = function
        self._tasks: set[asyncio.Task[list[Outcome]]] = set()

    async def run(self, request: Request, timeout_s: float) -> list[Outcome]:
        """Await the function; at the limit it is cancelled, and left alone if it does not mind that."""
        task = asyncio.create_task(self._function.call_async(request))
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        try:
            await asyncio.wait({task}, timeout=timeout_s)
        finally:
            is_late = not task.done()
            task.cancel()
        if is_late:
            raise AttemptError(f"no result within {timeout_s:g} s (timeout_s)", is_timeout=True)
        if task.cancelled():
            raise AttemptError("the function was cancelled from inside")
        return task.result()

    async def close(self) -> None:
        """Cancel what is still running."""
        for task in self._tasks:
            task.cancel()

    def _forget(self, task: asyncio.Task[list[Outcome]]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # seen, also where nobody waits any more


SAMPLES_PER_PROCESS = 8
"""Enough to keep a process busy; more would keep samples from workers that have nothing to do."""


class ProcessExecution:
    """Calls plain functions in processes. Evaluation has its own, as many, so that it never queues."""

    def __init__(self, function: Callee, num_processes: int) -> None:
        self.slots: int | None = SAMPLES_PER_PROCESS * num_processes
        self._training, self._evaluation = (ProcessPool(function.spec(), num_processes) for _ in range(2))

    async def run(self, request: Request, timeout_s: float) -> list[Outcome]:
        """Call the function in a free process; at the limit that process is killed."""
        pool = self._evaluation if request.samples[0].is_evaluation else self._training
        return await pool.run(request, timeout_s)

    async def close(self) -> None:
        """Kill all processes."""
        await self._training.close()
        await self._evaluation.close()

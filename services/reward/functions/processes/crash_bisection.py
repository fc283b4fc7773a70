"""Finds the call that ends processes among those that were in flight together, by halving.

Each half of a suspect set runs in a process of its own; a half whose process survives is cleared and has its
results, the other is halved again. So only a call that was alone when its process died is told that it died.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from tidemill.services.reward.functions.processes.scoring_process import (
    Call,
    Death,
    MainThreadError,
    ProcessLostError,
    ScoringProcess,
)
from tidemill.services.reward.outcome import AttemptError, RewardOutcome

MOST_KNOWN = 1024

Identity = tuple[Any, ...]


class CrashBisection:
    """The suspects of one pool."""

    def __init__(self, start: Callable[[], Coroutine[Any, Any, ScoringProcess]]) -> None:
        self._start = start
        self._one_set_at_a_time = asyncio.Lock()
        self._results: dict[Call, asyncio.Future[list[RewardOutcome]]] = {}
        self._known: OrderedDict[Identity, None] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()

    def is_known(self, call: Call) -> bool:
        """Whether this sample has ended a process by itself: further attempts at it must not end others'."""
        return _identity(call) in self._known

    async def run(self, call: Call, death: Death | None = None) -> list[RewardOutcome]:
        """The result of a call that was in flight at `death`; without one, it runs alone.

        Raises:
            AttemptError: it failed, or it is the one that ends processes.
        """
        result = self._expect(call)
        if death is None:
            self._begin(self._clear([[call]]))
        elif death.clearing is None:
            for other in death.calls:
                self._expect(other)
            death.clearing = self._begin(self._clear(_halves(death.calls)))
        try:
            return await result
        except asyncio.CancelledError:
            call.is_abandoned = True
            raise
        finally:
            self._results.pop(call, None)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _expect(self, call: Call) -> "asyncio.Future[list[RewardOutcome]]":
        if call not in self._results:
            self._results[call] = asyncio.get_running_loop().create_future()
        return self._results[call]

    async def _clear(self, sets: Sequence[list[Call]]) -> None:
        async with self._one_set_at_a_time:
            left = list(sets)
            while left:
                together = [call for call in left.pop() if not call.is_abandoned]
                if together:
                    left += await self._try(together)

    async def _try(self, together: list[Call]) -> list[list[Call]]:
        """Run a set; returns the sets that are left of it."""
        try:
            process = await self._start()
        except AttemptError as error:
            for call in together:
                self._settle(call, error)
            return []
        lost: dict[Call, Exception] = {}
        try:
            await asyncio.gather(*(self._one(process, call, lost) for call in together))
        finally:
            process.kill()
            await process.wait()
        return self._judge(lost)

    async def _one(self, process: ScoringProcess, call: Call, lost: dict[Call, Exception]) -> None:
        try:
            self._settle(call, await process.run(call))
        except AttemptError as error:
            self._settle(call, error)
        except (ProcessLostError, MainThreadError) as error:
            lost[call] = error

    def _judge(self, lost: dict[Call, Exception]) -> list[list[Call]]:
        deaths = [error.death for error in lost.values() if isinstance(error, ProcessLostError)]
        if not deaths:
            return [[call] for call in lost]
        (death, *_) = deaths
        cleared = [call for call in lost if call is not death.crashing_call]
        if death.crashing_call is None:
            return _halves(cleared)
        self._known[_identity(death.crashing_call)] = None
        while len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)
        self._settle(death.crashing_call, death.error())
        return [cleared] if cleared else []

    def _settle(self, call: Call, result: list[RewardOutcome] | AttemptError) -> None:
        waiting = self._results.get(call)
        if waiting is None or waiting.done():
            return
        if isinstance(result, AttemptError):
            waiting.set_exception(result)
        else:
            waiting.set_result(result)


def _halves(calls: Sequence[Call]) -> list[list[Call]]:
    middle = (len(calls) + 1) // 2
    return [part for part in (list(calls[middle:]), list(calls[:middle])) if part]


def _identity(call: Call) -> Identity:
    return tuple((sample.key, sample.is_evaluation) for sample in call.request.samples)

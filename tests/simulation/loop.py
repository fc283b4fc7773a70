"""An event loop in virtual time that serves many simulated processes, in an order that a seed decides.

Callbacks of one process run in the order in which they became ready, as asyncio guarantees; which process
runs next is drawn. Time stands still while anything can run, and then jumps to the next timer. So a schedule
depends on its seed alone.
"""

import asyncio
import contextvars
import heapq
import random
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from tests.simulation.process import KilledError, Process

OWNER: contextvars.ContextVar[Process] = contextvars.ContextVar("OWNER")
"""The process that the running code belongs to."""
START_S = 1000.0
LAST_TURNS = 20_000
THREAD_DELAY_S = 0.0005
"""Longest time that a thread takes to begin, and its result to arrive."""


class SimulatedTask(asyncio.Task):  # type: ignore[type-arg]
    """A task whose hash is a number of its own: sets of tasks have one order in every run of a seed."""

    def __init__(self, number: int, coroutine: Any, **options: Any) -> None:
        self.number = number
        super().__init__(coroutine, **options)

    def __hash__(self) -> int:
        return self.number


class SimulatedLoop(asyncio.AbstractEventLoop):
    """`run` goes on until it is told to stop; see the module for what it guarantees."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(f"loop {seed}")
        self.now = START_S
        self.world = Process("world", "world", 0)
        self.slept_s = 0.0
        """Seconds that the function that runs on a thread has slept."""
        self.in_thread = False
        self.is_ending = False
        self.errors: list[dict[str, Any]] = []
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._num_timers = 0
        self._active: list[Process] = []
        self._threads: dict[Any, deque[Callable[[], None]]] = {}
        self._num_tasks = 0

    def run(self, is_over: Callable[[], bool], until_s: float) -> bool:
        """Run callbacks until `is_over`, or until the time `until_s`; returns whether it is over."""
        asyncio.events._set_running_loop(self)
        try:
            while not is_over():
                if not self._active and not self._advance(until_s):
                    return False
                self._turn()
            return True
        finally:
            asyncio.events._set_running_loop(None)

    def _turn(self) -> None:
        active = self._active
        if not active:
            return
        index = int(self.rng.random() * len(active)) if len(active) > 1 else 0
        owner = active[index]
        handle = owner.ready.popleft()
        if not owner.ready:
            active[index] = active[-1]
            active.pop()
            owner.is_queued = False
        if not handle._cancelled:  # type: ignore[attr-defined]
            handle._run()

    def _advance(self, until_s: float) -> bool:
        """Go to the next timer's time."""
        timers = self._timers
        while timers and timers[0][2]._cancelled:  # type: ignore[attr-defined]
            heapq.heappop(timers)
        if not timers or timers[0][0] > until_s:
            self.now = max(self.now, until_s)
            return False
        now = max(self.now, timers[0][0])
        self.now = now
        while timers and timers[0][0] <= now:
            handle = heapq.heappop(timers)[2]
            if not handle._cancelled:  # type: ignore[attr-defined]
                self._enqueue(handle)
        return True

    def _enqueue(self, handle: asyncio.Handle) -> None:
        owner: Process = handle._context.get(OWNER, self.world)  # type: ignore[attr-defined]
        owner.ready.append(handle)
        if not owner.is_queued and not owner.is_frozen and not owner.is_dead:
            owner.is_queued = True
            self._active.append(owner)

    def drop(self, owner: Process) -> None:
        """Run no more callbacks of a process; those that are ready stay with it."""
        if owner.is_queued:
            self._active.remove(owner)
            owner.is_queued = False

    def resume(self, owner: Process) -> None:
        """Run the callbacks of a process that was frozen again."""
        if owner.ready and not owner.is_queued and not owner.is_dead:
            owner.is_queued = True
            self._active.append(owner)

    def end(self, owners: list[Process]) -> None:
        """End every task that is left by a cancellation: else it would warn when it is destroyed."""
        self.is_ending = True
        for owner in [*owners, self.world]:
            owner.is_dead = False
            owner.is_frozen = False
            self.resume(owner)
            for task in owner.tasks:
                task.cancel()
        for _ in range(LAST_TURNS):
            if not self._active:
                break
            self._turn()

    # What asyncio asks of a loop.

    def time(self) -> float:
        return self.now

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._enqueue(handle)
        return handle

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        return self.call_at(self.now + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._num_timers += 1
        heapq.heappush(self._timers, (when, self._num_timers, handle))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """No effect: a cancelled timer is skipped when its time comes."""

    def create_future(self) -> "asyncio.Future[Any]":
        return asyncio.Future(loop=self)

    def create_task(self, coro: Coroutine[Any, Any, Any], *, name: Any = None, context: Any = None) -> Any:
        self._num_tasks += 1
        task = SimulatedTask(self._num_tasks, coro, loop=self, name=name or "task", context=context)
        OWNER.get(self.world).tasks.append(task)
        return task

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.errors.append(context)

    def add_signal_handler(self, sig: int, callback: Any, *args: Any) -> None:
        OWNER.get(self.world).signals[sig] = (callback, args, contextvars.copy_context())

    def remove_signal_handler(self, sig: int) -> bool:
        return OWNER.get(self.world).signals.pop(sig, None) is not None

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> "asyncio.Future[Any]":
        """Run a function whole, in a moment of the virtual time; its sleeps delay its result."""
        future = self.create_future()
        if self.is_ending:
            future.cancel()
            return future
        # Several threads begin at once, as those of the default executor do; one takes its calls in order.
        is_single = executor is not None and getattr(executor, "_max_workers", 1) == 1
        waiting = self._threads.setdefault(executor, deque()) if is_single else None

        def finish() -> None:
            if waiting is not None:
                waiting.popleft()
                if waiting:
                    waiting[0]()

        def run() -> None:
            if future.cancelled():
                finish()
                return
            result, error = self._call_in_thread(func, args)
            if isinstance(error, KilledError):
                return

            def deliver() -> None:
                if not future.cancelled():
                    if error is not None:
                        future.set_exception(error)
                    else:
                        future.set_result(result)
                finish()

            self.call_later(self.slept_s + self.rng.random() * THREAD_DELAY_S, deliver)

        def start() -> None:
            self.call_later(self.rng.random() * THREAD_DELAY_S, run)

        if waiting is None:
            start()
        else:
            waiting.append(start)
            if len(waiting) == 1:
                start()
        return future

    def _call_in_thread(
        self, func: Callable[..., Any], args: tuple[Any, ...]
    ) -> tuple[Any, BaseException | None]:
        self.slept_s = 0.0
        self.in_thread = True
        try:
            return func(*args), None
        except BaseException as error:
            return None, error
        finally:
            self.in_thread = False

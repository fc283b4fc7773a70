"""Runs async functions on the event loop of a scoring process, any number at once, and watches that loop.

A function that blocks in place of awaiting holds up its neighbours and nothing else: no lease and no
heartbeat depends on this process. While the loop stands still, every beat says for how long, and where in
whose call. Time in which the loop stood still counts against no call's limit; a single step that is longer
than its limit does.
"""

import asyncio
import contextlib
import contextvars
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from tidemill.common.process.children import Send
from tidemill.services.reward.functions.request import (
    Callee,
    Request,
    failure_to_wire,
    outcomes_to_wire,
)
from tidemill.services.reward.outcome import AttemptError, RewardOutcome, users_own

TICK_S = 0.1
BLOCKED_S = 0.5
"""A loop that has not turned for so long is blocked."""
CALLER = "services/reward/functions/reward_function.py"
OUR_FILES = ("services/reward/", "/asyncio/", "/contextlib.py")

_current: contextvars.ContextVar[int] = contextvars.ContextVar("call")


class LoopCalls:
    """The calls of an async function."""

    def __init__(self, function: Callee, send: Send) -> None:
        self._function, self._send = function, send
        self._loop = asyncio.new_event_loop()
        self._loop.set_task_factory(self._task)
        self._thread = threading.get_ident()
        self._tasks: dict[int, asyncio.Task[Any]] = {}
        self._broken_off: set[int] = set()
        """Calls that the worker has cancelled: no answer is wanted."""
        self._owners: WeakKeyDictionary[asyncio.Future[Any], int] = WeakKeyDictionary()
        self._turned_at, self._lost_s = time.monotonic(), 0.0
        self._step: tuple[int | None, float] = (None, 0.0)
        """The task at the last beat, and since when it has been the one that runs."""

    def take(self, frame: dict[str, Any]) -> None:
        """Start a call on the loop, or cancel one."""
        self._loop.call_soon_threadsafe(self._start if "call" in frame else self._cancel, frame)

    def state(self) -> dict[str, Any]:
        """For how long the loop has stood still, if it does, where, and in whose step."""
        now = time.monotonic()
        blocked_s = now - self._turned_at
        task = asyncio.current_task(self._loop)
        if task is None or blocked_s < BLOCKED_S:
            self._step = (None, now)
            return {}
        if self._step[0] != id(task):
            self._step = (id(task), now)
        frame = sys._current_frames().get(self._thread)
        return {
            "blocked_s": blocked_s,
            "step_s": now - self._step[1],
            "id": self._owners.get(task),
            "where": _where(traceback.extract_stack(frame)) if frame is not None else "",
        }

    def serve(self) -> None:
        """Run the loop for ever. An interrupt or exit in a task that a call has started does not end it."""
        asyncio.set_event_loop(self._loop)
        self._turn()
        while not self._loop.is_closed():
            with contextlib.suppress(KeyboardInterrupt, SystemExit):  # whoever awaits that task was told
                self._loop.run_forever()

    def _turn(self) -> None:
        now = time.monotonic()
        self._lost_s += max(0.0, now - self._turned_at - 2 * TICK_S)
        self._turned_at = now
        self._loop.call_later(TICK_S, self._turn)

    def _task(self, loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> "asyncio.Task[Any]":
        """Whatever a call starts is known as its own."""
        task = asyncio.Task(work, loop=loop, **options)
        if (owner := _current.get(None)) is not None:
            self._owners[task] = owner
        return task

    def _start(self, frame: dict[str, Any]) -> None:
        number = frame["id"]
        _current.set(number)  # the context is this callback's own
        task = self._loop.create_task(self._answer(number, frame["call"], frame["timeout_s"]))
        self._tasks[number] = task
        task.add_done_callback(lambda _: self._drop(number))

    def _drop(self, number: int) -> None:
        self._tasks.pop(number, None)
        self._broken_off.discard(number)

    def _cancel(self, frame: dict[str, Any]) -> None:
        if task := self._tasks.get(frame["cancel"]):
            self._broken_off.add(frame["cancel"])
            task.cancel()

    async def _answer(self, number: int, call: dict[str, Any], timeout_s: float) -> None:
        try:
            with users_own():
                answer = outcomes_to_wire(await self._run(Request.from_wire(call), timeout_s))
        except AttemptError as error:
            answer = failure_to_wire(error)
        except asyncio.CancelledError:
            if number in self._broken_off:
                raise
            answer = failure_to_wire(AttemptError("the function's task was cancelled from inside"))
        self._send({"id": number, **answer})

    async def _run(self, request: Request, timeout_s: float) -> list[RewardOutcome]:
        """At its limit the call is cancelled, and left alone if it does not mind that."""
        task = self._loop.create_task(self._function.call_async(request))
        left_s, lost_s = timeout_s, self._lost_s
        try:
            while left_s > 0 and not task.done():
                await asyncio.wait({task}, timeout=left_s)
                left_s, lost_s = self._lost_s - lost_s, self._lost_s
        finally:
            is_late = not task.done()
            task.cancel()
            task.add_done_callback(_forget)
        if is_late:
            raise AttemptError(f"no result within {timeout_s:g} s (timeout_s)", is_timeout=True)
        if task.cancelled():
            raise AttemptError("the function was cancelled from inside")
        return task.result()


def _forget(task: "asyncio.Task[Any]") -> None:
    if not task.cancelled():
        task.exception()  # seen, also where nobody waits any more


def _where(stack: "traceback.StackSummary") -> str:
    """The user's line that does not return, and what it called."""
    users = [frame for frame in stack if not any(part in frame.filename for part in OUR_FILES)]
    calls = (i for i, frame in enumerate(stack) if frame.filename.endswith(CALLER))
    inside = [frame for frame in stack[next(calls, 0) :] if frame in users] or [stack[-1]]
    first, last = inside[0], stack[-1]
    text = f"{first.name} ({Path(first.filename).name}, line {first.lineno})"
    return (
        text if last is first else f"{text}, in {last.name} ({Path(last.filename).name}, line {last.lineno})"
    )

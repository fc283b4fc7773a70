"""One process with one function, as its worker sees it: calls go in with a number, answers come back with it.

Invariant: every call ends. Plain functions are timed here, and a process with a call that is late takes no
more, ends its others, and is killed with all that it started. Async functions are timed by their own process,
which is killed when its loop stands still for longer than a call may take. When a process ends in the middle
of its calls, all of them are told of the same `Death`.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tidemill.common.process.programs import Child
from tidemill.common.process.worker_process import StartupError, WorkerProcess
from tidemill.services.reward.functions.request import Request, outcomes_of
from tidemill.services.reward.outcome import AttemptError, RewardOutcome

SILENT_S = 1.5
"""A process that has not beaten for so long runs no Python code: some call holds the interpreter's lock."""
GRACE_S = 5.0
"""How much longer than its calls may take a loop may stand still before its process is killed."""


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

    `crashing_call` is the one that is known to have caused it; without one, each of several is suspect.
    """

    reason: str
    calls: list[Call]
    is_timeout: bool = False
    crashing_call: Call | None = None
    clearing: "asyncio.Task[None] | None" = None
    """The search for it, once somebody has begun one."""

    def error(self) -> AttemptError:
        """What the crashing_call is told."""
        return AttemptError(self.reason, is_timeout=self.is_timeout)


class ProcessLostError(Exception):
    """The process that ran a call is gone; it says nothing about this call yet."""

    def __init__(self, death: Death) -> None:
        super().__init__(death.reason)
        self.death = death


class MainThreadError(Exception):
    """The call ran beside others, and wanted what only the main thread can do; it has to be made again."""


class ScoringProcess(WorkerProcess):
    """One process. While it `is_sound` it may be given calls."""

    def __init__(
        self, is_async: bool = False, on_beat: Callable[[dict[str, Any]], None] = lambda _: None
    ) -> None:
        super().__init__(Child.SCORING, "the reward function")
        self._is_async, self._on_beat = is_async, on_beat
        self._calls: dict[int, Call] = {}
        self._watching: asyncio.Task[None] | None = None
        self._beat_at = time.monotonic()
        self._has_stragglers = False
        """Calls may be running that nobody waits for any more."""
        self.num_taken = 0
        """Places that its pool has given away."""
        self.load: float | None = None
        """What its last answer said of it."""
        self.is_main_only = False

    async def load_function(self, spec: dict[str, Any]) -> None:
        """Have it import the function, once, whoever asks; `spec` says which.

        Raises:
            AttemptError: it cannot, or not in time.
        """
        try:
            await self.start(spec)
        except StartupError as error:
            raise AttemptError(str(error)) from None
        if self._is_async and self._watching is None:
            self._watching = asyncio.create_task(self._watch())

    async def run(self, call: Call) -> list[RewardOutcome]:
        """Run one call, beside those that run already.

        Raises:
            AttemptError: the function failed, or its time ran out.
            ProcessLostError: the process died.
            MainThreadError: it has to run alone.
        """
        if not self._calls:
            self._beat_at = time.monotonic()
        frame = {"call": call.request.to_wire(), "timeout_s": call.timeout_s}
        with self.request(frame) as (number, answer):
            self._calls[number] = call
            try:
                await asyncio.wait({answer}, timeout=None if self._is_async else call.timeout_s)
                if not answer.done():
                    self._be_late(call)
                return self._read_answer(answer.result())
            except asyncio.CancelledError:
                self._break_off(number)
                raise
            finally:
                del self._calls[number]
                if not self.is_sound and not self._calls:
                    self.kill()

    def receive(self, frame: dict[str, Any]) -> None:
        """An answer, or a beat."""
        self._beat_at = time.monotonic()
        if (beat := frame.get("beat")) is not None:
            if beat:
                self._on_beat(beat)
                self._end_if_stuck(beat)
            return
        self.is_main_only |= "main_only" in frame
        self.load = frame.get("load")
        super().receive(frame)

    def fail(self, reason: str, is_timeout: bool = False, crashing_call: Call | None = None) -> None:
        """It has ended in the middle of its calls, and all of them are told of the same `Death`."""
        if self._watching is not None:
            self._watching.cancel()
        left = {call: self.waiting[n] for n, call in self._calls.items() if not self.waiting[n].done()}
        death = Death(reason, list(left), is_timeout, crashing_call)
        if len(left) == 1 and not self._has_stragglers:
            (death.crashing_call,) = left
        for answer in left.values():
            answer.set_exception(ProcessLostError(death))

    async def _watch(self) -> None:
        """End an async process that does not even beat: some call holds the interpreter's lock."""
        while self.is_sound:
            await asyncio.sleep(SILENT_S)
            limit_s = GRACE_S + min((call.timeout_s for call in self._calls.values()), default=0.0)
            if self._calls and time.monotonic() - self._beat_at > limit_s:
                self.kill()
                self.fail(f"no sign of life for {limit_s:g} s (timeout_s); its process was killed", True)

    def _end_if_stuck(self, beat: dict[str, Any]) -> None:
        """A loop that stands still within one step for longer than its call may take will not turn again."""
        call = self._calls.get(beat["id"])
        limits = [call.timeout_s] if call else [each.timeout_s for each in self._calls.values()]
        if limits and beat["step_s"] > max(limits):
            self.kill()
            where = f"{beat['where']} blocks; its process was killed"
            self.fail(f"no result within {max(limits):g} s (timeout_s): {where}", True, call)

    def _be_late(self, call: Call) -> None:
        reason = f"no result within {call.timeout_s:g} s (timeout_s); its process was killed"
        if len(self._calls) > 1 and time.monotonic() - self._beat_at > SILENT_S:
            self.kill()
            self.fail(reason, is_timeout=True)  # whoever holds the interpreter's lock holds up all of them
            return
        self.is_sound, self._has_stragglers = False, True
        raise AttemptError(reason, is_timeout=True)

    def _read_answer(self, answer: dict[str, Any]) -> list[RewardOutcome]:
        if answer.get("again"):
            raise MainThreadError
        self._has_stragglers |= bool(answer.get("is_timeout"))
        return outcomes_of(answer)

    def _break_off(self, number: int) -> None:
        """A thread cannot be stopped, so its process has to end; a task can."""
        self._has_stragglers = True
        if self._is_async:
            self.send({"cancel": number})
        else:
            self.is_sound = False

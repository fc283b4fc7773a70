"""One process with one function, as its worker sees it: calls go in with a number, answers come back with it.

Invariant: every call ends. Plain functions are timed here, and a process with a call that is late takes no
more, ends its others, and is killed with all that it started. Async functions are timed by their own process,
which is killed when its loop stands still for longer than a call may take. When a process ends in the middle
of its calls, all of them are told of the same `Death`.
"""

import asyncio
import contextlib
import itertools
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tidemill.common.process.children import frame_of, kill_group, receive, spawn
from tidemill.common.process.programs import Child
from tidemill.services.reward.functions.request import Request, outcomes_of
from tidemill.services.reward.outcome import AttemptError, RewardOutcome

START_TIMEOUT_S = 120.0
"""Longest time a process may take to import its function."""
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


Waiting = tuple[Call, "asyncio.Future[dict[str, Any]]"]


class ScoringProcess:
    """One process. While it `is_sound` it may be given calls."""

    def __init__(
        self, is_async: bool = False, on_beat: Callable[[dict[str, Any]], None] = lambda _: None
    ) -> None:
        self._is_async, self._on_beat = is_async, on_beat
        self._process, self._channel = spawn(Child.SCORING)
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._loading: asyncio.Future[None] | None = None
        self._waiting: dict[int, Waiting] = {}
        self._numbers = itertools.count(1)
        self._watching: asyncio.Task[None] | None = None
        self._beat_at = time.monotonic()
        self._has_stragglers = False
        """Calls may be running that nobody waits for any more."""
        self.num_taken = 0
        """Places that its pool has given away."""
        self.load: float | None = None
        """What its last answer said of it."""
        self.is_main_only = False
        self.is_sound = True

    @property
    def pid(self) -> int:
        """Its process id, which is that of its group too."""
        return self._process.pid

    async def load_function(self, spec: dict[str, Any]) -> None:
        """Have it import the function, once, whoever asks; `spec` says which.

        Raises:
            AttemptError: it cannot, or not in time.
        """
        if self._loading is None:
            self._loading = asyncio.ensure_future(self._load(spec))
            self._loading.add_done_callback(lambda loading: loading.cancelled() or loading.exception())
        await asyncio.shield(self._loading)

    async def run(self, call: Call) -> list[RewardOutcome]:
        """Run one call, beside those that run already.

        Raises:
            AttemptError: the function failed, or its time ran out.
            ProcessLostError: the process died.
            MainThreadError: it has to run alone.
        """
        number = next(self._numbers)
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        if not self._waiting:
            self._beat_at = time.monotonic()
        self._waiting[number] = (call, answer)
        try:
            self._write({"id": number, "call": call.request.to_wire(), "timeout_s": call.timeout_s})
            await asyncio.wait({answer}, timeout=None if self._is_async else call.timeout_s)
            if not answer.done():
                self._be_late(call)
            return self._read_answer(answer.result())
        except asyncio.CancelledError:
            self._break_off(number)
            raise
        finally:
            self._waiting.pop(number, None)
            if not self.is_sound and not self._waiting:
                self.kill()

    def kill(self) -> None:
        """Kill it with all that it started, whatever it is doing."""
        self.is_sound = False
        kill_group(self._process)
        if self._writer is not None:
            self._writer.transport.abort()
        else:
            self._channel.close()

    async def wait(self) -> int:
        """Reap it after `kill`; returns its exit code, negative for a signal."""
        code = await asyncio.to_thread(self._process.wait)
        if self._reading is not None:
            await asyncio.gather(self._reading, return_exceptions=True)
        return code

    async def _load(self, spec: dict[str, Any]) -> None:
        reader, self._writer = await asyncio.open_connection(sock=self._channel)
        self._write(spec)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                answer = await receive(reader)
        except TimeoutError:
            self.kill()
            raise AttemptError(f"importing the function took longer than {START_TIMEOUT_S:g} s") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            raise AttemptError(await self._obituary()) from None
        if "error" in answer:
            self.kill()
            raise AttemptError(answer["error"])
        self._reading = asyncio.create_task(self._read_for_ever(reader))
        if self._is_async:
            self._watching = asyncio.create_task(self._watch())

    async def _read_for_ever(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                self._take(await receive(reader))
        self.is_sound = False
        if self._watching is not None:
            self._watching.cancel()
        if self._waiting:
            waiting = list(self._waiting.values())
            self._tell(waiting, await self._obituary())

    async def _watch(self) -> None:
        """End an async process that does not even beat: some call holds the interpreter's lock."""
        while self.is_sound:
            await asyncio.sleep(SILENT_S)
            limit_s = GRACE_S + min((call.timeout_s for call, _ in self._waiting.values()), default=0.0)
            if self._waiting and time.monotonic() - self._beat_at > limit_s:
                self._end(f"no sign of life for {limit_s:g} s (timeout_s); its process was killed")

    def _take(self, frame: dict[str, Any]) -> None:
        self._beat_at = time.monotonic()
        if (beat := frame.get("beat")) is not None:
            if beat:
                self._on_beat(beat)
                self._end_if_stuck(beat)
            return
        self.is_main_only |= "main_only" in frame
        self.load = frame.get("load")
        _, answer = self._waiting.get(frame["id"], (None, None))
        if answer is not None and not answer.done():
            answer.set_result(frame)

    def _end_if_stuck(self, beat: dict[str, Any]) -> None:
        """A loop that stands still within one step for longer than its call may take will not turn again."""
        call, _ = self._waiting.get(beat["id"], (None, None))
        limit_s = (
            call.timeout_s if call else max((call.timeout_s for call, _ in self._waiting.values()), default=0)
        )
        if self._waiting and beat["step_s"] > limit_s:
            reason = (
                f"no result within {limit_s:g} s (timeout_s): {beat['where']} blocks; its process was killed"
            )
            self._end(reason, call)

    def _end(self, reason: str, culprit: Call | None = None) -> None:
        """A call took too long; `culprit` is the one, where it is known."""
        self.kill()
        self._tell(list(self._waiting.values()), reason, is_timeout=True, culprit=culprit)

    def _tell(
        self, waiting: list[Waiting], reason: str, is_timeout: bool = False, culprit: Call | None = None
    ) -> None:
        left = [(call, answer) for call, answer in waiting if not answer.done()]
        death = Death(reason, [call for call, _ in left], is_timeout, culprit)
        if len(left) == 1 and not self._has_stragglers:
            death.culprit = left[0][0]
        for _, answer in left:
            answer.set_exception(ProcessLostError(death))

    def _be_late(self, call: Call) -> None:
        reason = f"no result within {call.timeout_s:g} s (timeout_s); its process was killed"
        if len(self._waiting) > 1 and time.monotonic() - self._beat_at > SILENT_S:
            self._end(reason)  # whoever holds the interpreter's lock holds up all of them
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
            self._write({"cancel": number})
        else:
            self.is_sound = False

    def _write(self, frame: dict[str, Any]) -> None:
        assert self._writer is not None
        if not self._writer.is_closing():
            self._writer.write(frame_of(frame))

    async def _obituary(self) -> str:
        self.kill()  # it is ending already, and its exit code stands; what it started may linger
        code = await asyncio.to_thread(self._process.wait)
        reason = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return f"the process of the reward function died ({reason})"

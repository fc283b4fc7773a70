"""Runs reward functions: cheap built-ins on the worker's loop, all others in processes of their own.

Guarantees for these processes: each run of a call ends at its time limit (extended, for async calls, by the
time in which others block their loop), and nothing that a function does, blocking, computing or crashing,
holds up the worker: its leases and heartbeats go on.

Plain functions get `size` processes, each with as many calls at once as `Sizing` says. Async ones get one
process with any number; of these at most `at_once` run, and others wait there. A plain call that is late or
cancelled costs its process: it takes no more calls, and is killed with all that it started when its other
calls have ended.

Where no process can be started, its machine is short: the call is no attempt (`MachineFaultError`), unless
another process of the pool can take it.

A call that crashes its process is found by bisection: calls that were in flight together run again in a
process apart, each time at most half as many at once, until one is alone, and fails, when its process dies.
What crashes now and then is never alone then, so that no attempt fails: each death is counted by itself.
"""

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import structlog

from tidemill.common.errors import MachineFaultError
from tidemill.common.process.failures import Failure, FailureLog, is_logged
from tidemill.common.process.programs import Child
from tidemill.common.process.shortage import find_shortage, make_fault
from tidemill.common.process.worker_process import Answer, StartupError, WorkerProcess
from tidemill.common.telemetry import metrics
from tidemill.common.wire.messages import Lane, ScoreStatus, Trajectory
from tidemill.services.reward.functions.request import (
    RAISE_LIMIT,
    Callee,
    LongCall,
    Request,
    failure_of,
    outcomes_of,
)
from tidemill.services.reward.outcome import AttemptError, BreakOff, OnEnd, RewardOutcome

log = structlog.get_logger(__name__)

SAMPLES_PER_PROCESS = 8
"""Samples to hold for each process: enough to keep it busy; more would be missing in idle workers."""
UNRESTRICTED = 1 << 30
IDLE = 0.35
"""Load of a process, in cores, below which its calls at once double."""
BUSY = 0.6
"""Load below which they grow by one."""
FULL = 0.95
"""Load above which they shrink by one."""
SHOWN_S = 60.0
"""How long the heartbeat shows that a loop was blocked."""
MAX_REMEMBERED_CALLS = 1024
"""Most calls of which it is remembered that they crashed a process, or why they failed."""
SLOW_S = 10.0
"""Calls that compute for longer are named before their limit: they may loop."""
SILENT_S = 1.5
"""A process without a beat for this long runs no Python code: some call holds the interpreter's lock."""
DIED = "died"
"""Kind of a death that fails no attempt, beside the kinds of failures."""
GRACE_S = 5.0
"""An async process is killed after this long, plus the shortest limit of its calls, without a beat."""


class Execution:
    """Calls one function. Evaluation has as many processes of its own, and never queues behind training."""

    def __init__(
        self, function: Callee, num_processes: int, threads: int = 1, at_once: int | None = None
    ) -> None:
        """`at_once`: most calls of an async function that run at once, if there is a limit; others wait in
        its process."""
        self._function = function
        self._is_async = function.is_async
        self._least = SAMPLES_PER_PROCESS * num_processes
        self._pools: dict[Lane, ProcessPool] = {}
        """Empty for a cheap function, which runs on the worker's loop."""
        if function.is_cheap and not function.is_async:
            return
        spec = function.spec()
        if function.is_async and at_once is not None:
            spec["at_once"] = at_once
        size = 1 if function.is_async else num_processes
        for lane in Lane:
            self._pools[lane] = ProcessPool(dict(spec), size, threads, function.is_async)

    @property
    def slots(self) -> int | None:
        """Samples it makes sense to hold at once; None where only memory sets a limit."""
        parallel = self.parallel  # twice what runs: while one call ends, the next sample is there
        return None if parallel is None else max(self._least, 2 * parallel)

    @property
    def parallel(self) -> int | None:
        """Most samples that are scored at once at present; None where only `slots` sets a limit."""
        return None if self._is_async or not self._pools else self._pools[Lane.TRAIN].capacity

    @property
    def is_queueing(self) -> bool:
        """Whether its process keeps calls beyond `at_once` until others end."""
        return self._is_async

    @property
    def notes(self) -> list[str]:
        """Texts for the heartbeat about what is wrong with its processes."""
        texts: list[str] = []
        for pool in self._pools.values():
            texts += [pool.blockage.note_text, pool.slow_text, pool.short_text]
        return [text for text in texts if text]

    def deaths(self, subject: str) -> list[Failure]:
        """Deaths of its processes that failed no attempt, by cause; `subject` is whose processes they are."""
        return [death for pool in self._pools.values() for death in pool.deaths.by_cause(subject)]

    def begin(self, request: Request, timeout_s: float, on_end: OnEnd) -> BreakOff | None:
        """Begin a call for one sample without a task that waits for it; see `Reward.begin`."""
        if not self._is_async:
            return None
        return self._pools[request.lane].begin(request, timeout_s, on_end)

    async def start(self) -> None:
        """Start the process of an async function for training before the first sample comes. Those of plain
        functions start as calls need them."""
        if self._is_async:
            await self._pools[Lane.TRAIN].start()

    async def run(self, request: Request, timeout_s: float) -> list[RewardOutcome]:
        """One outcome for each sample of the request.

        Raises:
            AttemptError: see `ProcessPool.run`.
            MachineFaultError: the machine is short of something: this was no attempt.
        """
        try:
            if not self._pools:
                return await self._function.call(request)
            return await self._pools[request.lane].run(request, timeout_s)
        except AttemptError as error:
            # The function says so: it is true where our own start fails as well.
            fault = find_shortage() if error.may_be_machines else None
            if fault is None:
                raise
            raise MachineFaultError(f"{error}. {fault}", fault.number) from error

    async def close(self) -> None:
        for pool in self._pools.values():
            await pool.close()


class Sizing:
    """How many calls each process of a pool takes at once; all of them run the same function."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.calls = 1

    def observe(self, load: float | None, is_wanted: bool) -> None:
        """Adapt to the `load` that a call reported as it ended; `is_wanted`: others wait for a place."""
        if load is None:
            return
        if load > FULL:
            self.calls = max(1, self.calls - 1)
        elif is_wanted and load < BUSY:
            self.calls = min(self._most, 2 * self.calls if load < IDLE else self.calls + 1)

    def pin(self) -> None:
        """The function works in main threads only: one call at a time from now on."""
        self._most = 1
        self.calls = 1


class Blockage:
    """Blocked event loops that the scoring processes of one function report."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._where = ""
        self._seen_at = float("-inf")
        self._num_seen = 0
        self._longest_s = 0.0

    def note(self, beat: dict[str, Any]) -> None:
        """Record that a loop is blocked; logged the 1st time, the 2nd, the 4th, and so on."""
        self._longest_s = max(self._longest_s if self.note_text else 0.0, beat["blocked_s"])
        self._where = beat["where"]
        self._seen_at = time.monotonic()
        self._num_seen += 1
        if is_logged(self._num_seen):
            log.warning(
                "an async reward function blocks its event loop: it scores one sample at a time",
                reward=self.name,
                blocked_s=round(beat["blocked_s"], 1),
                where=self._where,
                remedy="await what takes time, or declare it with plain `def`: then it runs in threads",
            )

    @property
    def note_text(self) -> str:
        """Text for the heartbeat; empty if no loop was blocked in the last `SHOWN_S`."""
        if time.monotonic() - self._seen_at > SHOWN_S:
            return ""
        at = f": {self._where}" if self._where else ""
        return f"{self.name} blocks its event loop, up to {self._longest_s:.1f} s{at}"


class Deaths:
    """Counts the deaths of one function's processes that fail no attempt: the calls are run again."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._log = FailureLog()
        self._num_seen = 0

    def note(self, reason: str, num_calls: int, is_timeout: bool) -> None:
        """Count a process that ended for `reason` while `num_calls` calls ran in it; logged the 1st time, the
        2nd, the 4th, and so on."""
        if num_calls == 0:
            consequence = "with no call running; the next call starts another one"
        elif num_calls == 1:
            consequence = "with 1 call running; it is run again"
        else:
            consequence = f"with {num_calls} calls running; they are run again"
        problem = f"{reason} {consequence}"
        self._log.note("", "timeout" if is_timeout else DIED, problem)
        self._num_seen += 1
        if is_logged(self._num_seen):
            log.warning(
                "a process of a reward function died",
                reward=self._name,
                problem=problem,
                so_far=self._num_seen,
                remedy="look for what ends Python (os._exit), crashes in native code, needs more memory than "
                "there is, or holds the interpreter's lock",
            )

    def by_cause(self, subject: str) -> list[Failure]:
        return [replace(death, what=subject) for death in self._log.failures]


class ProcessLostError(Exception):
    """The process of a call has ended. `num_suspects` calls may have caused it, this one among them; 1: this
    one has; 0: another one is known to have."""

    def __init__(self, reason: str, num_suspects: int, is_timeout: bool) -> None:
        super().__init__(reason)
        self.num_suspects = num_suspects
        self.is_timeout = is_timeout


class MainThreadError(Exception):
    """The call ran beside others and needs the main thread; it has to be run again."""


class ProcessPool:
    """Processes with one function. A call that ends, in any way, frees a place."""

    def __init__(self, spec: dict[str, Any], size: int, threads: int = 1, is_async: bool = False) -> None:
        self._spec = spec
        self._size = size
        self._is_async = is_async
        self._sizing = Sizing(threads)
        self._processes: list[ScoringProcess] = []
        self._line = asyncio.Lock()
        """Calls wait in it for a place; the first one looks for it."""
        self._freed = asyncio.Event()
        """Set whenever a call leaves a process."""
        self._apart: ScoringProcess | None = None
        """The process in which suspects of a crash run; these have a line of their own."""
        self._taken_apart = 0.0
        """The share of it that its calls have taken: of at most N together, each takes 1/N."""
        self._line_apart = asyncio.Lock()
        self._freed_apart = asyncio.Event()
        self._reapers: set[asyncio.Task[int]] = set()
        self._crashing: OrderedDict[object, None] = OrderedDict()
        """Samples whose call has crashed a process: further attempts run alone, or others would be lost."""
        self._failed: OrderedDict[int, tuple[Trajectory, Exception]] = OrderedDict()
        """By id of its trajectory: why a call that `begin` began has failed, for `run`."""
        self.blockage = Blockage(str(spec["reference"]).rpartition(":")[2])
        self.deaths = Deaths(self.blockage.name)
        self._num_refused = 0
        self.short_text = ""
        """Text for the heartbeat: why there are fewer processes than configured."""

    @property
    def capacity(self) -> int:
        return self._size * self._calls_each

    async def start(self) -> None:
        """Start the first process. Where that fails, the first call tries again, and says why."""
        with contextlib.suppress(MachineFaultError):
            process = self._find_place()
            assert process is not None, "no call has been made yet"
            try:
                await process.start(self._spec)
            except (StartupError, MachineFaultError):
                self._discard(process)

    def begin(self, request: Request, timeout_s: float, on_end: OnEnd) -> BreakOff | None:
        """Begin a call of an async function for one sample, where its process has started."""
        process = self._processes[0] if self._processes else None
        if process is None or not process.is_ready or self._line.locked():
            return None
        if self._crashing and _identity(request) in self._crashing:
            return None  # it has to run alone
        process.num_taken += 1

        def end(outcomes: list[RewardOutcome] | None, error: Exception | None) -> None:
            self._leave(process)
            if outcomes is None and error is None:
                return  # broken off: nobody waits
            if outcomes is not None and len(outcomes) == 1:
                on_end(outcomes[0])
                return
            trajectory = request.samples[0].trajectory
            reason = error or AttemptError(f"it gave {len(outcomes or ())} outcomes for one sample")
            self._failed[id(trajectory)] = (trajectory, reason)
            # Some are never asked for: their leases were lost meanwhile.
            while len(self._failed) > MAX_REMEMBERED_CALLS:
                self._failed.popitem(last=False)
            on_end(None)

        try:
            return process.begin(request, timeout_s, end)
        except Exception:  # it cannot be sent: `run` says why
            self._leave(process)
            return None

    async def run(self, request: Request, timeout_s: float) -> list[RewardOutcome]:
        """Run a call in the next free place. Waiting for one does not count as its time.

        Raises:
            AttemptError: the function failed, its time ran out, or it ended its process.
            MachineFaultError: no process can be started, and none is there.
        """
        num_together = 1 if self._crashing and _identity(request) in self._crashing else UNRESTRICTED
        while True:
            try:
                if self._failed:
                    self._raise_failure(request)
                if num_together == UNRESTRICTED:
                    return await self._run_in_pool(request, timeout_s)
                return await self._run_apart(request, timeout_s, num_together)
            except ProcessLostError as lost:
                if lost.num_suspects == 1:
                    self._crashing[_identity(request)] = None
                    while len(self._crashing) > MAX_REMEMBERED_CALLS:
                        self._crashing.popitem(last=False)
                    raise AttemptError(
                        str(lost), is_timeout=lost.is_timeout, may_be_machines=not lost.is_timeout
                    ) from None
                if lost.num_suspects:  # halved each time, so the crashing call is soon alone
                    num_together = max(1, min(num_together, lost.num_suspects) // 2)
            except MainThreadError:
                # The pool is pinned to one call at a time now; of the process apart, that is asked for.
                if num_together < UNRESTRICTED:
                    num_together = 1

    def _raise_failure(self, request: Request) -> None:
        """Raise the failure of the call that was begun for this request, if there was one."""
        failed = self._failed.pop(id(request.samples[0].trajectory), None)
        if failed is not None:
            _, error = failed
            raise error

    async def close(self) -> None:
        for process in list(self._processes):
            self._discard(process)
        if self._apart:
            self._discard(self._apart)
        await asyncio.gather(*self._reapers)

    @property
    def slow_text(self) -> str:
        """Text for the heartbeat about a call that computes for long; empty if there is none."""
        where = next(filter(None, (process.computes_at for process in self._processes)), "")
        if not where:
            return ""
        return f"{self.blockage.name} has computed for more than {SLOW_S:g} s in one call: {where}"

    @property
    def _calls_each(self) -> int:
        return UNRESTRICTED if self._is_async else self._sizing.calls

    async def _run_in_pool(self, request: Request, timeout_s: float) -> list[RewardOutcome]:
        async with self._line:  # first come, first served: only the first in line looks for a place
            while (process := self._find_place()) is None:
                self._freed.clear()
                await self._freed.wait()
            # Within the line: the next one must not find the same place.
            process.num_taken += 1
        try:
            return await process.run(self._spec, request, timeout_s)
        finally:  # also where this call was cancelled
            if process.is_main_only:
                self._sizing.pin()
            self._sizing.observe(process.load, is_wanted=self._line.locked())
            # Counted once: a call that is cancelled brings no load of its own.
            process.load = None
            self._leave(process)

    def _leave(self, process: "ScoringProcess") -> None:
        """Free the place of a call that has ended."""
        process.num_taken -= 1
        if not process.is_sound and not process.num_taken:
            self._discard(process)
        self._freed.set()

    def _find_place(self) -> "ScoringProcess | None":
        """The process with the fewest calls: an idle one, a new one, or one that takes one more."""
        sound = [process for process in self._processes if process.is_sound]
        best = min(sound, key=lambda process: process.num_taken, default=None)
        if (best is None or best.num_taken) and len(sound) < self._size:
            try:
                new = ScoringProcess(self._is_async, self.blockage.note, self._note_death)
            except MachineFaultError as fault:
                if best is None:
                    raise
                self._note_refusal(fault, len(sound))
            else:
                self.short_text = ""
                self._processes.append(new)
                return new
        return best if best is not None and best.num_taken < self._calls_each else None

    def _note_refusal(self, fault: MachineFaultError, num_sound: int) -> None:
        """Record that a further process could not be started; those that run take its calls."""
        name = self.blockage.name
        self.short_text = f"{name} runs in {num_sound} of {self._size} processes: {fault}"
        self._num_refused += 1
        if is_logged(self._num_refused):
            log.warning(
                "a further scoring process could not be started: fewer samples are scored at once",
                reward=name,
                processes=num_sound,
                wanted=self._size,
                problem=str(fault),
            )

    async def _run_apart(self, request: Request, timeout_s: float, num_together: int) -> list[RewardOutcome]:
        """Run a suspect in the process apart, at most `num_together` at once; 1 gives it a new process."""
        share = 1 / num_together
        async with self._line_apart:
            # With some room: shares such as 1/3 do not add up to 1 exactly.
            while self._taken_apart + share > 1 + 1e-6:
                self._freed_apart.clear()
                await self._freed_apart.wait()
            # Before the share is taken: it is not given back where no process can be started.
            if self._apart is None or not self._apart.is_sound:
                self._apart = ScoringProcess(self._is_async, self.blockage.note, self._note_death)
            self._taken_apart += share
            process = self._apart
            process.num_taken += 1
        try:
            return await process.run(self._spec, request, timeout_s)
        finally:
            self._taken_apart -= share
            process.num_taken -= 1
            if not process.num_taken:
                self._discard(process)
            self._freed_apart.set()

    def _note_death(self, process: "ScoringProcess", reason: str, num_calls: int, is_timeout: bool) -> None:
        """Count a death that fails no attempt."""
        self.deaths.note(reason, num_calls, is_timeout)
        # Where calls are left, the last one that leaves does it.
        if process in self._processes and not process.num_taken:
            self._discard(process)

    def _discard(self, process: "ScoringProcess") -> None:
        if process in self._processes:
            self._processes.remove(process)
            if process.num_taken or not process.is_sound:
                metrics.SCORING_PROCESSES_KILLED.inc()
        process.kill()
        reaper = asyncio.create_task(process.wait())
        self._reapers.add(reaper)
        reaper.add_done_callback(self._reapers.discard)


def _identity(request: Request) -> object:
    """By what a call is recognised when it is tried again: its samples."""
    return tuple((sample.key, sample.is_evaluation) for sample in request.samples)


OnDeath = Callable[["ScoringProcess", str, int, bool], None]
"""Gets a process that has ended and failed no call, why, how many calls ran, and whether a limit was why."""
EndOfCall = Callable[[list[RewardOutcome] | None, Exception | None], None]
"""Gets the outcomes of a call, or why there are none; neither where it was broken off."""


class BegunCall(Answer):
    """A call of an async function for which no task waits: its answer is acted on as it comes."""

    __slots__ = ("_end", "_is_done", "_process", "number")

    def __init__(self, process: "ScoringProcess", end: EndOfCall) -> None:
        self._process = process
        self._end = end
        self._is_done = False
        self.number = 0

    def done(self) -> bool:
        return self._is_done

    def set_result(self, frame: dict[str, Any], /) -> None:
        # Before `_end`, which may begin the next call, or discard the process: this one is over for both.
        self._finish()
        try:
            outcomes = self._process._outcomes_of(frame)
        except Exception as error:
            self._end(None, error)
        else:
            self._end(outcomes, None)

    def set_exception(self, error: BaseException, /) -> None:
        assert isinstance(error, Exception)
        self._finish()
        self._end(None, error)

    def cancel(self) -> None:
        """Nothing: `break_off` cancels it."""

    def break_off(self) -> None:
        self._process._break_off(self.number)
        self._finish()
        self._end(None, None)

    def _finish(self) -> None:
        self._is_done = True
        self._process._end_call(self.number)


class ScoringProcess(WorkerProcess):
    """One process with one function: calls go in with a number, answers come back with it.

    Every call ends. Plain functions are timed here, async ones by their own process, which is killed when its
    loop stands still for longer than a call may take. While it `is_sound` it may be given calls.
    """

    def __init__(
        self,
        is_async: bool,
        on_blocked: Callable[[dict[str, Any]], None],
        on_death: OnDeath | None = None,
    ) -> None:
        """`on_death` is called where the process has ended and no call fails for it: with the reason, how
        many calls ran, and whether it was killed at a limit."""
        super().__init__(Child.SCORING, "the reward function")
        self._is_async = is_async
        self._on_blocked = on_blocked
        self._on_death = on_death
        self._is_ended_by_us = False
        """Whether the worker has ended it: nothing is wrong with it where no call is left."""
        self._limits: dict[int, float] = {}
        """Seconds that each call may take."""
        self._watching: asyncio.Task[None] | None = None
        self._beat_at = time.monotonic()
        self._long_calls: dict[int, LongCall] = {}
        """By number: the calls that took long at the last beat."""
        self._has_stragglers = False
        """Whether calls that no caller waits for may still be running."""
        self.num_taken = 0
        """Calls that its pool has assigned to it."""
        self.load: float | None = None
        """Load that its last answer reported, in cores."""
        self.is_main_only = False

    async def run(self, spec: dict[str, Any], request: Request, timeout_s: float) -> list[RewardOutcome]:
        """Run one call of the function that `spec` describes, beside those that run already.

        Raises:
            AttemptError: the function cannot be loaded, it failed, or its time ran out.
            MachineFaultError: it cannot be loaded because its process is short of something.
            ProcessLostError: the process died.
            MainThreadError: it has to run alone.
        """
        try:
            await self.start(spec)
        except StartupError as error:
            if error.shortage:
                raise make_fault(error.shortage, "the scoring process could not start", str(error)) from None
            raise AttemptError(str(error), may_be_machines=True) from None
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        number = self._begin_call(request, timeout_s, answer)
        timer = None
        if not self._is_async:
            timer = asyncio.get_running_loop().call_later(timeout_s, self._end_late, number, timeout_s)
        try:
            reply = await answer
        except asyncio.CancelledError:
            self._break_off(number)
            raise
        finally:
            if timer is not None:
                timer.cancel()
            self._end_call(number)
        return self._outcomes_of(reply)

    @property
    def is_ready(self) -> bool:
        """Whether its function is loaded, and it may get further calls."""
        return self.is_sound and self._watching is not None

    def begin(self, request: Request, timeout_s: float, end: "EndOfCall") -> BreakOff:
        """Begin a call of an async function in a process that is ready. `end` gets its outcomes, or why there
        are none. Returns what cancels it; `end` is called then with nothing."""
        call = BegunCall(self, end)
        call.number = self._begin_call(request, timeout_s, call)
        return call.break_off

    def _begin_call(self, request: Request, timeout_s: float, answer: Answer) -> int:
        # It was idle: silence from before this call does not count.
        if not self._limits:
            self._beat_at = time.monotonic()
        number = self.begin_request({"call": request.to_wire(), "timeout_s": timeout_s}, answer)
        self._limits[number] = timeout_s
        return number

    def _end_call(self, number: int) -> None:
        self.end_request(number)
        del self._limits[number]
        if not self.is_sound and not self._limits:
            self.kill()

    def _outcomes_of(self, reply: dict[str, Any]) -> list[RewardOutcome]:
        if reply.get("again"):
            raise MainThreadError
        failure = failure_of(reply)
        if failure is None:
            return outcomes_of(reply)
        if failure.status is ScoreStatus.TIMEOUT:
            self._has_stragglers = True
        if failure.may_be_machines:
            self.is_sound = False  # it may be this process alone: the function leaks descriptors, say
        raise failure.to_error()

    @property
    def computes_at(self) -> str:
        """Where a call has computed for `SLOW_S`; empty where none has."""
        for call in self._long_calls.values():
            if call.is_computing and call.elapsed_s > SLOW_S:
                return call.where
        return ""

    def receive(self, frame: dict[str, Any]) -> None:
        self._beat_at = time.monotonic()
        beat = frame.get("beat")
        if beat is not None:
            self._long_calls = {number: LongCall(*call) for number, call in frame.get("long", {}).items()}
            if beat:
                self._on_blocked(beat)
                self._end_if_stuck(beat)
            return
        self.is_main_only |= "main_only" in frame
        self.load = frame.get("load")
        super().receive(frame)

    def fail(self, reason: str, is_timeout: bool = False, to_blame: int | None = None) -> None:
        """Fail the calls of a process that has ended; `to_blame` is the call known to have caused it."""
        if self._watching is not None:
            self._watching.cancel()
        unanswered = {number: answer for number, answer in self.waiting.items() if not answer.done()}
        suspects: dict[int, int] = {}
        for number in unanswered:
            if to_blame is not None:
                suspects[number] = int(number == to_blame)
            else:
                # A call that no caller waits for any more may have caused it as well.
                suspects[number] = len(unanswered) + self._has_stragglers
        is_failure = 1 in suspects.values()
        is_expected = not unanswered and self._is_ended_by_us
        if self._on_death is not None and not is_failure and not is_expected:
            self._on_death(self, reason, len(unanswered), is_timeout)
        for number, answer in unanswered.items():
            answer.set_exception(ProcessLostError(reason, suspects[number], is_timeout))

    def _lose(self) -> None:
        # Whoever ends it has marked it before: it was to get no more calls.
        self._is_ended_by_us = not self.is_sound
        super()._lose()

    async def start(self, spec: dict[str, Any]) -> None:
        await super().start(spec)
        if self._is_async and self._watching is None:
            self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        """Kill an async process that does not beat: some call holds the interpreter's lock."""
        while self.is_sound:
            await asyncio.sleep(SILENT_S)
            limit_s = GRACE_S + min(self._limits.values(), default=0.0)
            if self._limits and time.monotonic() - self._beat_at > limit_s:
                self.kill()
                self.fail(f"no sign of life for {limit_s:g} s (timeout_s); its process was killed", True)

    def _end_if_stuck(self, beat: dict[str, Any]) -> None:
        """Kill the process if one step of its loop takes longer than its call may take."""
        owner = beat["id"] if beat["id"] in self._limits else None
        limit_s = max(self._limits.values(), default=0.0) if owner is None else self._limits[owner]
        if self._limits and beat["step_s"] > limit_s:
            self.kill()
            where = f"{beat['where'] or 'it'} blocks; its process was killed"
            self.fail(f"no result within {limit_s:g} s (timeout_s): {where}", True, owner)

    def _end_late(self, number: int, timeout_s: float) -> None:
        """Fail a call of a plain function at its limit, unless it has just ended."""
        answer = self.waiting[number]
        if answer.done():
            return
        call = self._long_calls.get(number)
        at = ""
        if call is not None:
            doing = "it computed" if call.is_computing else "it waited"
            at = f"; {doing}, in the end in {call.where}" if call.where else f"; {doing}"
        reason = f"no result within {timeout_s:g} s (timeout_s){at}; its process was killed; {RAISE_LIMIT}"
        if len(self._limits) > 1 and time.monotonic() - self._beat_at > SILENT_S:
            self.kill()  # the call that holds the interpreter's lock holds up all of them
            self.fail(reason, is_timeout=True)
            return
        self.is_sound = False
        self._has_stragglers = True
        # What computes all the time is a loop, or too slow; what waits may wait for a server.
        is_final = call is not None and call.is_hopeless
        is_code_error = call is not None and call.is_computing
        answer.set_exception(
            AttemptError(reason, is_timeout=True, is_final=is_final, is_code_error=is_code_error)
        )

    def _break_off(self, number: int) -> None:
        """Cancel a call: a task can be cancelled; a thread cannot be stopped, so its process has to end."""
        self._has_stragglers = True
        if self._is_async:
            self.send({"cancel": number})
        else:
            self.is_sound = False

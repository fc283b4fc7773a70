"""Main program of a scoring process: it loads a function once, then answers calls, several at a time.

It exchanges frames with its parent over a socket (`request.py`). The first answer says whether the function
loaded. Then every call has a number, and its answer carries the same. A `beat` twice a second shows that this
process still runs Python code: a call that holds the interpreter lock stops the beats. The process ends when
its parent closes the socket or dies, whatever the function is doing.

Plain functions run in threads: the first call in the main thread, others beside it. The worker decides how
many run at once; with one at a time everything happens in the main thread.

Async functions run on one event loop, many at once. What this costs is the number of times that a process is
woken up, so the loop reads the socket itself, calls beyond `at_once` wait here for their turn, and answers
wait for others while such a call has taken their place. One that blocks instead of awaiting delays the
calls beside it and nothing else. While the loop is blocked, every beat says for how long, by which call and
in which line. This time counts against no call's limit; but if a single step takes longer than its call's
limit, the worker kills the process.
"""

import asyncio
import contextlib
import contextvars
import heapq
import importlib
import os
import queue
import resource
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from pathlib import Path
from typing import Any, BinaryIO, ParamSpec

from tidemill.common.errors import ConfigError
from tidemill.common.process.children import (
    FrameDecoder,
    Send,
    become_child,
    read_frame,
    sender,
    startup_failure,
)
from tidemill.common.process.shortage import NO_THREAD, is_machine_fault
from tidemill.common.process.users_code import is_users_file
from tidemill.services.reward.functions.request import (
    RAISE_LIMIT,
    Callee,
    LongCall,
    answer_to,
    failure_to_wire,
    run_through,
)
from tidemill.services.reward.outcome import AttemptError

P = ParamSpec("P")

BEAT_S = 0.5
TICK_S = 0.1
LONG_S = 1.0
"""Calls that take longer are reported with every beat: where they are, and whether they compute."""
BLOCKED_S = 0.5
"""A loop that has run no callback for this long is blocked."""
MOST_THREADS = 256
READ_BYTES = 1 << 18
UNRESTRICTED = 1 << 30
GATHER_SHARE = 0.25
"""How long the first answer waits for others, as a share of the time that its call took; those go with it."""
LONGEST_GATHER_S = 0.15
EARLIEST_SHARE = 0.75
"""Share of that time after which a wake-up for something else takes the answers along."""
MOST_ENDED = 256
"""Limits of calls that have ended, beyond twice the calls that run, that are kept."""
FLUSH_S = 1.0
"""Longest time for writing what functions have printed, as the process ends."""
LEAST_S = 0.05
"""Shortest time over which the load is measured."""
CALLER = "services/reward/functions/reward_function.py"
IMPORTLIB = "<frozen importlib"
"""Files of frames that import a module."""
OUR_FILES = (
    f"{Path(__file__).parents[1]}{os.sep}",
    f"{Path(asyncio.__file__).parent}{os.sep}",
    str(contextlib.__file__),
)

_has_used_signals = threading.Event()
_thread = threading.local()
_current_call: contextvars.ContextVar[int | None] = contextvars.ContextVar("call", default=None)


def main(descriptor: int, parent: int) -> None:
    """Serve the socket `descriptor` until process `parent` closes it."""
    for name in ("signal", "alarm", "setitimer"):
        if hasattr(signal, name):
            setattr(signal, name, _noted(getattr(signal, name)))
    with become_child(descriptor, parent) as channel, channel.makefile("rb") as frames:
        spec = read_frame(frames)
        if spec is None:
            return
        at_once = spec.pop("at_once", UNRESTRICTED)
        send = sender(channel, _end)
        has_started = threading.Event()
        try:
            function = _loaded(spec)
            function.prepare()
            calls: LoopCalls | ThreadCalls
            if function.is_async:
                # The worker sends no call before the first answer: `frames` has read nothing ahead.
                calls = LoopCalls(function, send, channel, at_once)
            else:
                calls = ThreadCalls(function, send)
                threading.Thread(target=_read_for_ever, args=(frames, calls), daemon=True).start()
            threading.Thread(target=_beat_for_ever, args=(calls, send, has_started), daemon=True).start()
        except Exception as error:
            if not isinstance(error, ConfigError) and not is_machine_fault(error):
                # Not raised: the socket would close first, and the worker kill a process that still runs.
                traceback.print_exc()
                os._exit(1)
            send(startup_failure(error))
            return
        _has_used_signals.clear()  # what the function's import did does not count
        send({})
        has_started.set()
        try:
            calls.serve()
        except BaseException:
            traceback.print_exc()
        finally:  # `serve` never returns; if it does, the worker sees a dead process, and starts another
            os._exit(1)


def _loaded(spec: dict[str, Any]) -> Callee:
    """The result of the function that `maker` in `spec` names, called with the rest of `spec`."""
    module, _, name = spec.pop("maker").partition(":")
    function: Callee = getattr(importlib.import_module(module), name)(**spec)
    return function


def _ending_on_error(function: Callable[P, None]) -> Callable[P, None]:
    """Have an error of this program end its process. An event loop, an executor or a thread would drop the
    error: calls whose frames are lost would never end."""

    @wraps(function)
    def ending(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            function(*args, **kwargs)
        except Exception:
            traceback.print_exc()
            os._exit(1)

    return ending


@_ending_on_error
def _read_for_ever(frames: BinaryIO, calls: "ThreadCalls") -> None:
    while (frame := read_frame(frames)) is not None:
        calls.take(frame)
    _end()


def _end() -> None:
    """End this process: its parent has closed the socket. Calls that no caller waits for may still run."""
    # `_exit` flushes no buffers. A flush may raise, where a function has closed or replaced the stream, or
    # take for ever, where nobody reads it.
    with contextlib.suppress(Exception):
        timer = threading.Timer(FLUSH_S, os._exit, (0,))
        timer.daemon = True
        timer.start()
        sys.stdout.flush()
    os._exit(0)


def _beat_for_ever(calls: "LoopCalls | ThreadCalls", send: Send, has_started: threading.Event) -> None:
    has_started.wait()  # the first frame is the answer to the start
    while True:
        time.sleep(BEAT_S)
        send({"beat": calls.state(), "long": calls.long_calls()})


def _noted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function of `signal`: note its use, and mark a call that used it outside the main thread."""

    @wraps(function)
    def noted(*args: Any) -> Any:
        _has_used_signals.set()
        if threading.current_thread() is not threading.main_thread():
            _thread.was_refused = True
            raise ValueError("signal only works in main thread of the main interpreter")
        return function(*args)

    return noted


class RunningCall:
    """A call that the thread which makes this object has begun."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self._native_id = threading.get_native_id()
        self.started_at = time.monotonic()
        self._before = _thread_times(self._native_id)

    def times(self) -> tuple[float, float]:
        """Seconds that its thread has run on a core, and those that it has waited for one."""
        ran_s, waited_s = _thread_times(self._native_id)
        ran_before_s, waited_before_s = self._before
        return ran_s - ran_before_s, waited_s - waited_before_s


def _thread_times(native_id: int) -> tuple[float, float]:
    """Seconds that a thread of this process has run on a core and waited for one; 0 where not known."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/self/task/{native_id}/schedstat").read_text().split()
        return int(fields[0]) / 1e9, int(fields[1]) / 1e9
    return 0.0, 0.0


class ThreadCalls:
    """Calls of a plain function: the first one in the main thread, those that come meanwhile beside it.

    With each answer goes the load since the last one, by which the worker decides how many it sends at once.
    """

    def __init__(self, function: Callee, send: Send) -> None:
        self._function = function
        self._send = send
        self._for_main: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        """Frames of calls for the main thread."""
        self._is_main_busy = False
        self._others = ThreadPoolExecutor(MOST_THREADS, thread_name_prefix="reward")
        self._answered_at = time.monotonic()
        self._load_since = self._answered_at
        """Begin of the time over which the load is measured, and the seconds computed until then."""
        self._computed_before_s = _computing_s()
        self._running: dict[int, RunningCall] = {}
        """By number of the call."""

    def take(self, frame: dict[str, Any]) -> None:
        """Start a call. A thread cannot be stopped: cancelled calls end with the process."""
        now = time.monotonic()
        if not self._is_main_busy and now - self._answered_at > LEAST_S:
            # It was idle, which is no load.
            self._load_since = now
            self._computed_before_s = _computing_s()
        if self._is_main_busy:
            try:
                self._others.submit(self._answer, frame)
            except RuntimeError as error:
                if NO_THREAD not in str(error):
                    raise
                # The main thread takes it after its present call, unless another thread is free before: the
                # executor has it in its queue, too.
                self._for_main.put(frame)
        else:
            self._is_main_busy = True
            self._for_main.put(frame)

    def state(self) -> dict[str, Any]:
        """Empty: for plain functions the beat itself is all there is to report."""
        return {}

    def long_calls(self) -> dict[int, LongCall]:
        """By number of each call that takes long: where it is, and what it did with its time."""
        now = time.monotonic()
        frames = sys._current_frames()
        calls: dict[int, LongCall] = {}
        for number, call in list(self._running.items()):
            elapsed_s = now - call.started_at
            frame = frames.get(call.thread)
            if elapsed_s < LONG_S or frame is None:
                continue
            calls[number] = LongCall(_where(traceback.extract_stack(frame)), elapsed_s, *call.times())
        return calls

    def serve(self) -> None:
        while True:
            self._answer(self._for_main.get(), is_main=True)

    @_ending_on_error
    def _answer(self, frame: dict[str, Any], is_main: bool = False) -> None:
        call = frame.pop("call", None)
        if call is None:  # another thread has taken it
            if is_main:
                self._is_main_busy = False
            return
        if is_main:
            self._is_main_busy = True
        _thread.was_refused = False
        self._running[frame["id"]] = RunningCall()
        try:
            answer = run_through(answer_to(self._function, call))
        finally:
            del self._running[frame["id"]]
        if _thread.was_refused:
            answer = {"again": True}
        if _has_used_signals.is_set():
            answer["main_only"] = True
        if is_main:
            self._is_main_busy = False  # before the answer, which may bring the next call at once
        self._send({"id": frame["id"], "load": self._load(), **answer})

    def _load(self) -> float | None:
        """Mean number of cores that this process kept busy since the last value; None if that is recent."""
        now = time.monotonic()
        self._answered_at = now
        elapsed_s = now - self._load_since
        if elapsed_s < LEAST_S:
            return None
        computed_s = _computing_s()
        load = (computed_s - self._computed_before_s) / elapsed_s
        self._load_since = now
        self._computed_before_s = computed_s
        return load


def _computing_s() -> float:
    """CPU seconds of this process and its ended children, and seconds that its threads waited for a core."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    total_s = time.process_time() + children.ru_utime + children.ru_stime
    # On a machine that is full, a function that computes waits for a core; taken for one that waits for a
    # server, it would be given more and more calls at once.
    with contextlib.suppress(OSError):  # without a descriptor the folder cannot be listed
        for task in Path("/proc/self/task").glob("*/schedstat"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                total_s += int(task.read_text().split()[1]) / 1e9
    return total_s


class OwnedTask(asyncio.Task[Any]):
    """A task of the loop, with the number of the call that it belongs to."""

    owner: int | None = None


class LoopCall:
    """A call that runs on the loop."""

    __slots__ = ("began_at", "lost_s", "task", "timeout_s")

    def __init__(self, task: "asyncio.Task[None]", timeout_s: float, began_at: float, lost_s: float) -> None:
        self.task = task
        self.timeout_s = timeout_s
        self.began_at = began_at
        self.lost_s = lost_s
        """Seconds that the loop had been blocked when its limit began to count."""


class LoopCalls:
    """Calls of an async function, at most `at_once` of them; others wait until one ends.

    What wakes the loop, and what it does then:

        a frame in the socket              _read: begin the calls that came, or queue them
        what the function awaits           its task goes on, or ends: begin the next call, keep the answer
        the earliest limit of a call       _check_limits: fail it
        an answer has waited long enough   _send_answers: all that are there, in one write

    Beats are sent by a thread of their own, also while the loop is blocked.
    """

    def __init__(self, function: Callee, send: Send, channel: socket.socket, at_once: int) -> None:
        self._function = function
        self._send = send
        self._channel = channel
        self._at_once = at_once
        self._decoder = FrameDecoder()
        self._loop = asyncio.new_event_loop()
        self._loop.set_task_factory(self._make_task)
        self._thread = threading.get_ident()
        self._context = contextvars.copy_context()
        """What each call begins with."""
        self._running: dict[int, LoopCall] = {}
        self._queue: dict[int, dict[str, Any]] = {}
        """Frames of calls that have not begun, by number, in their order."""
        self._limits: list[tuple[float, int]] = []
        """A heap: when the limit of each call ends, on the loop's clock, and its number. Of calls that have
        ended, too, until there are too many of these."""
        self._limit_timer: asyncio.TimerHandle | None = None
        self._answers: list[dict[str, Any]] = []
        self._is_sending = False
        """Whether the answers are sent in the next iteration."""
        self._send_from = 0.0
        """When a wake-up for something else takes the answers along."""
        self._send_timer: asyncio.TimerHandle | None = None
        """Sends the answers where nothing else wakes the loop before."""
        self._turned_at = time.monotonic()
        self._lost_s = 0.0
        self._step: tuple[int | None, float] = (None, 0.0)
        """Id of the task that ran at the last beat, and since when."""

    def state(self) -> dict[str, Any]:
        """For how long the loop has been blocked, by which call, and in which line; empty if it is not."""
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
            "id": getattr(task, "owner", None),
            "where": _where(traceback.extract_stack(frame)) if frame is not None else "",
        }

    def long_calls(self) -> dict[int, LongCall]:
        """Empty: calls on a loop are cancelled at their limit, and one that blocks the loop is named by
        `state`."""
        return {}

    def serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.add_reader(self._channel, self._read)
        self._turn()
        while not self._loop.is_closed():
            with contextlib.suppress(KeyboardInterrupt, SystemExit):  # the task that raised it holds it too
                self._loop.run_forever()

    def _turn(self) -> None:
        now = time.monotonic()
        self._lost_s += max(0.0, now - self._turned_at - 2 * TICK_S)
        self._turned_at = now
        self._loop.call_later(TICK_S, self._turn)

    @_ending_on_error
    def _read(self) -> None:
        """Take all that has come: calls to start, and numbers of calls to cancel."""
        try:
            # The socket blocks, for `send` in two threads; this read does not.
            data = self._channel.recv(READ_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            _end()
        for frame in self._decoder.feed(data):
            if "call" not in frame:
                self._break_off(frame["cancel"])
            elif len(self._running) < self._at_once:
                self._begin(frame)
            else:
                self._queue[frame["id"]] = frame
        if self._answers and self._loop.time() >= self._send_from:
            self._send_answers()

    def _make_task(
        self,
        loop: asyncio.AbstractEventLoop,
        work: Any,
        context: contextvars.Context | None = None,
        **options: Any,
    ) -> OwnedTask:
        """Create a task, and note which call it belongs to."""
        task = OwnedTask(work, loop=loop, context=context, **options)
        task.owner = _current_call.get() if context is None else context.get(_current_call)
        return task

    def _begin(self, frame: dict[str, Any]) -> None:
        number = frame["id"]
        timeout_s = frame["timeout_s"]
        # A context of its own: the caller's may be that of another call, which ends, with what the function
        # has set in it. All tasks that the function creates copy it, and with it the number.
        context = self._context.copy()
        context.run(_current_call.set, number)
        # Not by `create_task`, which would look for the number that is known here.
        task = OwnedTask(self._run(number, frame["call"]), loop=self._loop, context=context)
        task.owner = number
        now = self._loop.time()
        self._running[number] = LoopCall(task, timeout_s, now, self._lost_s)
        self._set_limit(now + timeout_s, number)

    def _begin_next(self) -> None:
        """Begin the next call in the queue where there is a place."""
        if self._queue and len(self._running) < self._at_once:
            self._begin(self._queue.pop(next(iter(self._queue))))

    async def _run(self, number: int, call: dict[str, Any]) -> None:
        try:
            answer = await answer_to(self._function, call)
        except asyncio.CancelledError:
            answer = failure_to_wire(AttemptError("the function was cancelled from inside"))
        ended = self._running.pop(number, None)
        if ended is not None:  # else it is late or cancelled: nobody waits for it
            self._answer(number, answer, ended)

    def _answer(self, number: int, answer: dict[str, Any], ended: LoopCall) -> None:
        """Keep the answer of a call until it is sent: at once, unless the next call has taken its place, and
        there are some for the places after that, too: the worker sends others once it has the answers."""
        self._begin_next()
        now = self._loop.time()
        gather_s = 0.0
        if 2 * len(self._queue) > len(self._answers):
            gather_s = min(GATHER_SHARE * (now - ended.began_at), LONGEST_GATHER_S)
        if not self._answers:
            self._send_from = now + gather_s * EARLIEST_SHARE
        answer["id"] = number
        self._answers.append(answer)
        if self._is_sending:
            return
        if gather_s == 0.0 or now >= self._send_from:
            self._is_sending = True
            # In the next iteration: after the calls that end in this one.
            self._loop.call_soon(self._send_answers)
        elif self._send_timer is None:
            self._send_timer = self._loop.call_at(now + gather_s, self._send_answers)

    @_ending_on_error
    def _send_answers(self) -> None:
        self._is_sending = False
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None
        answers = self._answers
        self._answers = []
        if answers:
            self._send(*answers)

    def _set_limit(self, at: float, number: int) -> None:
        """Have `_check_limits` look at a call at this time of the loop's clock."""
        if len(self._limits) > 2 * len(self._running) + MOST_ENDED:
            self._limits = [limit for limit in self._limits if limit[1] in self._running]
            heapq.heapify(self._limits)
        heapq.heappush(self._limits, (at, number))
        self._look_at_limits(at)

    def _look_at_limits(self, at: float) -> None:
        """Have `_check_limits` called at this time, or before: one timer for all calls."""
        timer = self._limit_timer
        if timer is None or at < timer.when():
            if timer is not None:
                timer.cancel()
            self._limit_timer = self._loop.call_at(at, self._check_limits)

    @_ending_on_error
    def _check_limits(self) -> None:
        """Fail the calls whose limit has come; time in which the loop was blocked extends it."""
        self._limit_timer = None
        now = self._loop.time()
        while self._limits and (self._limits[0][0] <= now or self._limits[0][1] not in self._running):
            _, number = heapq.heappop(self._limits)
            call = self._running.get(number)
            if call is None:
                continue
            blocked_s = self._lost_s - call.lost_s
            if blocked_s > 0:
                call.lost_s = self._lost_s
                heapq.heappush(self._limits, (now + blocked_s, number))
            else:
                self._fail_late(number, call)
        if self._limits:
            self._look_at_limits(self._limits[0][0])

    def _fail_late(self, number: int, call: LoopCall) -> None:
        """Cancel a call, and fail it even if it ignores that."""
        # First: `_run` finds the call gone then, and sends no second answer.
        del self._running[number]
        # Before it is cancelled, which changes where it is.
        stack = _awaited_stack(call.task)
        has_begun = not all(_is_ours(frame.filename) for frame in stack)
        at = f"; it waited, in the end in {_where(stack)}" if has_begun else ""
        call.task.cancel()
        reason = f"no result within {call.timeout_s:g} s (timeout_s){at}; {RAISE_LIMIT}"
        self._answer(number, failure_to_wire(AttemptError(reason, is_timeout=True)), call)

    def _break_off(self, number: int) -> None:
        """Cancel a call whose caller has gone."""
        self._queue.pop(number, None)
        call = self._running.pop(number, None)
        if call is not None:
            call.task.cancel()
            self._begin_next()


def _awaited_stack(task: "asyncio.Task[Any]") -> list[traceback.FrameSummary]:
    """The lines at which a task that waits has stopped, from the outermost coroutine to the innermost one; a
    task's own `get_stack` has the outermost one alone."""
    stack: list[traceback.FrameSummary] = []
    waiting: Any = task.get_coro()
    while waiting is not None:
        frame = getattr(waiting, "cr_frame", None) or getattr(waiting, "gi_frame", None)
        if frame is None:  # a future, say
            break
        code = frame.f_code
        stack.append(traceback.FrameSummary(code.co_filename, frame.f_lineno, code.co_name))
        waiting = getattr(waiting, "cr_await", None) or getattr(waiting, "gi_yieldfrom", None)
    return stack


def _where(stack: Sequence[traceback.FrameSummary]) -> str:
    """The user's line that does not return, and what it called; empty where no frame has a file."""
    callers = (number for number, frame in enumerate(stack) if frame.filename.endswith(CALLER))
    inside = stack[next(callers, 0) :]
    # Code that was made while the program runs, and Python's frozen modules, have no file to look at.
    lines = [frame for frame in inside if not frame.filename.startswith("<")]
    if not lines:
        return ""
    # The user's own, also where a decorator of a package calls it; else that of a package.
    candidates = [frame for frame in lines if is_users_file(frame.filename)]
    candidates += [frame for frame in lines if not _is_ours(frame.filename)]
    first = candidates[0] if candidates else lines[-1]
    text = _line_of(first)
    if any(frame.filename.startswith(IMPORTLIB) for frame in inside):
        return f"{text}, while importing; import at the top of the file, which counts against no call"
    return text if lines[-1] is first else f"{text}, in {_line_of(lines[-1])}"


def _is_ours(file: str) -> bool:
    return file.startswith(OUR_FILES)


def _line_of(frame: traceback.FrameSummary) -> str:
    return f"{frame.name} ({Path(frame.filename).name}, line {frame.lineno})"

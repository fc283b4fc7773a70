"""What runs in a process of its own: load the function once, then answer calls, several at a time.

Frames on the given socket, both ways (`request.py`). The first answer says whether the function loaded. Then
every call has a number, and its answer carries the same. A `beat` says twice a second that this process still
runs Python code: a call that holds the interpreter lock silences it. The process ends when its parent closes
the socket or dies, whatever the function is doing.

Plain functions run in threads: the first call in the main thread, others beside it. The worker decides how
many run at once; with one at a time everything happens in the main thread.
"""

import contextlib
import importlib
import os
import queue
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from pathlib import Path
from typing import Any, BinaryIO

from tidemill.common.errors import ConfigError
from tidemill.common.process.children import Send, become_child, read_frame, sender
from tidemill.services.reward.functions.group_functions import load_group_function
from tidemill.services.reward.functions.loading import load_function
from tidemill.services.reward.functions.processes.child_loop import LoopCalls
from tidemill.services.reward.functions.request import Callee, Request, failure_to_wire, outcomes_to_wire
from tidemill.services.reward.outcome import AttemptError, users_own

BEAT_S = 0.5
MOST_THREADS = 256
LEAST_S = 0.05
"""Shorter measurements of the load say nothing."""
_TASKS = Path("/proc/self/task")

_has_used_signals = threading.Event()
_thread = threading.local()


def main(descriptor: int, parent: int) -> None:
    """Serve the socket `descriptor` until process `parent` closes it."""
    for name in ("signal", "alarm", "setitimer"):
        if hasattr(signal, name):
            setattr(signal, name, _noted(getattr(signal, name)))
    with become_child(descriptor, parent) as channel, channel.makefile("rb") as frames:
        spec = read_frame(frames)
        if spec is None:
            return
        send = sender(channel)
        try:
            function = _loaded(spec)
        except ConfigError as error:
            send({"error": str(error)})
            return
        send({})
        _has_used_signals.clear()  # what importing the function did is no matter
        calls = LoopCalls(function, send) if function.is_async else ThreadCalls(function, send)
        threading.Thread(target=_read_for_ever, args=(frames, calls), daemon=True).start()
        threading.Thread(target=_beat_for_ever, args=(calls, send), daemon=True).start()
        try:
            calls.serve()
        except BaseException:
            traceback.print_exc()
        finally:  # it never returns; should it, the worker sees a process that died, and starts another
            os._exit(1)


def _loaded(spec: dict[str, Any]) -> Callee:
    """What `spec` describes: a reward function, a group function, or what `maker` makes of the rest."""
    if maker := spec.pop("maker", ""):
        module, _, name = maker.partition(":")
        made: Callee = getattr(importlib.import_module(module), name)(**spec)
        return made
    return load_group_function(**spec) if spec.pop("is_group", False) else load_function(**spec)


class ThreadCalls:
    """The calls of a plain function."""

    def __init__(self, function: Callee, send: Send) -> None:
        self._function, self._send = function, send
        self._for_main: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._is_main_busy = False
        self._others = ThreadPoolExecutor(MOST_THREADS, thread_name_prefix="reward")
        self._meter = LoadMeter()

    def take(self, frame: dict[str, Any]) -> None:
        """Start a call. A thread cannot be stopped: what is broken off dies with the process."""
        if "call" not in frame:
            return
        self._meter.begin()
        if self._is_main_busy:
            self._others.submit(self._answer, frame)
        else:
            self._is_main_busy = True
            self._for_main.put(frame)

    def state(self) -> dict[str, Any]:
        """Nothing but that there is a beat."""
        return {}

    def serve(self) -> None:
        """Answer calls in the main thread, for ever."""
        while True:
            self._answer(self._for_main.get(), is_main=True)

    def _answer(self, frame: dict[str, Any], is_main: bool = False) -> None:
        _thread.was_refused = False
        try:
            with users_own():
                answer = outcomes_to_wire(self._function.call(Request.from_wire(frame["call"])))
        except AttemptError as error:
            answer = failure_to_wire(error)
        if _thread.was_refused:
            answer = {"again": True}
        if _has_used_signals.is_set():
            answer["main_only"] = True
        if is_main:
            self._is_main_busy = False  # before the answer, which may bring the next call at once
        self._send({"id": frame["id"], "load": self._meter.end(), **answer})


class LoadMeter:
    """Counts calls in flight, and measures while there are any. Used from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_running = 0
        self._busy_s = self._since = 0.0
        self._cpu_s = _computing_s()

    def begin(self) -> None:
        with self._lock:
            if not self._num_running:
                self._since = time.monotonic()
            self._num_running += 1

    def end(self) -> float | None:
        """A call has ended: the load since the last answer to this; None where it is too early."""
        with self._lock:
            now = time.monotonic()
            self._busy_s += now - self._since
            self._since = now
            self._num_running -= 1
            if self._busy_s < LEAST_S:
                return None
            cpu_s = _computing_s()
            load = (cpu_s - self._cpu_s) / self._busy_s
            self._busy_s, self._cpu_s = 0.0, cpu_s
            return load


def _computing_s() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    total_s = time.process_time() + children.ru_utime + children.ru_stime
    for task in _TASKS.glob("*/schedstat"):  # nothing where there is no /proc
        with contextlib.suppress(OSError, ValueError, IndexError):
            total_s += int(task.read_text().split()[1]) / 1e9
    return total_s


def _noted(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of `signal` that notes its use, and which calls wanted what only the main thread can do."""

    @wraps(function)
    def noted(*args: Any) -> Any:
        _has_used_signals.set()
        if threading.current_thread() is not threading.main_thread():
            _thread.was_refused = True
            raise ValueError("signal only works in main thread of the main interpreter")
        return function(*args)

    return noted


def _read_for_ever(frames: BinaryIO, calls: LoopCalls | ThreadCalls) -> None:
    with contextlib.suppress(OSError):
        while (frame := read_frame(frames)) is not None:
            calls.take(frame)
    sys.stdout.flush()
    os._exit(0)  # calls may be running that nobody waits for any more


def _beat_for_ever(calls: LoopCalls | ThreadCalls, send: Send) -> None:
    while True:
        time.sleep(BEAT_S)
        send({"beat": calls.state()})

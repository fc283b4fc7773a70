"""Runs plain functions in threads of a scoring process: the first call in the main thread, others beside it.

How many there are at once is the worker's decision; with one at a time everything happens in the main thread.
"""

import queue
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from typing import Any

from services.reward.functions.processes.capacity import LoadMeter
from services.reward.functions.request import Callee, Request, failure_to_wire, outcomes_to_wire
from services.reward.results.outcome import AttemptError

_used = threading.Event()
_thread = threading.local()


def watch() -> None:
    """Note all use of signals from now on; to be called before the function is imported."""
    for name in ("signal", "alarm", "setitimer"):
        if hasattr(signal, name):
            setattr(signal, name, _noted(getattr(signal, name)))


def forget() -> None:
    """What importing the function did is no matter."""
    _used.clear()


def is_needed() -> bool:
    """Whether any call has used signals so far."""
    return _used.is_set()


def begin_call() -> None:
    """A call begins in this thread."""
    _thread.was_refused = False


def was_refused() -> bool:
    """Whether this thread's call wanted what only the main thread can do."""
    return bool(getattr(_thread, "was_refused", False))


def _noted(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def noted(*args: Any) -> Any:
        _used.set()
        if threading.current_thread() is not threading.main_thread():
            _thread.was_refused = True
            raise ValueError("signal only works in main thread of the main interpreter")
        return function(*args)

    return noted


MOST_THREADS = 256


class ThreadCalls:
    """The calls of one process."""

    def __init__(self, function: Callee, send: Callable[[dict[str, Any]], None]) -> None:
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
        begin_call()
        try:
            answer = outcomes_to_wire(self._function.call(Request.from_wire(frame["call"])))
        except AttemptError as error:
            answer = failure_to_wire(error)
        if was_refused():
            answer = {"again": True}
        if is_needed():
            answer["main_only"] = True
        if is_main:
            self._is_main_busy = False  # before the answer, which may bring the next call at once
        self._send({"id": frame["id"], "load": self._meter.end(), **answer})

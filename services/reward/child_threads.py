"""Runs plain functions in threads of a scoring process: the first call in the main thread, others beside it.

How many there are at once is the worker's decision; with one at a time everything happens in the main thread.
"""

import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from services.reward import main_thread
from services.reward.load_meter import LoadMeter
from services.reward.outcome import AttemptError
from services.reward.request import Callee, Request, failure_to_wire, outcomes_to_wire

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
        main_thread.begin_call()
        try:
            answer = outcomes_to_wire(self._function.call(Request.from_wire(frame["call"])))
        except AttemptError as error:
            answer = failure_to_wire(error)
        if main_thread.was_refused():
            answer = {"again": True}
        if main_thread.is_needed():
            answer["main_only"] = True
        if is_main:
            self._is_main_busy = False  # before the answer, which may bring the next call at once
        self._send({"id": frame["id"], "load": self._meter.end(), **answer})

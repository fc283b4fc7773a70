"""How much of the time in which calls run is spent computing: 0 for pure waiting, 1 for a whole core.

What threads wait for a core counts as computing: on a busy machine a function that computes must not pass for
one that waits. So does what child processes use, once they have ended.
"""

import contextlib
import resource
import threading
import time
from pathlib import Path

LEAST_S = 0.05
"""Shorter measurements say nothing."""
_TASKS = Path("/proc/self/task")


class LoadMeter:
    """Counts calls in flight, and measures while there are any. Used from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_running = 0
        self._busy_s = self._since = 0.0
        self._cpu_s = _computing_s()

    def begin(self) -> None:
        """A call begins."""
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

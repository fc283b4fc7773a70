"""How much one worker takes at once, and what its functions do wrong: it follows what is measured."""

import contextlib
import resource
import threading
import time
from pathlib import Path

from common.config import RewardConfig
from common.process.heartbeats import BLOCKING, Heartbeat
from services.reward.rewards.reward import FunctionReward
from services.reward.rewards.weighted_sum import HybridReward


class Capacity:
    """Of all rewards of a run together."""

    def __init__(self, config: RewardConfig, reward: HybridReward) -> None:
        self._config, self._reward = config, reward
        self._executions = [
            named.reward.execution for named in reward.rewards if isinstance(named.reward, FunctionReward)
        ]

    def slots(self) -> int:
        """Samples that a lane holds."""
        return min(self._config.max_in_flight, self._reward.slots or self._config.max_in_flight)

    def parallel(self) -> int:
        """Samples that are scored at once: no more than the processes of any reward take."""
        counts = [execution.parallel for execution in self._executions]
        return min([self.slots(), *(count for count in counts if count is not None)])

    def report(self, beat: Heartbeat) -> None:
        """Say in a heartbeat which functions block."""
        notes = [note for execution in self._executions for note in execution.notes]
        beat.counts[BLOCKING] = beat.counts.get(BLOCKING, 0) + len(notes)
        beat.detail = "; ".join([*([beat.detail] if beat.detail else []), *notes])


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


IDLE, BUSY, FULL = 0.35, 0.6, 0.95
"""Loads, as shares of a core: below the first the number doubles, below the second it grows by one, above the
last it shrinks by one."""


class Sizing:
    """The number for all processes of one pool, which run the same function."""

    def __init__(self, most: int) -> None:
        self._most, self.calls = most, 1

    def observe(self, load: float | None, is_wanted: bool) -> None:
        """A call has ended; `load` was measured, `is_wanted` says whether others wait for a place."""
        if load is None:
            return
        if load > FULL:
            self.calls = max(1, self.calls - 1)
        elif is_wanted and load < BUSY:
            self.calls = min(self._most, 2 * self.calls if load < IDLE else self.calls + 1)

    def pin(self) -> None:
        """The function works in main threads only: one call at a time from now on."""
        self._most = self.calls = 1

"""Measures how a service spends its time: working, or waiting, and for what.

A service is in exactly one state at a time; states that mean waiting begin with `wait:` and name the
cause. Shares are taken over a sliding window, so that they describe the present.

Time in which a process waits while a Redis command is under way counts as `wait:redis`, whatever state the
process is in.
"""

import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from prometheus_client import Counter

from tidemill.common.telemetry import metrics

WINDOW_S = 60.0
WAIT = "wait:"
WAIT_START = "wait:start"
WAIT_DISK = "wait:disk"
"""A disk takes no writes; the detail has which, and the remedy."""
LOAD = "load"
WAIT_REDIS = "wait:redis"
WAIT_ENVIRONMENT = "wait:environment"
"""A rollout worker holds sessions, and each of them waits for its environment: the engine has no request."""
BOOKKEEPING = "bookkeeping"
"""Settling and announcing, between two pieces of work. Nearly all of its time is spent waiting for Redis."""


def times_of(metrics: Mapping[str, float]) -> dict[str, float]:
    """Seconds of a step by state of the trainer: the metric `time/wait_scores_s` becomes `wait:scores`."""
    times = {name[5:-2]: value for name, value in metrics.items() if re.fullmatch("time/.+_s", name)}
    return {re.sub("^wait_", WAIT, name): seconds for name, seconds in times.items()}


class Activity:
    """The current state of one process, the seconds spent in each, and idle shares."""

    def __init__(
        self, role: str, state: str = WAIT_START, redis_s: Callable[[], float] = lambda: 0.0
    ) -> None:
        """`redis_s` is a clock of the time with a Redis command under way."""
        self.role = role
        self.state = state
        self.detail = ""
        self.seconds: dict[str, float] = {}
        self._since = time.monotonic()
        self._redis_s = redis_s
        self._redis_since_s = redis_s()
        self._recent: deque[tuple[float, str, float]] = deque()
        self._counters: dict[str, Counter] = {}

    def enter(self, state: str, detail: str = "") -> str:
        """Change the state; returns the one before."""
        before = self.state
        self.detail = detail
        if state != before:
            self._settle()
            self.state = state
        return before

    @contextmanager
    def during(self, state: str, detail: str = "") -> Iterator[None]:
        """Be in `state` for the length of a block."""
        before = self.enter(state, detail)
        try:
            yield
        finally:
            self.enter(before)

    def totals(self) -> dict[str, float]:
        """Seconds in each state since the start, the current one included."""
        self._settle()
        return dict(self.seconds)

    def reset(self) -> None:
        """Start counting again, as after warm-up."""
        self._settle()
        self.seconds.clear()
        self._recent.clear()

    def shares(self) -> dict[str, float]:
        """Share of the last minute spent in each state."""
        self._settle()
        total = sum(length for _, _, length in self._recent) or 1.0
        shares: dict[str, float] = {}
        for _, state, length in self._recent:
            shares[state] = shares.get(state, 0.0) + length / total
        return shares

    def idle_share(self) -> float:
        """Share of all time so far that was spent waiting."""
        totals = self.totals()
        waiting = sum(length for state, length in totals.items() if state.startswith(WAIT))
        return waiting / (sum(totals.values()) or 1.0)

    def _settle(self) -> None:
        """Count the time since the last change for the current state, less the time of waiting for Redis."""
        now = time.monotonic()
        redis_s = self._redis_s()
        length = now - self._since
        self._since = now
        waited = redis_s - self._redis_since_s
        self._redis_since_s = redis_s
        if waited > 0 and (self.state.startswith(WAIT) or self.state == BOOKKEEPING):
            # Two clocks, read one after the other: no state may get negative time.
            waited = min(waited, length)
            self._book(now, WAIT_REDIS, waited)
            length -= waited
        self._book(now, self.state, length)
        while self._recent and self._recent[0][0] < now - WINDOW_S:
            self._recent.popleft()

    def _book(self, now: float, state: str, length: float) -> None:
        self.seconds[state] = self.seconds.get(state, 0.0) + length
        counter = self._counters.get(state)
        if counter is None:  # cached: `labels` would be most of the cost
            counter = metrics.ACTIVITY_SECONDS.labels(self.role, state)
            self._counters[state] = counter
        counter.inc(length)
        self._recent.append((now, state, length))

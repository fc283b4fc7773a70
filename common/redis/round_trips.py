"""How long this process has waited for Redis: time in which at least one command was under way.

A command that blocks until there is news waits for whoever writes the news, and not for Redis. Of it counts
only as much as a command that does not block takes at present, and only where it brought something.
"""

import time
from collections import deque
from statistics import median

from common.telemetry import metrics

RECENT = 32
"""Durations of which the present one is the median: one outage does not speak for what follows."""


class RoundTrips:
    """A clock of the time with a command under way; commands that overlap are counted once."""

    def __init__(self) -> None:
        self._num_under_way = 0
        self._since = 0.0
        self._covered_until = 0.0
        self._total_s = 0.0
        self._recent: deque[float] = deque(maxlen=RECENT)

    @property
    def present_s(self) -> float:
        """What a command takes at present; 0 before the first."""
        return median(self._recent) if self._recent else 0.0

    def total_s(self) -> float:
        """Seconds so far; never falls."""
        if not self._num_under_way:
            return self._total_s
        return self._total_s + time.monotonic() - max(self._since, self._covered_until)

    def begin(self) -> float:
        """A command that does not block is under way, until `end` is given what this returns."""
        begun = time.monotonic()
        if not self._num_under_way:
            self._since = begun
        self._num_under_way += 1
        return begun

    def end(self, begun: float) -> None:
        """It was answered, or it failed."""
        now = time.monotonic()
        self._num_under_way -= 1
        if not self._num_under_way:
            self._cover(self._since, now)
        self._recent.append(now - begun)
        metrics.REDIS_SECONDS.observe(now - begun)

    def brought_news(self, begun: float) -> None:
        """A command that blocks, and began at `begun` (time.monotonic), has an answer that is not empty."""
        now = time.monotonic()
        if not self._num_under_way:  # or this time is counted anyway
            self._cover(max(begun, now - self.present_s), now)

    def _cover(self, since: float, until: float) -> None:
        self._total_s += until - max(since, min(self._covered_until, until))
        self._covered_until = until

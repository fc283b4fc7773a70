"""One server as this worker sees it: how loaded it is, and whether it may be asked now.

A replica that fails several times in a row, or that asks for a pause, rests. After the rest one request tries
it, and not all that wait for it; while that fails, rests become longer.
"""

import time
from collections.abc import Callable
from urllib.parse import urlsplit

FAILURES_BEFORE_REST = 5
"""In a row. A single failure may be the request's, and a server that died is seen by its /health at once."""
FIRST_REST_S = 5.0
LONGEST_REST_S = 60.0

STATES = ("up", "down", "resting", "paused")


class Replica:
    """`url` is what requests go to; `origin`, its part before the path, answers /health."""

    def __init__(
        self, url: str, is_registered: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.url, self.is_registered = url, is_registered
        parts = urlsplit(url)
        self.origin = f"{parts.scheme}://{parts.netloc}"
        self.root = self.origin + parts.path.rstrip("/").removesuffix("/v1")
        """What a path such as /classify is appended to."""
        self.in_flight = self.last_used = 0
        self.is_healthy = True
        """What /health last said; the first request may come before the first look."""
        self.has_left = False
        self._clock = clock
        self.reset()

    def reset(self) -> None:
        """Forget what failed: all is well, or another server stands in its place."""
        self._num_failures, self._rest_s = 0, FIRST_REST_S
        self._rests_until: float | None = None
        self._is_paused = self._is_trying = False

    @property
    def rests_for_s(self) -> float:
        """Seconds until one request may try it; 0 where none has to wait for that."""
        return max(0.0, self._rests_until - self._clock()) if self._rests_until is not None else 0.0

    @property
    def is_resting(self) -> bool:
        """Whether it gets no request now: its rest is not over, or one request tries it already."""
        return self._rests_until is not None and (self._is_trying or self.rests_for_s > 0.0)

    @property
    def is_usable(self) -> bool:
        """Whether it may be sent a request now."""
        return self.is_healthy and not self.has_left and not self.is_resting

    @property
    def state(self) -> str:
        if not self.is_healthy:
            return "down"
        if self.is_resting:
            return "paused" if self._is_paused else "resting"
        return "up"

    def begin(self) -> None:
        self.in_flight += 1
        self._is_trying = self._rests_until is not None

    def succeed(self) -> None:
        """It was answered. Of a request from before a pause that says nothing."""
        if self._is_trying or not self._is_paused:
            self.reset()

    def fail(self) -> bool:
        """It failed. Returns whether the replica begins to rest, having been asked as usual until now."""
        self._num_failures += 1
        was_trying, self._is_trying = self._is_trying, False
        if was_trying:
            self._rest_s = min(2 * self._rest_s, LONGEST_REST_S)
        elif self._rests_until is not None or self._num_failures < FAILURES_BEFORE_REST:
            return False
        self._rests_until, self._is_paused = self._clock() + self._rest_s, False
        return not was_trying

    def pause(self, pause_s: float) -> None:
        """The replica asked for a pause."""
        self._rests_until = max(self._rests_until or 0.0, self._clock() + pause_s)
        self._is_trying, self._is_paused = False, True

    def abandon(self) -> None:
        """The request was cancelled: that says nothing of the replica."""
        self._is_trying = False

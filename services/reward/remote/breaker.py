"""A circuit breaker: who fails again and again is left alone for a while, then tried with one request.

Its own code, because it decides together with the router: the libraries wrap a function instead, and raise.
"""

import time
from collections.abc import Callable

LONGEST_COOLDOWN_S = 60.0


class Breaker:
    """Closed while all is well. `is_closed`, `opens_at` and the trial after the cooldown are its state."""

    def __init__(
        self, max_failures: int, cooldown_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_failures, self._first_cooldown_s, self._clock = max_failures, cooldown_s, clock
        self._cooldown_s = cooldown_s
        self._failures = 0
        self._open_until: float | None = None
        self._is_trying = False

    @property
    def is_closed(self) -> bool:
        """Whether requests pass as usual."""
        return self._open_until is None

    @property
    def opens_in_s(self) -> float:
        """Seconds until a request is allowed again; 0 where one is now."""
        if self._open_until is None:
            return 0.0
        left_s = self._open_until - self._clock()
        return self._cooldown_s if self._is_trying and left_s <= 0 else max(0.0, left_s)

    @property
    def allows(self) -> bool:
        """Whether one more request may be sent: always while closed, one at a time after a cooldown."""
        return self.opens_in_s == 0.0

    def begin(self) -> None:
        """A request is sent."""
        self._is_trying = not self.is_closed

    def succeeded(self) -> None:
        """It was answered: everything is well again."""
        self._failures, self._open_until, self._is_trying = 0, None, False
        self._cooldown_s = self._first_cooldown_s

    def failed(self) -> None:
        """It failed; enough in a row, or a failed trial, open the breaker."""
        self._failures += 1
        if self._is_trying:
            self._cooldown_s = min(2 * self._cooldown_s, LONGEST_COOLDOWN_S)
        if self._is_trying or (self.is_closed and self._failures >= self._max_failures):
            self._open_until = self._clock() + self._cooldown_s
        self._is_trying = False

    def reset(self) -> None:
        """Forget everything: what failed is gone, and something new stands in its place."""
        self.succeeded()

    def abandoned(self) -> None:
        """The request ended without an answer that says anything: it was cancelled."""
        self._is_trying = False

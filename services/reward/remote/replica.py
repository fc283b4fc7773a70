"""One server among several, as the router sees it."""

import time
from collections.abc import Callable
from urllib.parse import urlsplit

from common.config.reward_kinds import RoutingConfig

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


OLD_S = 3600.0


class Replica:
    """`url` is what requests go to; `origin`, its part before the path, answers /health."""

    def __init__(
        self,
        url: str,
        config: RoutingConfig,
        clock: Callable[[], float] = time.monotonic,
        is_registered: bool = False,
    ) -> None:
        self.url = url
        self.is_registered = is_registered
        """Whether it is a server of the run, which has its token, and not an address of the config's."""
        parts = urlsplit(url)
        self.origin = f"{parts.scheme}://{parts.netloc}"
        self.root = self.origin + parts.path.rstrip("/").removesuffix("/v1")
        """What a path such as /v1/chat/completions or /classify is appended to."""
        self.breaker = Breaker(config.breaker_failures, config.breaker_cooldown_s, clock)
        self.in_flight = 0
        self.is_healthy = True
        """What /health last said; the first request may come before the first look."""
        self.has_left = False
        self.last_used = 0
        self._clock, self._paused_until = clock, 0.0

    def pause(self, pause_s: float) -> None:
        """Send nothing for a while, because the replica asked for it."""
        self._paused_until = max(self._paused_until, self._clock() + min(pause_s, OLD_S))

    @property
    def is_usable(self) -> bool:
        """Whether it may be sent a request now."""
        return self.is_healthy and not self.has_left and self._paused_s == 0.0 and self.breaker.allows

    @property
    def usable_in_s(self) -> float:
        """Seconds until it may be, as far as it depends on time; 0 where it does not."""
        return max(self._paused_s, self.breaker.opens_in_s)

    @property
    def state(self) -> str:
        """One word for metrics: `up`, `down`, `open` (its breaker keeps requests away) or `paused`."""
        if not self.is_healthy:
            return "down"
        if not self.breaker.allows:
            return "open"
        return "paused" if self._paused_s else "up"

    @property
    def rank(self) -> tuple[int, int]:
        """Order of choice: the least loaded, then who waited longest.

        That it failed lately is no part of it: the breaker keeps requests away from who fails in a row, and
        only a request can show that all is well again.
        """
        return self.in_flight, self.last_used

    @property
    def _paused_s(self) -> float:
        return max(0.0, self._paused_until - self._clock())

"""One server among several, as the router sees it."""

import time
from collections.abc import Callable
from urllib.parse import urlsplit

from common.config.remote import RoutingConfig
from services.reward.remote.breaker import Breaker

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

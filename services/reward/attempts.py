"""Attempts: something that failed is done again, for rewards, functions of groups, and requests to servers.

`retried` is the loop of all of them. What a failure means differs: `attempt` keeps the limits of a reward,
and `Failover` of `remote/servers.py` looks for another replica. Each of them says how long the pause is, or
raises.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tidemill.common.config import RewardLimits
from tidemill.common.process.failures import shorten
from tidemill.common.telemetry import metrics
from tidemill.common.wire.messages import Try
from tidemill.services.reward.outcome import MAX_TRY_CHARS, AttemptError, contained

LONGEST_BACKOFF_S = 60.0

T = TypeVar("T")
PauseAfter = Callable[[AttemptError], Awaitable[float]]
"""Seconds until the next attempt, after one that failed. Raises what ends the attempts."""


async def retried(once: Callable[[], Awaitable[T]], pause_after: PauseAfter) -> T:
    """The first result of `once`; after each failure `pause_after` decides.

    Raises:
        AttemptError: what `pause_after` raised.
    """
    while True:
        try:
            return await once()
        except AttemptError as error:
            failure = error
        await asyncio.sleep(await pause_after(failure))


def ignore_failure(failure: AttemptError) -> None:
    """For callers of `attempt` that count nothing."""


async def attempt(
    name: str,
    limits: RewardLimits,
    once: Callable[[], Awaitable[T]],
    on_failure: Callable[[AttemptError], None] = ignore_failure,
    began_at: float = 0.0,
) -> tuple[T, list[Try]]:
    """The first result of `once` under the limits of reward `name`, and all attempts if it took several.
    `on_failure` hears of each attempt that fails, before the next one. The first attempt may have begun
    before, `began_at` on the monotonic clock.

    Raises:
        AttemptError: the last attempt failed; its `tries` are all attempts, where there were several.
        MachineFaultError: this machine is short of something: the sample is for another one.
    """
    attempts = _Attempts(name, limits, on_failure, began_at)

    async def timed() -> T:
        attempts.begin()
        with contained():
            result = await once()
        attempts.end("")
        return result

    first_result = await retried(timed, attempts.pause_after)
    return first_result, attempts.tries_if_several


class _Attempts:
    """The attempts of one reward at one sample: when each began and ended, and why it failed."""

    def __init__(
        self,
        name: str,
        limits: RewardLimits,
        on_failure: Callable[[AttemptError], None],
        began_at: float,
    ) -> None:
        self._name = name
        self._limits = limits
        self._on_failure = on_failure
        self._tries: list[Try] = []
        self._started = began_at or time.monotonic()
        """The begin of the attempt that is under way; the first one begins at once."""
        self._ended = self._started
        """The end of the attempt before."""

    @property
    def tries_if_several(self) -> list[Try]:
        return self._tries if len(self._tries) > 1 else []

    def begin(self) -> None:
        if self._tries:
            self._started = time.monotonic()

    def end(self, reason: str) -> None:
        """Note an attempt that ended now; `reason` is empty where it succeeded."""
        now = time.monotonic()
        took_s = round(now - self._started, 6)
        pause_s = round(self._started - self._ended, 6)
        self._tries.append((self._name, took_s, pause_s, reason))
        self._ended = now

    async def pause_after(self, failure: AttemptError) -> float:
        """See `PauseAfter`."""
        self.end(shorten(str(failure), MAX_TRY_CHARS))
        self._on_failure(failure)
        if failure.is_final or len(self._tries) == self._limits.max_attempts:
            failure.tries = self.tries_if_several
            raise failure
        metrics.SCORE_RETRIES.inc()
        first_s = self._limits.backoff_s
        backoff_s: float = min(first_s * 2 ** (len(self._tries) - 1), LONGEST_BACKOFF_S)
        # Jitter of up to half the first pause: workers that failed together must not retry together.
        backoff_s += random.uniform(0, first_s / 2)
        return max(backoff_s, failure.retry_after_s)

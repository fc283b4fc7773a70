"""Attempts with backoff and jitter, until one succeeds, none is left, or trying again cannot help."""

import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_attempt, wait_exponential
from tenacity import wait_random as jitter

from common import metrics
from common.config import RewardLimits
from services.reward.outcome import MAX_TRY_CHARS, AttemptError, NamelessTry, contained

LONGEST_BACKOFF_S = 60.0

T = TypeVar("T")


class Attempts:
    """Repeats calls under the limits of a reward."""

    def __init__(self, limits: RewardLimits) -> None:
        self.most = limits.max_attempts
        # Jitter of half a pause: workers that failed together must not come back together.
        self._backoff = wait_exponential(limits.backoff_s, LONGEST_BACKOFF_S) + jitter(
            0, limits.backoff_s / 2
        )

    async def make(self, once: Callable[[], Awaitable[T]]) -> tuple[T, list[NamelessTry]]:
        """The first result, and all attempts where it took several.

        Raises:
            AttemptError: the last attempt failed; its `tries` are all attempts, where there were several.
        """
        started = time.monotonic()
        try:
            # The first attempt goes without the machinery of retries: most calls need no more.
            with contained():
                return await once(), []
        except AttemptError as failure:
            if failure.is_final or self.most == 1:
                raise
            first = failure
        return await self._again(once, first, [_try(started, started, first)])

    async def _again(
        self, once: Callable[[], Awaitable[T]], first: AttemptError, tries: list[NamelessTry]
    ) -> tuple[T, list[NamelessTry]]:
        result: list[T] = []
        ended = time.monotonic()
        retrying = AsyncRetrying(
            retry=retry_if_exception(_is_worth_another),
            stop=stop_after_attempt(self.most),
            wait=self._pause_s,
            before_sleep=_count_retry,
            reraise=True,
        )
        async for attempt in retrying:
            number = attempt.retry_state.attempt_number
            with attempt:
                if number == 1:
                    raise first
                started = time.monotonic()
                try:
                    with contained():
                        result.append(await once())
                    tries.append(_try(ended, started))
                except AttemptError as failure:
                    tries.append(_try(ended, started, failure))
                    failure.tries = tries
                    raise
                finally:
                    ended = time.monotonic()
        return result[0], tries

    def _pause_s(self, state: RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome else None
        asked_s = error.retry_after_s if isinstance(error, AttemptError) else 0.0
        return max(self._backoff(state), asked_s)


def _try(ended: float, started: float, failure: AttemptError | None = None) -> NamelessTry:
    """The attempt that began at `started` and is over now; the one before it was over at `ended`."""
    took_s, pause_s = time.monotonic() - started, started - ended
    return round(took_s, 6), round(pause_s, 6), str(failure)[:MAX_TRY_CHARS] if failure else ""


def _is_worth_another(error: BaseException) -> bool:
    return isinstance(error, AttemptError) and not error.is_final


def _count_retry(_: RetryCallState) -> None:
    metrics.SCORE_RETRIES.inc()

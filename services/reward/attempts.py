"""Attempts with backoff and jitter, until one succeeds, none is left, or trying again cannot help."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_attempt, wait_exponential
from tenacity import wait_random as jitter

from common import metrics
from common.config import RewardLimits
from services.reward.outcome import AttemptError, contained

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

    async def make(self, once: Callable[[], Awaitable[T]]) -> tuple[T, int]:
        """The first result, and how many attempts it took.

        Raises:
            AttemptError: the last attempt failed; `attempts` says how many there were.
        """
        try:
            # The first attempt goes without the machinery of retries: most calls need no more.
            with contained():
                return await once(), 1
        except AttemptError as failure:
            if failure.is_final or self.most == 1:
                raise
            first = failure
        return await self._again(once, first)

    async def _again(self, once: Callable[[], Awaitable[T]], first: AttemptError) -> tuple[T, int]:
        result: list[T] = []
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
                try:
                    with contained():
                        result.append(await once())
                except AttemptError as failure:
                    failure.attempts = number
                    raise
        return result[0], number

    def _pause_s(self, state: RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome else None
        asked_s = error.retry_after_s if isinstance(error, AttemptError) else 0.0
        return max(self._backoff(state), asked_s)


def _is_worth_another(error: BaseException) -> bool:
    return isinstance(error, AttemptError) and not error.is_final


def _count_retry(_: RetryCallState) -> None:
    metrics.SCORE_RETRIES.inc()

"""A reward with its name, its limits and its attempts: what stands around every kind of reward alike.

Invariant: `score` gives every sample a part, whatever the reward does; a failure is never a zero. Training
and evaluation have limits of their own, so that evaluation never waits behind training.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_attempt, wait_exponential
from tenacity import wait_random as jitter

from tidemill.common.config import NamedRewardConfig, RewardLimits, ServersConfig
from tidemill.common.telemetry import metrics
from tidemill.services.reward.outcome import (
    MAX_TRY_CHARS,
    AttemptError,
    NamelessTry,
    Part,
    RewardOutcome,
    contained,
)
from tidemill.services.reward.rewards.cache import RewardCache, version_of
from tidemill.services.reward.rewards.reward import FunctionReward, Reward
from tidemill.services.reward.sample import RewardSample

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


class NamedReward:
    """One of the rewards of a run."""

    def __init__(
        self,
        name: str,
        config: NamedRewardConfig,
        reward: Reward,
        cache: RewardCache | None = None,
        servers: ServersConfig | None = None,
    ) -> None:
        self.name, self.config, self.reward, self.cache = name, config, reward, cache
        self.version = version_of(name, config, servers) if cache else ""
        self.failures: Counter[str] = Counter()
        """How often it failed for good, by kind of failure."""
        self._attempts = Attempts(config)
        self._places = [
            asyncio.Semaphore(config.max_concurrent) if config.max_concurrent else contextlib.nullcontext()
            for _ in ("training", "evaluation")
        ]

    def applies_to(self, sample: RewardSample) -> bool:
        """Whether the sample's lane and data source are ones it scores."""
        if sample.lane not in self.config.lanes:
            return False
        return self.config.scores_source(sample.data_source, sample.source)

    @property
    def is_per_group(self) -> bool:
        """Whether it scores the samples of a group together, when all are there."""
        return self.config.per == "group"

    async def score(self, sample: RewardSample) -> Part:
        """All attempts at one sample; it never raises for what a reward does."""
        if not self.applies_to(sample):
            return Part()
        if self.cache is None:
            return await self._score(sample)
        return await self.cache.get_or_make(self.version, sample, partial(self._score, sample))

    async def score_group(self, samples: list[RewardSample]) -> list[Part]:
        """All attempts at the samples of one group at once."""
        if not self.applies_to(samples[0]):
            return [Part() for _ in samples]
        assert isinstance(self.reward, FunctionReward)  # `per: group` is for functions only
        return await self._attempt(samples, partial(self.reward.score_group, samples))

    async def _score(self, sample: RewardSample) -> Part:
        async def once() -> list[RewardOutcome]:
            return [await self.reward.score(sample)]

        (part,) = await self._attempt([sample], once)
        return part

    async def _attempt(
        self, samples: list[RewardSample], once: Callable[[], Awaitable[list[RewardOutcome]]]
    ) -> list[Part]:
        async def placed() -> list[RewardOutcome]:
            async with self._places[samples[0].is_evaluation]:
                return await once()

        try:
            outcomes, tries = await self._attempts.make(placed)
        except AttemptError as failure:
            parts = [Part.failed(failure) for _ in samples]
            for part in parts:
                self.count_failure(part)
            return parts
        return [Part.of(outcome, tries) for outcome in outcomes]

    def count_failure(self, part: Part) -> None:
        """A sample remains without this reward."""
        self.failures[part.kind] += 1
        metrics.REWARD_FAILURES.labels(self.name, part.kind).inc()

    async def close(self) -> None:
        """Free what the reward holds."""
        await self.reward.close()

"""A reward with its name, limits, attempts and cache: the same around every kind of reward.

Invariant: `score` gives every sample an outcome, whatever the reward does; a failure is never a zero.
Training and evaluation have limits of their own, so that evaluation never waits behind training.
"""

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

from tidemill.common.config import NamedRewardConfig, RewardLimits, ServersConfig
from tidemill.common.telemetry import metrics
from tidemill.services.reward.outcome import (
    MAX_TRY_CHARS,
    AttemptError,
    NamelessTry,
    RewardOutcome,
    contained,
)
from tidemill.services.reward.rewards.cache import RewardCache, version_of
from tidemill.services.reward.rewards.reward import FunctionReward, Reward
from tidemill.services.reward.sample import RewardSample

LONGEST_BACKOFF_S = 60.0

T = TypeVar("T")


async def attempt(limits: RewardLimits, once: Callable[[], Awaitable[T]]) -> tuple[T, list[NamelessTry]]:
    """The first result of `once` under the limits of a reward, and all attempts where it took several.

    Raises:
        AttemptError: the last attempt failed; its `tries` are all attempts, where there were several.
    """
    tries: list[NamelessTry] = []
    ended = time.monotonic()
    while True:
        started = time.monotonic()
        failure: AttemptError | None = None
        try:
            with contained():
                result = await once()
        except AttemptError as error:
            failure = error
        ended, pause_s = time.monotonic(), started - ended
        reason = str(failure)[:MAX_TRY_CHARS] if failure else ""
        tries.append((round(ended - started, 6), round(pause_s, 6), reason))
        if failure is None:
            return result, tries if len(tries) > 1 else []
        if failure.is_final or len(tries) == limits.max_attempts:
            failure.tries = tries if len(tries) > 1 else []
            raise failure
        metrics.SCORE_RETRIES.inc()
        backoff_s = min(limits.backoff_s * 2 ** (len(tries) - 1), LONGEST_BACKOFF_S)
        # Jitter of half a pause: workers that failed together must not come back together.
        backoff_s += random.uniform(0, limits.backoff_s / 2)
        await asyncio.sleep(max(backoff_s, failure.retry_after_s))


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

    async def score(self, sample: RewardSample) -> RewardOutcome:
        """All attempts at one sample; it never raises for what a reward does."""
        if not self.applies_to(sample):
            return RewardOutcome()
        if self.cache is None:
            return await self._score(sample)
        return await self.cache.get_or_make(self.version, sample, partial(self._score, sample))

    async def score_group(self, samples: list[RewardSample]) -> list[RewardOutcome]:
        """All attempts at the samples of one group at once."""
        if not self.applies_to(samples[0]):
            return [RewardOutcome() for _ in samples]
        assert isinstance(self.reward, FunctionReward)  # `per: group` is for functions only
        return await self._attempt(samples, partial(self.reward.score_group, samples))

    async def _score(self, sample: RewardSample) -> RewardOutcome:
        async def once() -> list[RewardOutcome]:
            return [await self.reward.score(sample)]

        (outcome,) = await self._attempt([sample], once)
        return outcome

    async def _attempt(
        self, samples: list[RewardSample], once: Callable[[], Awaitable[list[RewardOutcome]]]
    ) -> list[RewardOutcome]:
        async def placed() -> list[RewardOutcome]:
            async with self._places[samples[0].is_evaluation]:
                return await once()

        try:
            outcomes, tries = await attempt(self.config, placed)
        except AttemptError as failure:
            self.failures[failure.kind] += len(samples)
            metrics.REWARD_FAILURES.labels(self.name, failure.kind).inc(len(samples))
            return [RewardOutcome.failed(failure, self.name) for _ in samples]
        return [replace(outcome, tries=[(self.name, *one) for one in tries]) for outcome in outcomes]

    async def close(self) -> None:
        """Free what the reward holds."""
        await self.reward.close()

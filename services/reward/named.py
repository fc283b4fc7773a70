"""A reward with its name, its limits and its attempts: what stands around every kind of reward alike.

Invariant: `score` gives every sample a part, whatever the reward does; a failure is never a zero. Training
and evaluation have limits of their own, so that evaluation never waits behind training.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial

from common import metrics
from common.config import NamedRewardConfig
from common.messages import Lane
from services.reward.attempts import Attempts
from services.reward.cache import RewardCache, version_of
from services.reward.outcome import AttemptError, Outcome
from services.reward.part import Part
from services.reward.rewards import FunctionReward, Reward
from services.reward.sample import Sample


class NamedReward:
    """One of the rewards of a run."""

    def __init__(
        self, name: str, config: NamedRewardConfig, reward: Reward, cache: RewardCache | None = None
    ) -> None:
        self.name, self.config, self.reward, self.cache = name, config, reward, cache
        self.version = version_of(name, config) if cache else ""
        self.failures: Counter[str] = Counter()
        """How often it failed for good, by kind of failure."""
        self._attempts = Attempts(config)
        self._places = [
            asyncio.Semaphore(config.max_concurrent) if config.max_concurrent else contextlib.nullcontext()
            for _ in ("training", "evaluation")
        ]

    def applies_to(self, sample: Sample) -> bool:
        """Whether the sample's lane and data source are ones it scores."""
        if (Lane.EVAL if sample.is_evaluation else Lane.TRAIN) not in self.config.lanes:
            return False
        return not self.config.applies_to or sample.data_source in self.config.applies_to

    @property
    def is_per_group(self) -> bool:
        """Whether it scores the samples of a group together, when all are there."""
        return self.config.per == "group"

    async def score(self, sample: Sample) -> Part:
        """All attempts at one sample; it never raises for what a reward does."""
        if not self.applies_to(sample):
            return Part()
        if self.cache is None:
            return await self._score(sample)
        return await self.cache.get_or_make(self.version, sample, partial(self._score, sample))

    async def score_group(self, samples: list[Sample]) -> list[Part]:
        """All attempts at the samples of one group at once."""
        if not self.applies_to(samples[0]):
            return [Part() for _ in samples]
        assert isinstance(self.reward, FunctionReward)  # `per: group` is for functions only
        return await self._attempt(samples, partial(self.reward.score_group, samples))

    async def _score(self, sample: Sample) -> Part:
        async def once() -> list[Outcome]:
            return [await self.reward.score(sample)]

        (part,) = await self._attempt([sample], once)
        return part

    async def _attempt(
        self, samples: list[Sample], once: Callable[[], Awaitable[list[Outcome]]]
    ) -> list[Part]:
        async def placed() -> list[Outcome]:
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

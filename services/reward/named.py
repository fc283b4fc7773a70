"""A reward with its name, its limits and its attempts: what stands around every kind of reward alike.

Invariant: `score` gives every sample a part, whatever the reward does; a failure is never a zero. Training
and evaluation have limits of their own, so that evaluation never waits behind training.
"""

import asyncio
import contextlib
from collections import Counter

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_attempt, wait_exponential
from tenacity import wait_random as jitter

from common import metrics
from common.config import NamedRewardConfig
from services.reward.outcome import AttemptError, Outcome, contained
from services.reward.part import Part
from services.reward.rewards import Reward
from services.reward.sample import Sample

LONGEST_BACKOFF_S = 60.0


class NamedReward:
    """One of the rewards of a run."""

    def __init__(self, name: str, config: NamedRewardConfig, reward: Reward) -> None:
        self.name, self.config, self.reward = name, config, reward
        self.failures: Counter[str] = Counter()
        """How often it failed for good, by kind of failure."""
        self._places = [
            asyncio.Semaphore(config.max_concurrent) if config.max_concurrent else contextlib.nullcontext()
            for _ in ("training", "evaluation")
        ]

    def applies_to(self, sample: Sample) -> bool:
        """Whether the sample's data source is one it scores."""
        return not self.config.applies_to or sample.data_source in self.config.applies_to

    async def score(self, sample: Sample) -> Part:
        """All attempts at one sample; it never raises for what a reward does."""
        if not self.applies_to(sample):
            return Part()
        attempts = self._attempts()
        outcome: Outcome | None = None
        try:
            async for attempt in attempts:
                with attempt, contained():
                    async with self._places[sample.is_evaluation]:
                        outcome = await self.reward.score(sample)
        except AttemptError as failure:
            part = Part.failed(failure, _count(attempts))
            self.count_failure(part)
            return part
        assert outcome is not None  # the last attempt either gave one or raised
        return Part.of(outcome, _count(attempts))

    def count_failure(self, part: Part) -> None:
        """A sample remains without this reward."""
        self.failures[part.kind] += 1
        metrics.REWARD_FAILURES.labels(self.name, part.kind).inc()

    async def close(self) -> None:
        """Free what the reward holds."""
        await self.reward.close()

    def _attempts(self) -> AsyncRetrying:
        return AsyncRetrying(
            retry=retry_if_exception(_is_worth_another),
            stop=stop_after_attempt(self.config.max_attempts),
            wait=self._pause_s,
            before_sleep=_count_retry,
            reraise=True,
        )

    def _pause_s(self, state: RetryCallState) -> float:
        # Jitter of half a pause: workers that failed together must not come back together.
        first_s = self.config.backoff_s
        pause_s = (wait_exponential(first_s, LONGEST_BACKOFF_S) + jitter(0, first_s / 2))(state)
        error = state.outcome.exception() if state.outcome else None
        asked_s = error.retry_after_s if isinstance(error, AttemptError) else 0.0
        return max(pause_s, asked_s)


def _count(attempts: AsyncRetrying) -> int:
    return max(1, int(attempts.statistics.get("attempt_number", 1)))


def _is_worth_another(error: BaseException) -> bool:
    return isinstance(error, AttemptError) and not error.is_final


def _count_retry(_: RetryCallState) -> None:
    metrics.SCORE_RETRIES.inc()

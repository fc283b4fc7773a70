"""From a trajectory to its score: attempts with backoff, and what they came to.

Invariant: every trajectory gets a score with a status. Only `ok` has a value; a failure is never a zero.
"""

import asyncio
import random
import time

from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception,
    stop_after_attempt,
    wait_exponential,
    wait_random,
)

from common import metrics
from common.config import RewardConfig
from common.messages import Lane, Score, ScoreStatus, Trajectory
from services.reward.outcome import AttemptError, contained
from services.reward.rewards import Reward
from services.reward.sample import Sample

LONGEST_BACKOFF_S = 60.0


class Scorer:
    """Scores trajectories by one reward, under the run's policy of attempts."""

    def __init__(self, reward: Reward, config: RewardConfig, worker: str, seed: int) -> None:
        self._reward, self._config = reward, config
        self._worker, self._seed = worker, seed

    async def score(self, trajectory: Trajectory, lane: Lane) -> Score:
        """The score of one trajectory; it never raises for what a reward does."""
        started = time.monotonic()
        sample = Sample.from_trajectory(trajectory, lane)
        await self._delay(sample)
        attempts = self._attempts()
        status, value, error, outcome = ScoreStatus.OK, None, "", None
        try:
            async for attempt in attempts:
                with attempt, contained():
                    outcome = await self._reward.score(sample)
            assert outcome is not None  # the last attempt either gave one or raised
            value = outcome.value
        except AttemptError as failure:
            status = ScoreStatus.TIMEOUT if failure.is_timeout else ScoreStatus.FAILED
            error = str(failure)
        return Score(
            ticket=sample.key[0],
            index=sample.key[1],
            status=status,
            value=value,
            components=outcome.components if outcome else {},
            detail=outcome.detail if outcome else {},
            error=error,
            attempts=max(1, attempts.statistics.get("attempt_number", 1)),
            worker=self._worker,
            latency_s=time.monotonic() - started,
        )

    def _attempts(self) -> AsyncRetrying:
        first_s = self._config.backoff_s
        return AsyncRetrying(
            retry=retry_if_exception(_is_worth_another),
            stop=stop_after_attempt(self._config.max_attempts),
            # Jitter of half a pause: workers that failed together must not come back together.
            wait=wait_exponential(first_s, LONGEST_BACKOFF_S) + wait_random(0, first_s / 2),
            before_sleep=_count_retry,
            reraise=True,
        )

    async def _delay(self, sample: Sample) -> None:
        """The benchmark's delay: the same for a trajectory in every run, and whoever scores it."""
        if self._config.delay_s is not None:
            chance = random.Random(f"{self._seed}:{sample.key[0]}:{sample.key[1]}")
            await asyncio.sleep(chance.uniform(*self._config.delay_s))


def _is_worth_another(error: BaseException) -> bool:
    return isinstance(error, AttemptError) and not error.is_final


def _count_retry(_: RetryCallState) -> None:
    metrics.SCORE_RETRIES.inc()

"""From a trajectory to its score.

Invariant: every trajectory gets a score with a status. Only `ok` has a value; a failure is never a zero.
"""

import asyncio
import random
import time

from common.config import RewardConfig
from common.wire.messages import Lane, Score, Trajectory
from services.reward.functions.sample import Sample
from services.reward.rewards.weighted_sum import HybridReward, Parts


class Scorer:
    """Scores trajectories by the rewards of a run."""

    def __init__(self, reward: HybridReward, config: RewardConfig, worker: str, seed: int) -> None:
        self.reward, self._config = reward, config
        self._worker, self._seed = worker, seed

    async def score(self, trajectory: Trajectory, lane: Lane) -> Score:
        """The score of one trajectory; it never raises for what a reward does."""
        started = time.monotonic()
        sample = Sample.from_trajectory(trajectory, lane)
        total = self.reward.sum_up(await self.parts(sample))
        return total.score(sample.key, self._worker, time.monotonic() - started)

    async def parts(self, sample: Sample) -> Parts:
        """What each reward says of one sample by itself."""
        await self._delay(sample)
        return await self.reward.score(sample)

    async def _delay(self, sample: Sample) -> None:
        """The benchmark's delay: the same for a trajectory in every run, and whoever scores it."""
        if self._config.delay_s is not None:
            chance = random.Random(f"{self._seed}:{sample.key[0]}:{sample.key[1]}")
            await asyncio.sleep(chance.uniform(*self._config.delay_s))

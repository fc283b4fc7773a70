"""What a reward is to the worker: something that gives one sample an outcome, or raises `AttemptError`.

A function is one kind. Judges, reward models, weighted sums and caches are others: each implements
`Reward`, wraps other rewards where it has to, and is chosen in `make_reward`.
"""

from typing import Protocol

from common.config import RewardConfig
from services.reward.execution import execution_of
from services.reward.functions import RewardFunction, load_function
from services.reward.outcome import Outcome
from services.reward.sample import Sample


class Reward(Protocol):
    """Scores samples, many at once."""

    slots: int | None
    """Samples it makes sense to hold at once; None where only memory sets a limit."""

    async def score(self, sample: Sample) -> Outcome:
        """One attempt, within the reward's own limit of time. Whoever calls decides on retries."""

    async def close(self) -> None:
        """Free what it holds."""


class FunctionReward:
    """The reward that a function computes."""

    def __init__(self, function: RewardFunction, timeout_s: float, num_processes: int) -> None:
        self._execution = execution_of(function, num_processes)
        self.slots = self._execution.slots
        self._timeout_s = timeout_s

    async def score(self, sample: Sample) -> Outcome:
        """Call the function once."""
        return await self._execution.score(sample, self._timeout_s)

    async def close(self) -> None:
        """End its processes."""
        await self._execution.close()


def make_reward(config: RewardConfig) -> Reward:
    """The reward of a run.

    Raises:
        ConfigError: it cannot be loaded or called as configured.
    """
    return FunctionReward(load_function(config.function, config.kwargs), config.timeout_s, config.processes)

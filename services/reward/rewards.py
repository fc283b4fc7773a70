"""What a reward is to the worker: something that gives one sample an outcome, or raises `AttemptError`.

Functions, judges, reward models and sandboxes are its kinds; each implements `Reward`, and `make_reward`
chooses. Attempts, backoff, concurrency, cache and failure policy stand around all of them alike, in
`named.py`: a kind makes one attempt and says what came of it.
"""

from typing import Protocol

from common.config import NamedRewardConfig
from common.errors import ConfigError
from services.reward.execution import execution_of
from services.reward.functions import RewardFunction, load_function
from services.reward.outcome import Outcome
from services.reward.remote.judge import check_judge, make_judge
from services.reward.sample import Sample
from services.reward.services import RewardServices


class Reward(Protocol):
    """Scores samples, many at once."""

    slots: int | None
    """Samples it makes sense to hold at once; None where only memory sets a limit."""

    async def score(self, sample: Sample) -> Outcome:
        """One attempt, within the reward's own limit of time. Whoever calls decides on retries.

        Raises:
            AttemptError: it gave no value. Anything else that is raised is taken for one.
        """

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


def make_reward(name: str, config: NamedRewardConfig, services: RewardServices) -> Reward:
    """The reward called `name`.

    Raises:
        ConfigError: it cannot be loaded or called as configured.
    """
    if config.function is not None:
        function = load_function(config.function, config.kwargs)
        return FunctionReward(function, config.timeout_s, services.config.reward.processes)
    if config.judge is not None:
        return make_judge(name, config, services)
    raise ConfigError(f"reward {name}: rewards of kind {config.kind} are not available in this version")


def check_reward(name: str, config: NamedRewardConfig) -> None:
    """Find what is wrong with a reward without a run: what `tidemill check` asks for each of them.

    Raises:
        ConfigError: it cannot be loaded or called as configured.
    """
    if config.function is not None:
        load_function(config.function, config.kwargs)
        return
    if config.judge is not None:
        check_judge(name, config)
        return
    raise ConfigError(f"reward {name}: rewards of kind {config.kind} are not available in this version")

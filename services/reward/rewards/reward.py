"""What a reward is to the worker: something that gives one sample an outcome, or raises `AttemptError`.

Functions, judges, reward models, sandboxes, environments and teachers are its kinds, the rows of `REWARDS`;
each implements `Reward`. Attempts, backoff, concurrency, cache and failure policy stand around
all of them alike, in `named.py`: a kind makes one attempt and says what came of it.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from tidemill.common.config import NamedRewardConfig, ServersConfig
from tidemill.common.errors import ConfigError
from tidemill.services.reward.functions.loading import load_function
from tidemill.services.reward.functions.processes.pool import execution_of
from tidemill.services.reward.functions.request import Request
from tidemill.services.reward.functions.reward_function import RewardFunction
from tidemill.services.reward.functions.signature import ROUTER
from tidemill.services.reward.outcome import RewardOutcome
from tidemill.services.reward.remote.dependencies import RewardDependencies
from tidemill.services.reward.remote.faults import check_key
from tidemill.services.reward.remote.judge import check_judge, judge_reading, make_judge
from tidemill.services.reward.remote.reward_model import make_model_reward, model_reading
from tidemill.services.reward.remote.serving import check_local
from tidemill.services.reward.remote.teacher import check_teacher, make_teacher, teacher_reading
from tidemill.services.reward.rewards.environment import EnvironmentReward
from tidemill.services.reward.rewards.sandbox import SandboxJobs, SandboxReward
from tidemill.services.reward.sample import RewardSample


class Reward(Protocol):
    """Scores samples, many at once."""

    @property
    def slots(self) -> int | None:
        """Samples it makes sense to hold at once; None where only memory sets a limit."""

    async def score(self, sample: RewardSample) -> RewardOutcome:
        """One attempt, within the reward's own limit of time. Whoever calls decides on retries.

        Raises:
            AttemptError: it gave no value. Anything else that is raised is taken for one.
        """

    async def close(self) -> None:
        """Free what it holds."""


class FunctionReward:
    """The reward that a function computes."""

    def __init__(
        self,
        function: RewardFunction,
        timeout_s: float,
        num_processes: int,
        router: Callable[[], Awaitable[str]] | None = None,
        threads: int = 1,
    ) -> None:
        self.function = function
        self.execution = execution_of(function, num_processes, threads)
        self._timeout_s, self._router = timeout_s, router

    @property
    def slots(self) -> int | None:
        """Those of the function's processes; it grows where they are found to wait."""
        return self.execution.slots

    async def score(self, sample: RewardSample) -> RewardOutcome:
        """Call the function once, for one sample."""
        (outcome,) = await self.score_group([sample])
        return outcome

    async def score_group(self, samples: list[RewardSample]) -> list[RewardOutcome]:
        """Call the function once, for all samples of a group."""
        given = {ROUTER: await self._router()} if self._router else {}
        return await self.execution.run(Request(samples, given), self._timeout_s)

    async def post_process(
        self, samples: list[RewardSample], scores: list[float | None]
    ) -> list[RewardOutcome]:
        """Have a class post-process its own scores of a group."""
        return await self.execution.run(Request(samples, scores=scores), self._timeout_s)

    async def close(self) -> None:
        await self.execution.close()


def make_function(name: str, config: NamedRewardConfig, dependencies: RewardDependencies) -> FunctionReward:
    router = partial(dependencies.router_address, config.router) if config.router else None
    section, function = dependencies.config.reward, load_checked(name, config)
    return FunctionReward(function, config.timeout_s, section.processes, router, section.threads)


def load_checked(name: str, config: NamedRewardConfig) -> RewardFunction:
    """The function of a reward. Raises ConfigError: it cannot be loaded or called as configured."""
    assert config.function is not None
    function = load_function(config.function, config.kwargs, config.style, config.tokenizer)
    if config.per == "group" and not function.how.style.takes_lists:
        raise ConfigError(
            f"reward {name}: per: group needs a function in TRL's style or of verl's batch manager, which "
            f"take lists; {config.function} is in the style {function.how.style}. A function over the "
            "scores of a group goes into reward.group."
        )
    if ROUTER in function.how.required and not config.router:
        raise ConfigError(
            f"reward {name}: {config.function} takes {ROUTER}; say with `router` which servers' it is"
        )
    return function


def make_sandbox(_: str, config: NamedRewardConfig, dependencies: RewardDependencies) -> SandboxReward:
    assert config.sandbox is not None
    return SandboxReward(config.sandbox, SandboxJobs(dependencies.broker, dependencies.keys))


@dataclass(frozen=True, slots=True)
class RewardKind:
    """What there is to do for a kind of reward. Each may raise ConfigError: it is not as it should be."""

    make: Callable[[str, NamedRewardConfig, RewardDependencies], Reward]
    check: Callable[[str, NamedRewardConfig], object] = lambda *_: None
    """Finds what is wrong with it without a run."""
    reading: Callable[[str, NamedRewardConfig, RewardSample, ServersConfig], str] | None = None
    """The text of its servers' request about a sample, for `check`. Raises AttemptError: there is none."""


REWARDS = {
    "function": RewardKind(make_function, load_checked),
    "judge": RewardKind(make_judge, check_judge, judge_reading),
    "model": RewardKind(make_model_reward, reading=model_reading),
    "sandbox": RewardKind(make_sandbox),
    "environment": RewardKind(lambda *_: EnvironmentReward()),
    "teacher": RewardKind(make_teacher, check_teacher, teacher_reading),
}
"""By the field of `NamedRewardConfig` that configures it; a new kind is one file, its section, and a row."""


def make_reward(name: str, config: NamedRewardConfig, dependencies: RewardDependencies) -> Reward:
    """The reward called `name`. Raises ConfigError: it cannot be loaded or called as configured."""
    if config.servers:
        check_key(config.servers, dependencies.servers(config.servers).config.api_key_env)
    return REWARDS[config.kind].make(name, config, dependencies)


def check_reward(name: str, config: NamedRewardConfig, servers: Mapping[str, ServersConfig]) -> None:
    """Find what is wrong with a reward without a run: what `tidemill check` asks for each of them.

    Raises:
        ConfigError: it cannot be loaded or called as configured, or its servers cannot start here.
    """
    if config.servers:
        check_key(config.servers, servers[config.servers].api_key_env)
        check_local(name, config, servers[config.servers])
    REWARDS[config.kind].check(name, config)

"""Kinds of rewards with one interface: a `Reward` gives one sample an outcome, or raises `AttemptError`.

The kinds are functions, judges, reward models, sandboxes, environments and teachers (`kind_of`). A kind makes
one attempt. Retries, backoff, concurrency, cache and failure policy are the same for all of them, in
`weighted_sum.py` and `attempts.py`.
"""

import contextlib
import math
import os
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from tidemill.common.config import NamedRewardConfig
from tidemill.common.config.servers import ServersConfig
from tidemill.common.errors import ConfigError
from tidemill.services.reward.functions.pool import Execution
from tidemill.services.reward.functions.request import Request
from tidemill.services.reward.functions.reward_function import RewardFunction, load_function
from tidemill.services.reward.functions.signature import ROUTER, Style
from tidemill.services.reward.outcome import AttemptError, BreakOff, OnEnd, Reward, RewardOutcome
from tidemill.services.reward.remote.dependencies import RewardDependencies
from tidemill.services.reward.sample import RewardSample

if TYPE_CHECKING:
    from tidemill.services.reward.pictures import PictureReader

NUM_TURNS = "num_turns"
_FIELD = re.compile(r"(?<![\w./])reward\.(function|kwargs)(?= )")
"""A field of a single function, as errors about it name it; not a part of a module's or a file's name."""


class FunctionReward(Reward):
    def __init__(
        self,
        function: RewardFunction,
        timeout_s: float,
        num_processes: int,
        router: Callable[[], Awaitable[str]] | None = None,
        threads: int = 1,
        at_once: int | None = None,
        pictures: "PictureReader | None" = None,
    ) -> None:
        self.function = function
        self._pictures = pictures if function.takes_pictures else None
        self.execution = Execution(function, num_processes, threads, at_once)
        self._timeout_s = timeout_s
        self._router = router

    @property
    def slots(self) -> int | None:  # type: ignore[override]
        """Slots of the function's processes; grows while its calls are measured to wait."""
        return self.execution.slots

    @property
    def is_queueing(self) -> bool:  # type: ignore[override]
        return self.execution.is_queueing

    def begin(self, sample: RewardSample, on_end: OnEnd) -> BreakOff | None:
        has_to_wait = self._router is not None or (
            self._pictures is not None and sample.trajectory.prompt_images
        )
        if has_to_wait:
            return None
        return self.execution.begin(Request([sample]), self._timeout_s, on_end)

    async def score(self, sample: RewardSample) -> RewardOutcome:
        (outcome,) = await self.score_group([sample])
        return outcome

    async def score_group(self, samples: list[RewardSample]) -> list[RewardOutcome]:
        arguments = {ROUTER: await self._router()} if self._router else {}
        if self._pictures is not None:
            samples = [await self._pictures.with_pictures(sample) for sample in samples]
        return await self.execution.run(Request(samples, arguments), self._timeout_s)

    async def post_process(
        self, samples: list[RewardSample], scores: list[float | None]
    ) -> list[RewardOutcome]:
        return await self.execution.run(Request(samples, scores=scores), self._timeout_s)

    async def start(self) -> None:
        await self.execution.start()

    async def close(self) -> None:
        await self.execution.close()


def make_function(name: str, config: NamedRewardConfig, dependencies: RewardDependencies) -> FunctionReward:
    router = partial(dependencies.router_address, config.router) if config.router else None
    section = dependencies.config.reward
    function = load_checked(name, config, dependencies.pictures is not None)
    return FunctionReward(
        function,
        config.timeout_s,
        section.processes,
        router,
        section.threads,
        section.max_in_flight,
        dependencies.pictures,
    )


def load_checked(name: str, config: NamedRewardConfig, has_pictures: bool) -> RewardFunction:
    """The function of a reward, in a run whose prompts may have pictures or not. Raises ConfigError: it
    cannot be loaded or called as configured."""
    assert config.function is not None
    function = load_function(config.function, config.kwargs, config.style, config.tokenizer, has_pictures)
    if config.per == "group" and function.how.style not in (Style.TRL, Style.VERL_BATCH):
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


@contextlib.contextmanager
def naming_fields(name: str, is_named: bool) -> Iterator[None]:
    """Have errors about a function name the field of the config that is wrong: that of the reward `name`
    below `reward.rewards`, where the run names its rewards.

    Raises:
        ConfigError: what the block raised, so changed.
    """
    try:
        yield
    except ConfigError as error:
        if not is_named:
            raise
        raise ConfigError(_FIELD.sub(rf"reward.rewards.{name}.\1", str(error))) from error


class EnvironmentReward(Reward):
    """The reward that a session's environment gave, which came with the trajectory: that of the session, else
    the sum over its turns. Without any, the reward fails; it is not 0."""

    async def score(self, sample: RewardSample) -> RewardOutcome:
        """The value, with the environment's metrics and the number of turns as components.

        Raises:
            AttemptError: the environment gave no reward, or one that is no finite number.
        """
        session = sample.trajectory.session
        if session is None:
            raise AttemptError("this is no session: a single turn has no environment", is_final=True)
        turn_rewards = [reward for reward in sample.turn_rewards if reward is not None]
        value = session.reward
        if value is None and turn_rewards:
            value = sum(turn_rewards)
        if value is None:
            is_timeout = session.end == "timeout"
            raise AttemptError(
                f"the environment {session.environment} gave no reward, for the session or a turn "
                f"(it ended with {session.end}); take another reward, or have it give one",
                is_timeout=is_timeout,
                is_final=True,
                kind="timeout" if is_timeout else "no_reward",
            )
        if not math.isfinite(value):
            raise AttemptError(
                f"the environment {session.environment} gave the reward {value}; expected a finite number",
                is_final=True,
            )
        metrics = {name: number for name, number in session.metrics.items() if math.isfinite(number)}
        return RewardOutcome(float(value), {**metrics, NUM_TURNS: float(len(sample.turn_rewards))})


@dataclass(frozen=True, slots=True)
class RewardKind:
    """The functions of a kind of reward. Each may raise ConfigError: the reward is configured wrongly."""

    make: Callable[[str, NamedRewardConfig, RewardDependencies], Reward]
    check: Callable[[str, NamedRewardConfig, bool], object] = lambda *_: None
    """Finds what is wrong with it without a run; the last argument says whether prompts may have pictures."""
    reading: Callable[[str, NamedRewardConfig, RewardSample, ServersConfig], str] | None = None
    """The text of its servers' request about a sample, for `check`. Raises AttemptError: there is none."""


def kind_of(name: str) -> RewardKind:
    """The kind that the field `name` of `NamedRewardConfig` configures. A kind is one file, its section of
    the config, and a row here."""
    if name == "function":
        return RewardKind(make_function, load_checked)
    if name == "environment":
        return RewardKind(lambda *_: EnvironmentReward())
    # Imported here: a worker that has only functions would start later for clients and templates.
    from tidemill.services.reward.remote.judge import JudgeReward, check_judge, judge_reading
    from tidemill.services.reward.remote.reward_model import ModelReward, model_reading
    from tidemill.services.reward.remote.teacher import TeacherReward, check_teacher, teacher_reading
    from tidemill.services.reward.rewards.sandbox import SandboxReward

    return {
        "judge": RewardKind(JudgeReward, check_judge, judge_reading),
        "model": RewardKind(ModelReward, reading=model_reading),
        "sandbox": RewardKind(SandboxReward),
        "teacher": RewardKind(TeacherReward, check_teacher, teacher_reading),
    }[name]


def check_key(name: str, variable: str) -> None:
    """Raises ConfigError: the environment lacks the API key that the config names."""
    if variable and not os.environ.get(variable):
        raise ConfigError(
            f"servers.{name}: the environment variable {variable} (api_key_env) is not set; every machine "
            "with reward workers needs it"
        )


def make_reward(name: str, config: NamedRewardConfig, dependencies: RewardDependencies) -> Reward:
    """The reward called `name`. Raises ConfigError: it cannot be loaded or called as configured."""
    if config.servers:
        check_key(config.servers, dependencies.servers(config.servers).config.api_key_env)
    return kind_of(config.kind).make(name, config, dependencies)


def check_reward(
    name: str, config: NamedRewardConfig, servers: Mapping[str, ServersConfig], has_pictures: bool = False
) -> None:
    """Find what is wrong with a reward without a run; `tidemill check` calls it for each. `has_pictures` says
    whether prompts may have pictures.

    Raises:
        ConfigError: it cannot be loaded or called as configured, or its servers cannot start here.
    """
    if config.servers:
        from tidemill.services.reward.remote.serving import check_local

        check_key(config.servers, servers[config.servers].api_key_env)
        check_local(name, config, servers[config.servers])
    kind_of(config.kind).check(name, config, has_pictures)

"""All rewards of a run: each with its limits and cache, and the weighted sum of them for a sample.

Invariant: `NamedReward.score` gives every sample an outcome, whatever the reward does; a failure is never a
zero. `max_concurrent` holds for each lane by itself, so that evaluation never waits behind training.

A reward that does not apply is left out of the sum, as in TRL. A teacher adds nothing to it: its logprobs
travel beside it. For a reward that failed its `on_failure` counts where that is a number; otherwise the score
fails, and says whether only the sample or its whole group is given up.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from tidemill.common.config import NamedRewardConfig, RewardConfig
from tidemill.common.config.servers import ServersConfig
from tidemill.common.errors import MachineFaultError, first_cause
from tidemill.common.process.failures import Failure, FailureLog
from tidemill.common.telemetry import metrics
from tidemill.common.wire.messages import Lane, Score, ScoreStatus, Try
from tidemill.services.reward.attempts import attempt
from tidemill.services.reward.outcome import (
    AttemptError,
    BreakOff,
    OnEnd,
    Reward,
    RewardOutcome,
)
from tidemill.services.reward.remote.dependencies import RewardDependencies
from tidemill.services.reward.rewards.cache import RewardCache, version_of
from tidemill.services.reward.rewards.reward import FunctionReward, make_reward, naming_fields
from tidemill.services.reward.sample import RewardSample

NONE_APPLIES = "no reward applies to this sample: each of them returned None or is for other data sources"

T = TypeVar("T")
Outcomes = dict[str, RewardOutcome]
"""Name of the reward -> its outcome for one sample."""


class NamedReward:
    def __init__(
        self,
        name: str,
        config: NamedRewardConfig,
        reward: Reward,
        cache: RewardCache | None = None,
        servers: ServersConfig | None = None,
    ) -> None:
        self.name = name
        self.config = config
        self.reward = reward
        self.cache = cache
        self.version = version_of(name, config, servers) if cache else ""
        self.failures: Counter[str] = Counter()
        """How often it failed for good, by kind of failure."""
        self.log = FailureLog()
        """Its failed attempts, by cause."""
        self._places: dict[Lane, asyncio.Semaphore] = {}
        """Places for attempts, of each lane; empty without a limit."""
        if config.max_concurrent:
            self._places = {lane: asyncio.Semaphore(config.max_concurrent) for lane in Lane}

    def applies_to(self, sample: RewardSample) -> bool:
        return sample.lane in self.config.lanes and self.config.scores_source(
            sample.trajectory.data_source, sample.trajectory.source
        )

    @property
    def is_per_group(self) -> bool:
        """Whether it scores the samples of a group together, when all are there."""
        return self.config.per == "group"

    async def score(self, sample: RewardSample) -> RewardOutcome:
        """Make all attempts at one sample; a reward that fails never makes it raise.

        Raises:
            MachineFaultError: this machine is short of something.
        """
        if not self.applies_to(sample):
            return RewardOutcome()
        if self.cache is not None:
            return await self.cache.get_or_make(self.version, sample, partial(self._attempt_one, sample))
        return await self._attempt_one(sample)

    def begin(self, sample: RewardSample, on_end: OnEnd) -> BreakOff | None:
        """Begin the first attempt at a sample where no task has to wait for it; see `Reward.begin`."""
        if self.cache is not None or self._places or not self.applies_to(sample):
            return None
        return self.reward.begin(sample, on_end)

    async def score_group(self, samples: list[RewardSample]) -> list[RewardOutcome]:
        if not self.applies_to(samples[0]):
            return [RewardOutcome() for _ in samples]
        assert isinstance(self.reward, FunctionReward)  # `per: group` is for functions only
        return await self._attempt(samples, partial(self.reward.score_group, samples))

    async def _attempt_one(self, sample: RewardSample) -> RewardOutcome:
        async def once() -> list[RewardOutcome]:
            return [await self.reward.score(sample)]

        (outcome,) = await self._attempt([sample], once)
        return outcome

    async def _attempt(
        self, samples: list[RewardSample], once: Callable[[], Awaitable[list[RewardOutcome]]]
    ) -> list[RewardOutcome]:
        async def placed() -> list[RewardOutcome]:
            # Taken for each attempt: during the pause before the next one, others have the place.
            async with self._places[samples[0].lane]:
                return await once()

        def note(failure: AttemptError) -> None:
            self.log.note(f"reward {self.name}", failure.kind, str(failure), len(samples))

        try:
            work = placed if self._places else once
            outcomes, tries = await attempt(self.name, self.config, work, note, samples[0].began_at)
        except AttemptError as failure:
            self.failures[failure.kind] += len(samples)
            metrics.REWARD_FAILURES.labels(self.name, failure.kind).inc(len(samples))
            return [RewardOutcome.failed(failure) for _ in samples]
        if not tries:
            return outcomes
        return [replace(outcome, tries=tries) for outcome in outcomes]


async def _all_or_none(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all. After a fault of the machine the others are cancelled: the sample is handed back,
    and nothing is computed for it here meanwhile.

    Raises:
        MachineFaultError: this machine is short of something.
    """
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(work) for work in works]
    except* MachineFaultError as faults:
        raise first_cause(faults) from None
    return [task.result() for task in running]


class WeightedSum:
    def __init__(self, rewards: Sequence[NamedReward], is_named: bool) -> None:
        self.rewards = list(rewards)
        self._is_named = is_named
        """Whether components carry the rewards' names: a single `reward.function` has none."""
        self._single = [named for named in self.rewards if not named.is_per_group]
        """Rewards that score samples one by one."""
        self.has_group_rewards = any(named.is_per_group for named in self.rewards)

    @property
    def slots(self) -> int | None:
        """Samples it makes sense to hold at once: the most that any reward can use; None: no limit."""
        most = 0
        for named in self.rewards:
            count = named.reward.slots
            if count is None:
                return None
            most = max(most, count)
        return most

    @property
    def is_queueing(self) -> bool:
        """Whether samples beyond `reward.max_in_flight` wait where the rewards run, until others end."""
        return all(named.reward.is_queueing and not named.is_per_group for named in self.rewards)

    def begin(self, sample: RewardSample, on_end: OnEnd) -> BreakOff | None:
        """Begin to score a sample where no task has to wait for it; see `Reward.begin`."""
        return self.rewards[0].begin(sample, on_end) if len(self.rewards) == 1 else None

    async def score(self, sample: RewardSample) -> Outcomes:
        """The outcome of each reward that scores samples one by one; all are asked at once."""
        if len(self._single) == 1:
            only = self._single[0]
            return {only.name: await only.score(sample)}
        outcomes = await _all_or_none([named.score(sample) for named in self._single])
        return {named.name: outcome for named, outcome in zip(self._single, outcomes, strict=True)}

    async def score_group(self, samples: list[RewardSample]) -> list[Outcomes]:
        together = [named for named in self.rewards if named.is_per_group]
        columns = await _all_or_none([named.score_group(samples) for named in together])
        outcomes: list[Outcomes] = [{} for _ in samples]
        for named, column in zip(together, columns, strict=True):
            for by_name, outcome in zip(outcomes, column, strict=True):
                by_name[named.name] = outcome
        return outcomes

    def sum_up(self, outcomes: Outcomes) -> RewardOutcome:
        """The weighted sum for one sample, or why there is none."""
        total = RewardOutcome(tries=[each for outcome in outcomes.values() for each in outcome.tries])
        total.components, total.detail = self._notes(outcomes)
        weighted_sum = 0.0
        applies = False
        failed: list[NamedReward] = []
        for named in self.rewards:
            outcome = outcomes[named.name]
            value = outcome.value
            if not outcome.is_ok:
                value = self._failure_value(named)
                if value is None:
                    failed.append(named)
                    continue
                total.components[named.name] = value
                total.detail.setdefault("failures", {})[named.name] = outcome.error
            if value is not None:
                weighted_sum += named.config.weight * value
                applies = True
            elif outcome.teacher_logprobs is not None:
                total.teacher_logprobs = outcome.teacher_logprobs
                applies = True
        if failed:
            self._fail(total, failed, outcomes)
        elif applies and math.isfinite(weighted_sum):
            total.value = weighted_sum
        else:
            problem = f"the weighted sum of the rewards is {weighted_sum}; expected a finite number"
            total.status = ScoreStatus.FAILED
            total.error = problem if applies else NONE_APPLIES
            total.is_code_error = True
        return total

    def _failure_value(self, named: NamedReward) -> float | None:
        """What counts for a reward that failed; None where the sample has no score then."""
        # The failure of a single `reward.function` stays one: its value is the run's, which the trainer puts
        # in (`GroupFilter`).
        return named.config.failure_value if self._is_named else None

    def _fail(self, total: RewardOutcome, failed: Sequence[NamedReward], outcomes: Outcomes) -> None:
        """Make the sum the failure of these rewards."""
        first = outcomes[failed[0].name]
        total.status = first.status
        total.error = first.error
        total.teacher_logprobs = None
        # Where another reward failed by an outage, the sample may have a score next time.
        total.is_code_error = all(outcomes[named.name].is_code_error for named in failed)
        if self._is_named:
            total.error = "; ".join(f"{named.name}: {outcomes[named.name].error}" for named in failed)
            is_group_lost = any(named.config.on_failure == "drop_group" for named in failed)
            total.on_failure = "drop_group" if is_group_lost else "drop_sample"

    def failures(self) -> dict[str, int]:
        """`<name>:<kind>` -> how often a reward failed."""
        return {
            f"{named.name}:{kind}": count for named in self.rewards for kind, count in named.failures.items()
        }

    @property
    def failed_attempts(self) -> list[Failure]:
        """Attempts that failed, by reward and cause."""
        return [failure for named in self.rewards for failure in named.log.failures]

    @property
    def deaths(self) -> list[Failure]:
        """Processes of functions that died and failed no attempt, by reward and cause."""
        deaths: list[Failure] = []
        for named in self.rewards:
            if isinstance(named.reward, FunctionReward):
                deaths += named.reward.execution.deaths(f"a process of reward {named.name}")
        return deaths

    async def start(self) -> None:
        """Start what the rewards need before the first sample comes."""
        await asyncio.gather(*(named.reward.start() for named in self.rewards))

    async def close(self) -> None:
        await asyncio.gather(*(named.reward.close() for named in self.rewards))

    def _notes(self, outcomes: Outcomes) -> tuple[dict[str, float | None], dict[str, Any]]:
        if not self._is_named:
            (only,) = outcomes.values()
            return dict(only.components), dict(only.detail)
        components: dict[str, float | None] = {name: outcome.value for name, outcome in outcomes.items()}
        for name, outcome in outcomes.items():
            components |= {f"{name}/{key}": value for key, value in outcome.components.items()}
        return components, {name: outcome.detail for name, outcome in outcomes.items() if outcome.detail}


def make_weighted_sum(config: RewardConfig, dependencies: RewardDependencies) -> WeightedSum:
    """All rewards of a run, ready to score.

    Raises:
        ConfigError: one of them cannot be loaded or called as configured.
    """
    cache = RewardCache(dependencies.broker, dependencies.keys, config.cache_mb << 20)
    rewards: list[NamedReward] = []
    for name, named in config.named.items():
        with naming_fields(name, bool(config.rewards)):
            reward = make_reward(name, named, dependencies)
        # A function asks the servers of its router: what they serve decides its result, too.
        servers = dependencies.config.servers.get(named.servers or named.router)
        rewards.append(NamedReward(name, named, reward, cache if named.is_cached else None, servers))
    return WeightedSum(rewards, is_named=bool(config.rewards))


def _most_attempts(tries: Sequence[Try]) -> int:
    """Attempts of the reward that took the most. Those of rewards that took one are not among `tries`."""
    by_reward = Counter(name for name, *_ in tries)
    return max(by_reward.values(), default=1)


def score_of(total: RewardOutcome, sample: RewardSample, worker: str, latency_s: float) -> Score:
    """The message that publishes the sum of a sample's rewards."""
    return Score(
        ticket=sample.key[0],
        index=sample.key[1],
        tokens_digest=sample.trajectory.tokens_digest,
        status=total.status,
        value=total.value,
        components=total.components,
        detail=total.detail,
        error=total.error,
        is_code_error=total.is_code_error,
        on_failure=total.on_failure,
        attempts=_most_attempts(total.tries),
        tries=tuple(total.tries),
        worker=worker,
        latency_s=latency_s,
        teacher_logprobs=total.teacher_logprobs,
    )

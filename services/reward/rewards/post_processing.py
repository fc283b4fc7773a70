"""Changes the rewards of a group when all of them are there: reward classes first, then `reward.group`."""

from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

from tidemill.common.config import RewardConfig, RewardLimits
from tidemill.common.telemetry import metrics
from tidemill.common.wire.messages import ScoreStatus
from tidemill.services.reward.functions.group_functions import load_group_function
from tidemill.services.reward.functions.processes.pool import Execution, execution_of
from tidemill.services.reward.functions.request import Request
from tidemill.services.reward.outcome import AttemptError, RewardOutcome
from tidemill.services.reward.rewards.named import NamedReward, attempt
from tidemill.services.reward.rewards.reward import FunctionReward
from tidemill.services.reward.rewards.weighted_sum import Parts, WeightedSum
from tidemill.services.reward.sample import RewardSample

GROUP = "group"
"""Its name among the rewards, where failures are counted."""
BEFORE_GROUP = "before_group"
"""Component: the reward before post-processing."""

REPLACED = "replaced_failure"
"""Detail: why the reward had failed that post-processing has filled in."""

NO_SCORE = "the group function returned None for this sample"


class PostProcessing:
    """All post-processing of a run, in order: each reward class's of its own scores, then `reward.group`'s of
    their sum."""

    def __init__(self, config: RewardConfig, reward: WeightedSum) -> None:
        self._reward = reward
        self._classes = [named for named in reward.rewards if _post_processes(named)]
        self._limits = config
        self._execution: Execution | None = None
        self.failures: Counter[str] = Counter()
        """Groups whose post-processing failed for good, by kind of failure."""
        if config.group:
            function = load_group_function(config.group, config.group_kwargs)
            self._execution = execution_of(function, config.processes)

    @property
    def is_any(self) -> bool:
        """Whether there is something to do."""
        return bool(self._classes or self._execution)

    async def run(self, samples: list[RewardSample], parts: list[Parts]) -> list[RewardOutcome]:
        """The final sums of a group."""
        before = [self._reward.sum_up(part) for part in parts]
        for named in self._classes:
            if named.applies_to(samples[0]):  # all samples of a group are of one data source
                column = await self._by_class(named, samples, [part[named.name] for part in parts])
                parts = [{**part, named.name: new} for part, new in zip(parts, column, strict=True)]
        sums = [self._reward.sum_up(part) for part in parts]
        if self._execution is not None:
            sums = await self._changed_sums(samples, sums)
        return [_noted(old, new) for old, new in zip(before, sums, strict=True)]

    def failures_by_name(self) -> dict[str, int]:
        """How often it failed, as `group:<kind>`."""
        return {f"{GROUP}:{kind}": count for kind, count in self.failures.items()}

    async def close(self) -> None:
        if self._execution is not None:
            await self._execution.close()

    async def _by_class(
        self, named: NamedReward, samples: list[RewardSample], column: list[RewardOutcome]
    ) -> list[RewardOutcome]:
        """What one reward says of the samples once its class has seen all of it; None where it failed."""
        assert isinstance(named.reward, FunctionReward)
        step = partial(named.reward.post_process, samples, [old.value for old in column])
        found = await self._outcomes(named.config, step)
        if isinstance(found, RewardOutcome):
            return [replace(found, components=old.components, detail=old.detail) for old in column]
        return [_changed_part(old, outcome) for old, outcome in zip(column, found, strict=True)]

    async def _changed_sums(
        self, samples: list[RewardSample], sums: list[RewardOutcome]
    ) -> list[RewardOutcome]:
        found = await self._outcomes(self._limits, partial(self._by_function, samples, sums))
        if isinstance(found, RewardOutcome):
            return [replace(old, status=found.status, value=None, error=found.error) for old in sums]
        return [_changed(old, outcome) for old, outcome in zip(sums, found, strict=True)]

    async def _outcomes(
        self, limits: RewardLimits, step: Callable[[], Awaitable[list[RewardOutcome]]]
    ) -> list[RewardOutcome] | RewardOutcome:
        """What a step made of the group, or the failure that every sample of it remains with."""
        try:
            outcomes, _ = await attempt(limits, step)
        except AttemptError as failure:
            self.failures[failure.kind] += 1
            metrics.REWARD_FAILURES.labels(GROUP, failure.kind).inc()
            failed = RewardOutcome.failed(failure, GROUP)
            return replace(failed, error=f"post-processing of the group: {failed.error}", tries=[])
        return outcomes

    async def _by_function(
        self, samples: list[RewardSample], sums: list[RewardOutcome]
    ) -> list[RewardOutcome]:
        assert self._execution is not None
        notes: list[dict[str, Any]] = [
            {"score": old.value, "status": old.status.value, "error": old.error, "components": old.components}
            for old in sums
        ]
        request = Request(samples, scores=[old.value for old in sums], notes=notes)
        return await self._execution.run(request, self._limits.timeout_s)


def _post_processes(named: NamedReward) -> bool:
    return isinstance(named.reward, FunctionReward) and named.reward.function.post_process is not None


def _changed_part(old: RewardOutcome, outcome: RewardOutcome) -> RewardOutcome:
    """The part with its new value, and the old one beside it."""
    components = {**old.components, BEFORE_GROUP: old.value}
    if outcome.value is None:
        if not old.is_ok:
            return replace(old, components=components)
        failed = RewardOutcome.failed(AttemptError(NO_SCORE), GROUP)
        return replace(failed, tries=old.tries, components=components, detail=old.detail)
    detail = old.detail if old.is_ok else old.detail | {REPLACED: old.error}
    return RewardOutcome(value=outcome.value, tries=old.tries, components=components, detail=detail)


def _changed(old: RewardOutcome, outcome: RewardOutcome) -> RewardOutcome:
    """The sum with its new value. A failure may have been replaced by a value, or the reverse."""
    if outcome.value is None:
        if old.status is not ScoreStatus.OK:
            return old
        return replace(old, status=ScoreStatus.FAILED, value=None, error=NO_SCORE)
    detail = old.detail if not old.error else old.detail | {REPLACED: old.error}
    return replace(old, status=ScoreStatus.OK, value=outcome.value, error="", on_failure="", detail=detail)


def _noted(before: RewardOutcome, after: RewardOutcome) -> RewardOutcome:
    return replace(after, components={**after.components, BEFORE_GROUP: before.value})

"""Changes the rewards of a group when all of them are there: reward classes first, then `reward.group`."""

from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

from tidemill.common.config import RewardConfig
from tidemill.common.telemetry import metrics
from tidemill.common.wire.messages import ScoreStatus
from tidemill.services.reward.functions.group_functions import load_group_function
from tidemill.services.reward.functions.processes.pool import Execution, execution_of
from tidemill.services.reward.functions.request import Request
from tidemill.services.reward.outcome import AttemptError, Part, RewardOutcome
from tidemill.services.reward.rewards.named import Attempts, NamedReward
from tidemill.services.reward.rewards.reward import FunctionReward
from tidemill.services.reward.rewards.weighted_sum import Parts, Total, WeightedSum
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
        self._classes = [
            (named, Attempts(named.config)) for named in reward.rewards if _post_processes(named)
        ]
        self._attempts, self._timeout_s = Attempts(config), config.timeout_s
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

    async def run(self, samples: list[RewardSample], parts: list[Parts]) -> list[Total]:
        """The final sums of a group."""
        before = [self._reward.sum_up(part) for part in parts]
        for named, attempts in self._classes:
            if named.applies_to(samples[0]):  # all samples of a group are of one data source
                column = await self._by_class(named, attempts, samples, [part[named.name] for part in parts])
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
        self, named: NamedReward, attempts: Attempts, samples: list[RewardSample], column: list[Part]
    ) -> list[Part]:
        """What one reward says of the samples once its class has seen all of it; None where it failed."""
        assert isinstance(named.reward, FunctionReward)
        step = partial(named.reward.post_process, samples, [old.value for old in column])
        found = await self._outcomes(attempts, step)
        if isinstance(found, Part):
            return [replace(found, components=old.components, detail=old.detail) for old in column]
        return [_changed_part(old, outcome) for old, outcome in zip(column, found, strict=True)]

    async def _changed_sums(self, samples: list[RewardSample], sums: list[Total]) -> list[Total]:
        found = await self._outcomes(self._attempts, partial(self._by_function, samples, sums))
        if isinstance(found, Part):
            return [replace(old, status=found.status, value=None, error=found.error) for old in sums]
        return [_changed(old, outcome) for old, outcome in zip(sums, found, strict=True)]

    async def _outcomes(
        self, attempts: Attempts, step: Callable[[], Awaitable[list[RewardOutcome]]]
    ) -> list[RewardOutcome] | Part:
        """What a step made of the group, or the failure that every sample of it remains with."""
        try:
            outcomes, _ = await attempts.make(step)
        except AttemptError as failure:
            self.failures[failure.kind] += 1
            metrics.REWARD_FAILURES.labels(GROUP, failure.kind).inc()
            part = Part.failed(failure)
            return replace(part, error=f"post-processing of the group: {part.error}")
        return outcomes

    async def _by_function(self, samples: list[RewardSample], sums: list[Total]) -> list[RewardOutcome]:
        assert self._execution is not None
        notes: list[dict[str, Any]] = [
            {"score": old.value, "status": old.status.value, "error": old.error, "components": old.components}
            for old in sums
        ]
        request = Request(samples, scores=[old.value for old in sums], notes=notes)
        return await self._execution.run(request, self._timeout_s)


def _post_processes(named: NamedReward) -> bool:
    return isinstance(named.reward, FunctionReward) and named.reward.function.post_process is not None


def _changed_part(old: Part, outcome: RewardOutcome) -> Part:
    """The part with its new value, and the old one beside it."""
    components = {**old.components, BEFORE_GROUP: old.value}
    if outcome.value is None:
        if not old.is_ok:
            return replace(old, components=components)
        failed = AttemptError(NO_SCORE)
        return replace(Part.failed(failed), tries=old.tries, components=components, detail=old.detail)
    detail = old.detail if old.is_ok else old.detail | {REPLACED: old.error}
    return Part(value=outcome.value, tries=old.tries, components=components, detail=detail)


def _changed(old: Total, outcome: RewardOutcome) -> Total:
    """The sum with its new value. A failure may have been replaced by a value, or the reverse."""
    if outcome.value is None:
        if old.status is not ScoreStatus.OK:
            return old
        return replace(old, status=ScoreStatus.FAILED, value=None, error=NO_SCORE)
    detail = old.detail if not old.error else old.detail | {REPLACED: old.error}
    return replace(old, status=ScoreStatus.OK, value=outcome.value, error="", on_failure="", detail=detail)


def _noted(before: Total, after: Total) -> Total:
    return replace(after, components={**after.components, BEFORE_GROUP: before.value})

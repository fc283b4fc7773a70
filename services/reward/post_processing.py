"""What is done to the scores of a training group when all are there: `reward.group`, and the
`post_process_scores` of reward classes.

Invariant: a function that fails, or gives no number for a sample, leaves that sample without a score and with
a reason; it never passes for a zero or for the score from before.
"""

from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

from common import metrics
from common.config import RewardConfig
from common.messages import ScoreStatus
from services.reward.attempts import Attempts
from services.reward.execution import Execution, execution_of
from services.reward.group_functions import load_group_function
from services.reward.hybrid import HybridReward, Sum
from services.reward.outcome import AttemptError, Outcome
from services.reward.part import Part
from services.reward.request import Request
from services.reward.rewards import FunctionReward
from services.reward.sample import Sample

GROUP = "group"
"""Its name among the rewards, where failures are counted."""
BEFORE_GROUP = "before_group"
"""Component: the reward before post-processing."""

NO_SCORE = "the group function returned None for this sample"

Step = Callable[[list[Sample], list[Sum]], Awaitable[list[Outcome]]]


class PostProcessing:
    """All post-processing of a run, in order: that of a lone reward class, then `reward.group`."""

    def __init__(self, config: RewardConfig, reward: HybridReward) -> None:
        self._attempts = Attempts(config)
        self._timeout_s = config.timeout_s
        self._steps: list[Step] = []
        self._execution: Execution | None = None
        self.failures: Counter[str] = Counter()
        """Groups whose post-processing failed for good, by kind of failure."""
        (first, *others) = reward.rewards
        if not others and isinstance(first.reward, FunctionReward) and first.reward.function.post_process:
            self._steps.append(partial(_by_class, first.reward))
        if config.group:
            function = load_group_function(config.group, config.group_kwargs)
            self._execution = execution_of(function, config.processes)
            self._steps.append(self._by_function)

    @property
    def is_any(self) -> bool:
        """Whether there is something to do."""
        return bool(self._steps)

    async def run(self, samples: list[Sample], sums: list[Sum]) -> list[Sum]:
        """The final sums of a group."""
        before = sums
        for step in self._steps:
            sums = await self._run(step, samples, sums)
        return [_noted(old, new) for old, new in zip(before, sums, strict=True)]

    def failures_by_name(self) -> dict[str, int]:
        """How often it failed, as `group:<kind>`."""
        return {f"{GROUP}:{kind}": count for kind, count in self.failures.items()}

    async def close(self) -> None:
        """End its processes."""
        if self._execution is not None:
            await self._execution.close()

    async def _run(self, step: Step, samples: list[Sample], sums: list[Sum]) -> list[Sum]:
        try:
            outcomes, _ = await self._attempts.make(partial(step, samples, sums))
        except AttemptError as failure:
            self.failures[failure.kind] += 1
            metrics.REWARD_FAILURES.labels(GROUP, failure.kind).inc()
            part = Part.failed(failure)
            error = f"post-processing of the group: {part.error}"
            return [replace(old, status=part.status, value=None, error=error) for old in sums]
        return [_changed(old, outcome) for old, outcome in zip(sums, outcomes, strict=True)]

    async def _by_function(self, samples: list[Sample], sums: list[Sum]) -> list[Outcome]:
        assert self._execution is not None
        notes: list[dict[str, Any]] = [
            {"score": old.value, "status": old.status.value, "error": old.error, "components": old.components}
            for old in sums
        ]
        request = Request(samples, scores=[old.value for old in sums], notes=notes)
        return await self._execution.run(request, self._timeout_s)


async def _by_class(reward: FunctionReward, samples: list[Sample], sums: list[Sum]) -> list[Outcome]:
    return await reward.post_process(samples, [old.value for old in sums])


def _changed(old: Sum, outcome: Outcome) -> Sum:
    """The sum with its new value. A failure may have been replaced by a value, or the reverse."""
    if outcome.value is None:
        if old.status is not ScoreStatus.OK:
            return old
        return replace(old, status=ScoreStatus.FAILED, value=None, error=NO_SCORE)
    detail = old.detail if not old.error else old.detail | {"replaced_failure": old.error}
    return replace(old, status=ScoreStatus.OK, value=outcome.value, error="", on_failure="", detail=detail)


def _noted(before: Sum, after: Sum) -> Sum:
    return replace(after, components={**after.components, BEFORE_GROUP: before.value})

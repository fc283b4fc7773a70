"""One step: train on groups as they complete, then update once.

Gradients accumulate unnormalised and are divided once at the end, so the result does not depend on the
order in which groups arrived or on how they were split, up to rounding; the exact composition goes into
the commit, and replaying it gives the same weights bit by bit.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from common.errors import TidemillError
from common.messages import Commit
from common.service import ServiceContext
from services.trainer.collector import Collector, StoppedError
from services.trainer.judgement import CompleteGroup, Judge, TrainableGroup
from services.trainer.micro_batches import MicroBatch, form_micro_batches, rebuild
from services.trainer.policy import MicroBatchMetrics, Policy, UpdateResult
from services.trainer.samples import Sample

T = TypeVar("T")

MIN_FILL = 0.5
"""A micro-batch filled less than this waits for more groups, unless the step has no more to come."""


class PolicyThread:
    """Runs the policy's calls one at a time in a thread, so that streams keep flowing meanwhile."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="policy")

    async def call(self, function: Callable[..., T], *args: Any) -> T:
        """Run one call to its end, also when the caller is cancelled."""
        return await asyncio.shield(
            asyncio.get_running_loop().run_in_executor(self._executor, function, *args)
        )


@dataclass(slots=True)
class StepResult:
    """What one step did: groups in order of entry, micro-batches in order of training."""

    groups: list[TrainableGroup] = field(default_factory=list)
    micro_batches: list[MicroBatch] = field(default_factory=list)
    sums: MicroBatchMetrics = field(default_factory=MicroBatchMetrics)
    update: UpdateResult | None = None

    @property
    def samples(self) -> list[Sample]:
        """Every sample of the step."""
        return [sample for group in self.groups for sample in group.samples]


class StepRunner:
    """Trains steps on one policy."""

    def __init__(self, context: ServiceContext, policy: Policy, thread: PolicyThread, judge: Judge) -> None:
        self.context, self.trainer, self.activity = context, context.config.trainer, context.activity
        self.policy, self.thread, self.judge = policy, thread, judge

    async def run(self, step: int, collector: Collector) -> StepResult:
        """Collect and train the groups of `step`, and update the weights.

        Raises:
            StoppedError: the service must stop; nothing of the step is kept.
        """
        result = StepResult()
        waiting: list[Sample] = []
        while len(result.groups) < self.trainer.groups_per_step:
            places = self.trainer.groups_per_step - len(result.groups)
            groups = await collector.take(step, places)
            result.groups += groups
            waiting += [sample for group in groups for sample in group.samples]
            is_last = len(result.groups) == self.trainer.groups_per_step
            batches = form_micro_batches(waiting, self.trainer.micro_batch_tokens)
            waiting = [] if is_last else self._hold_back(batches)
            await self._accumulate(batches, result)
        await self._update(result)
        return result

    async def replay(self, commit: Commit, groups: dict[int, CompleteGroup]) -> StepResult:
        """Train a committed step again from the streams' records, with the recorded composition.

        Raises:
            StoppedError: the service must stop.
            TidemillError: what was trained then cannot be trained now: the config has changed.
        """
        result = StepResult()
        for ticket in commit.groups:
            verdict = self.judge.judge(groups[ticket], commit.step)
            if not isinstance(verdict, TrainableGroup):
                raise TidemillError(
                    f"ticket {ticket} was trained at step {commit.step}, but cannot be trained again: "
                    f"{verdict.reason} ({verdict.detail}). Resume with the config the step was trained with."
                )
            result.groups.append(verdict)
        by_key = {sample.key: sample for sample in result.samples}
        (mini_batch,) = commit.mini_batches  # one optimizer update a step
        await self._accumulate(rebuild(mini_batch, by_key), result)
        await self._update(result)
        return result

    def _hold_back(self, batches: list[MicroBatch]) -> list[Sample]:
        """Take the last micro-batch away while it is nearly empty: more groups are on their way."""
        if batches and batches[-1].num_tokens < MIN_FILL * self.trainer.micro_batch_tokens:
            return list(batches.pop().samples)
        return []

    async def _accumulate(self, batches: Sequence[MicroBatch], result: StepResult) -> None:
        with self.activity.during("train"):
            for batch in batches:
                if self.context.stopping.is_set():
                    raise StoppedError
                result.sums += await self.thread.call(self.policy.accumulate, batch)
                result.micro_batches.append(batch)

    async def _update(self, result: StepResult) -> None:
        with self.activity.during("update"):
            result.update = await self.thread.call(self.policy.update, result.sums.denominator)

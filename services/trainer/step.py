"""One step: train on groups as they complete, in one or several mini-batches with an optimizer update each.

Gradients accumulate unnormalised and are divided once at the end of a mini-batch, so its result depends
neither on the order in which its groups arrived nor on how they were split, up to rounding. A mini-batch
takes groups in the order of arrival; the commit records them with the exact micro-batches, and replaying that
gives the same weights bit by bit.

With several passes the same micro-batches are trained again, in the same order, when the first pass is over;
the commit says how often. With several updates the weights move within the step. The policy of PPO's ratio
stays the one at the start of the step (`Precompute`); the first mini-batch needs nothing for that: its ratio
is 1.
"""

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import structlog
import xxhash

from tidemill.common.config import RunConfig
from tidemill.common.errors import ConfigError, TidemillError
from tidemill.common.process.activity import Activity
from tidemill.common.process.service import StoppedError
from tidemill.common.wire.messages import Commit, Outcome, TrajectoryKey
from tidemill.services.trainer.algorithm.advantages import Advantages
from tidemill.services.trainer.algorithm.losses.sums import Sums
from tidemill.services.trainer.batch.batch_assembler import BatchAssembler, Dropped, Precompute
from tidemill.services.trainer.groups.group import Group
from tidemill.services.trainer.groups.group_filter import GroupFilter
from tidemill.services.trainer.groups.micro_batch import MicroBatch, rebuild
from tidemill.services.trainer.groups.sample import Sample
from tidemill.services.trainer.groups.waiting_samples import WaitingSamples
from tidemill.services.trainer.policy.policy import Policy, PolicyThread, UpdateResult

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class MiniBatch:
    """What one optimizer update was made of: micro-batches in order of training."""

    micro_batches: list[MicroBatch] = field(default_factory=list)
    sums: Sums = field(default_factory=Sums)
    update: UpdateResult | None = None


@dataclass(slots=True)
class StepResult:
    """What one step did: groups in order of entry, mini-batches of the first pass in order of training.

    Example: two mini-batches, gone over twice: `mini_batches` has 2, `repeated` 2, `passes` is 2, and
    `updates` has 4.
    """

    groups: list[Group] = field(default_factory=list)
    mini_batches: list[MiniBatch] = field(default_factory=list)
    repeated: list[MiniBatch] = field(default_factory=list)
    """Mini-batches of later passes: the same again."""
    coefficients: dict[str, float] = field(default_factory=dict)
    """Adaptive coefficients that it was trained with, by name of the metric."""

    @property
    def samples(self) -> list[Sample]:
        return [sample for group in self.groups for sample in group.samples]

    @property
    def sums(self) -> Sums:
        """Sums over all mini-batches of all passes."""
        return sum((mini.sums for mini in self._all), Sums())

    @property
    def updates(self) -> list[UpdateResult]:
        """One for each mini-batch of each pass."""
        return [mini.update for mini in self._all if mini.update is not None]

    @property
    def passes(self) -> int:
        """How often the step went over its mini-batches."""
        return len(self._all) // max(len(self.mini_batches), 1)

    @property
    def _all(self) -> list[MiniBatch]:
        return [*self.mini_batches, *self.repeated]


def make_commit(
    step: int,
    result: StepResult,
    dropped: list[Dropped],
    metrics: dict[str, float],
    digest: str,
    started_at: float,
    outcomes: tuple[Outcome, ...] = (),
    sizes: dict[str, int] | None = None,
    processor: str = "",
) -> Commit:
    """The record of a step that has just updated the weights."""
    left_out = [(group.ticket, index, reason) for group in result.groups for index, reason in group.left_out]
    compositions = []
    keys: list[tuple[int, int]] = []
    for mini in result.mini_batches:
        composition = tuple(batch.keys for batch in mini.micro_batches)
        compositions.append(composition)
        for members in composition:
            keys.extend(members)
    advantages = {}
    for group in result.groups:
        advantages[str(group.ticket)] = [sample.mean_advantage for sample in group.samples]
    return Commit(
        step=step,
        version=step + 1,
        mini_batches=tuple(compositions),
        passes=result.passes,
        groups=tuple(group.ticket for group in result.groups),
        dropped=(*dropped, *left_out),
        advantages=advantages,
        outcomes=outcomes,
        sizes=sizes or {},
        metrics=metrics,
        digest=digest,
        processor=processor,
        samples_digest=samples_digest(keys, {group.ticket: group for group in result.groups}),
        started_at=started_at,
        finished_at=time.time(),
    )


def samples_digest(keys: Sequence[TrajectoryKey], groups: Mapping[int, Group]) -> str:
    """Which tokens, choices and rewards a step was trained on. xxh3-64, 16 hex digits.

    After a loss of Redis the same tickets may be generated again: a replay must not take these samples for
    those that were trained.
    """
    digest = xxhash.xxh3_64()
    for ticket, index in keys:
        group = groups[ticket]
        sample = group.trajectories[index]
        # Workers of an older release score demonstrations too: such a score does not count.
        value = None if group.is_demonstration else group.scores[index].value
        chosen = sample.choices.claim.digest if sample.choices and sample.choices.claim else ""
        digest.update(f"{ticket} {index} {sample.tokens_digest}{chosen} {value!r}\n".encode())
    return digest.hexdigest()


def check_processor(commit: Commit, policy: Policy) -> None:
    """Raises ConfigError: the step was trained on pictures with another processor than the policy has."""
    if commit.processor != policy.processor:
        raise ConfigError(
            f"step {commit.step} was trained with the image processor {commit.processor or '(none)'}, and "
            f"this is {policy.processor or '(none)'}: the same pictures have other pixels. Go on with the "
            "model folder, the section `images` and the release of transformers that the run was started with"
        )


class StepRunner:
    def __init__(
        self,
        config: RunConfig,
        policy: Policy,
        thread: PolicyThread,
        activity: Activity,
        stopping: asyncio.Event | None = None,
    ) -> None:
        """Args:
        config: the run's config.
        policy: the policy that is trained.
        thread: makes the policy's calls.
        activity: the process's activity, which shows where the time goes.
        stopping: set when the process must stop; None: it never must.
        """
        self.trainer = config.trainer
        self.activity = activity
        self.stopping = stopping or asyncio.Event()
        self.policy = policy
        self.thread = thread
        self.group_filter = GroupFilter(config)
        self.group_filter.routing = policy.routing
        self.precompute = Precompute(self.trainer, policy, thread)
        self.advantages = Advantages(config)
        self.algorithm = self.trainer.algorithm
        """The config's section with the coefficients of the current step."""
        self.has_begun = False
        """Whether the weights are within a step: its first update has begun, and it is not finished."""

    async def run(self, step: int, assembler: BatchAssembler) -> StepResult:
        """Train the groups of `step` as they come, with `mini_batches` updates of the weights. A GPU that is
        shared is held from the first call on, and released with the weights. Raises
        StoppedError: the service must stop; nothing of the step may be kept (see `has_begun`)."""
        self.thread.hold()
        result = self._begin()
        arrived: deque[Group] = deque()
        for number in range(self.trainer.mini_batches):
            mini = MiniBatch()
            result.mini_batches.append(mini)
            await self._collect(step, mini, result, arrived, assembler)
            # Before the first update: later mini-batches compare with the weights at the step's start.
            if number == 0 and self.precompute.is_needed:
                await self._precompute_rest(step, result, arrived, assembler)
            await self._update(mini)
        await self._repeat(result, self.trainer.passes)
        await self._finish(result)
        return result

    async def replay(self, commit: Commit, groups: dict[int, Group]) -> StepResult:
        """Train a committed step again from the streams' records, with the recorded composition.

        Raises:
            StoppedError: the service must stop; nothing of the step may be kept (see `has_begun`).
            TidemillError: what was trained then cannot be trained now: the config has changed.
        """
        check_processor(commit, self.policy)
        self.thread.hold()
        result = self._begin()
        later: set[int] = set()
        """Tickets that are trained after the first update."""
        if commit.passes > 1:
            later = set(commit.groups)
        for composition in commit.mini_batches[1:]:
            later |= {ticket for micro in composition for ticket, _ in micro}
        all_groups = [groups[ticket] for ticket in commit.groups]
        for group in all_groups:
            self._select(group, commit.step)
        # All of it before the first update, as above.
        needed = [g for g in all_groups if g.ticket in later or self.precompute.is_needed_always]
        await self._precompute(needed, commit.step)
        result.groups += all_groups
        for number, composition in enumerate(commit.mini_batches):
            mini = MiniBatch()
            result.mini_batches.append(mini)
            tickets = {ticket for micro in composition for ticket, _ in micro}
            # In the order in which they entered, as when they were first trained.
            groups_of_mini = [group for group in result.groups if group.ticket in tickets]
            self._assign(groups_of_mini)
            by_key = {sample.key: sample for group in groups_of_mini for sample in group.samples}
            await self._accumulate(rebuild(composition, by_key, is_at_start=number == 0), mini)
            await self._update(mini)
        await self._repeat(result, commit.passes)
        await self._finish(result)
        return result

    async def _repeat(self, result: StepResult, passes: int) -> None:
        """Train the mini-batches of the first pass again, with the logprobs of the step's start."""
        samples = {sample.key: sample for sample in result.samples}
        for first in result.mini_batches * (passes - 1):
            mini = MiniBatch()
            result.repeated.append(mini)
            await self._accumulate(rebuild([batch.keys for batch in first.micro_batches], samples), mini)
            await self._update(mini)

    def _select(self, group: Group, step: int) -> None:
        """Fill in the samples of a group that `step` was trained on."""
        refusal = self.group_filter.select(group)
        if refusal is not None:
            raise TidemillError(
                f"ticket {group.ticket} was trained at step {step}, but cannot be trained again: "
                f"{refusal.reason} ({refusal.detail}). Resume with the config the step was trained with."
            )

    async def _collect(
        self,
        step: int,
        mini: MiniBatch,
        result: StepResult,
        arrived: deque[Group],
        assembler: BatchAssembler,
    ) -> None:
        """Fill one mini-batch with the next groups to arrive, and train them as they come. `arrived` are
        groups of the step that are in no mini-batch yet."""
        is_first = len(result.mini_batches) == 1
        # What each group is trained with may depend on those that are still to come.
        needs_all = self.advantages.scope == "batch" or self.algorithm.needs_statistics
        waiting = WaitingSamples(self.policy.bins, self.policy.layout, is_at_start=is_first)
        unassigned: list[Group] = []
        num_missing = self.trainer.groups_per_step // self.trainer.mini_batches
        while num_missing:
            if not arrived:
                num_of_step = len(result.groups) + len(unassigned)
                arrived += await assembler.take(step, self.trainer.groups_per_step - num_of_step)
            groups = [arrived.popleft() for _ in range(min(num_missing, len(arrived)))]
            if not is_first or self.precompute.is_needed_always:
                await self._precompute(groups, step)
            num_missing -= len(groups)
            unassigned += groups
            if num_missing and needs_all:
                continue
            self._assign(unassigned)
            result.groups += unassigned
            samples = [sample for group in unassigned for sample in group.samples]
            unassigned = []
            batches = waiting.take_full(samples) if num_missing else waiting.take_last(samples)
            await self._accumulate(batches, mini)

    def _assign(self, groups: Sequence[Group]) -> None:
        """Fill in advantages, and what a mini-batch's statistics say; demonstrations have neither."""
        sampled = [group for group in groups if not group.is_demonstration]
        if sampled:
            self.advantages.assign(sampled, self.algorithm)
            if self.algorithm.needs_statistics:
                from tidemill.services.trainer.algorithm.losses.mini_batch import fill_statistics

                fill_statistics(sampled, self.algorithm)

    async def _precompute_rest(
        self, step: int, result: StepResult, arrived: deque[Group], assembler: BatchAssembler
    ) -> None:
        """Before the weights move: precompute for groups that have arrived; for others, keep the weights."""
        await self._precompute(arrived, step)
        missing = self.trainer.groups_per_step - len(result.groups) - len(arrived)
        if missing:
            while not self.stopping.is_set() and await assembler.precompute_waiting(step, missing):
                pass
            if self.precompute.needs_start_weights:
                await self.thread.call(self.policy.hold_weights)

    async def _precompute(self, groups: Iterable[Group], step: int) -> None:
        """Fill in what the groups' samples need to be trained after the weights have moved."""
        waiting = [group for group in groups if not self.precompute.is_ready(group, step)]
        while waiting:
            with self.activity.during("prepare"):
                num_computed = await self.precompute.compute(waiting, step)
            waiting = waiting[num_computed:]

    async def _accumulate(self, batches: Sequence[MicroBatch], mini: MiniBatch) -> None:
        if not batches:
            return
        with self.activity.during("train"):
            for batch in batches:
                if self.stopping.is_set():
                    raise StoppedError
                mini.sums += await self.thread.call(self.policy.accumulate, batch)
                mini.micro_batches.append(batch)

    async def _update(self, mini: MiniBatch) -> None:
        # Before the call: an update that is cut off leaves weights that belong to no version.
        self.has_begun = True
        with self.activity.during("update"):
            mini.update = await self.thread.call(self.policy.update, mini.sums.denominator)
        if mini.update.skipped:
            log.warning("update skipped, the weights are as they were", reason=mini.update.reason)

    def _begin(self) -> StepResult:
        if not self.algorithm.is_adaptive:
            return StepResult()
        from tidemill.services.trainer.algorithm.coefficients import coefficient_metrics

        self.algorithm = self.policy.coefficients().applied(self.trainer.algorithm)
        return StepResult(coefficients=coefficient_metrics(self.algorithm))

    async def _finish(self, result: StepResult) -> None:
        await self.thread.call(self.policy.release_weights)
        sums = result.sums
        tokens = sums.sampled_tokens
        if self.algorithm.is_adaptive and tokens:
            kl = sums.kl_sum / tokens
            entropy = sums.entropy_sum / tokens
            # Demonstrations are in neither mean.
            num_sampled = sum(not sample.imitation for sample in result.samples)
            await self.thread.call(self.policy.adapt, kl, entropy, float(num_sampled))
        self.has_begun = False

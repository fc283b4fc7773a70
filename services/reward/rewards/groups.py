"""Scores whole groups: results of samples gather in Redis, and the worker of the last one finishes the group.

Exactly once, also when that worker dies in the middle: the last trajectory stays pending until one script
publishes all scores and acknowledges it. The next worker that takes it finds the results in Redis, pays for
nothing again, and repeats the group functions only. Redis has each trajectory once: results refer to it.
"""

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import structlog
from pydantic import Field

from tidemill.common.config import RewardConfig, RewardLimits
from tidemill.common.errors import LeaseLostError
from tidemill.common.process.failures import POST_PROCESSING, Failure, FailureLog
from tidemill.common.process.service import ServiceContext
from tidemill.common.streams import Delivery
from tidemill.common.streams.consumer import Consumer
from tidemill.common.streams.references import Reference, read_trajectories
from tidemill.common.telemetry import metrics
from tidemill.common.wire.codec import decode_payload
from tidemill.common.wire.messages import Lane, Message, Score, ScoreStatus, Trajectory
from tidemill.services.reward.attempts import attempt
from tidemill.services.reward.functions.pool import Execution
from tidemill.services.reward.functions.request import Request
from tidemill.services.reward.functions.reward_function import load_group_function
from tidemill.services.reward.outcome import AttemptError, RewardOutcome
from tidemill.services.reward.rewards.reward import FunctionReward
from tidemill.services.reward.rewards.weighted_sum import NamedReward, Outcomes, WeightedSum, score_of
from tidemill.services.reward.sample import RewardSample

if TYPE_CHECKING:
    from tidemill.services.reward.pictures import PictureReader

log = structlog.get_logger(__name__)

GROUP = "group"
"""Name of post-processing in the counts of failures."""
BEFORE_GROUP = "before_group"
"""Component: the reward before post-processing."""
REPLACED = "replaced_failure"
"""Detail: why a reward had failed that post-processing has replaced by a value."""
GONE = (
    "{} of the {} trajectories of its group are no longer in Redis, or have lost their payloads: they were "
    "trimmed before the group was scored as a whole, which happens where nobody waits for its scores any more"
)
"""Error of a group that cannot be scored as a whole."""
GROUP_FUNCTION = "group function"
"""What `reward.group` is called in messages."""


class GroupResult(Message):
    """The outcome of each reward that scores samples one by one, and which trajectory it is of.

    Example: `{entry_id: "1764350000000-3", tokens_digest: "8f0c...", outcomes: {"gsm8k": {"value": 1.0}}}`.
    """

    kind: ClassVar[str] = "group result"
    outcomes: dict[str, RewardOutcome]
    entry_id: str = Field("", description="of the trajectory, in its stream")
    tokens_digest: str = Field("", description="of the trajectory")
    trajectory: bytes = Field(b"", description="the trajectory itself, in results of older releases")
    worker: str = ""
    latency_s: float = 0.0


class GroupScoring:
    """Scores the trajectories of a lane whose groups are scored as a whole."""

    def __init__(
        self,
        consumer: Consumer[Trajectory],
        context: ServiceContext,
        lane: Lane,
        reward: WeightedSum,
        post_processing: "PostProcessing",
        on_published: Callable[[Lane, Score], None],
    ) -> None:
        """`on_published` hears of each score that was published."""
        self._consumer = consumer
        self._keys = context.keys
        self._worker = context.name
        self._lane = lane
        self._broker = context.broker
        self._reward = reward
        self._post_processing = post_processing
        self._on_published = on_published
        # Evaluation is never post-processed.
        self._is_post_processed = lane is Lane.TRAIN and post_processing.is_any
        self.is_needed = reward.has_group_rewards or self._is_post_processed

    async def score_in_group(
        self, delivery: Delivery[Trajectory], score: Callable[[RewardSample], Awaitable[Outcomes]]
    ) -> None:
        """Score one trajectory by `score` and keep the result. With the last one, finish the group and
        publish all its scores.

        A lost lease is no error: another worker has the trajectory then.
        """
        started = time.monotonic()
        sample = RewardSample(delivery.message, self._lane)
        ticket = sample.key[0]
        key = self._keys.results(ticket, self._lane)
        tickets = self._keys.result_tickets(self._lane)
        result = None
        if not await self._consumer.has_result(key, sample.key[1]):
            result = GroupResult(
                outcomes=await score(sample),
                entry_id=delivery.entry_id,
                tokens_digest=sample.trajectory.tokens_digest,
                worker=self._worker,
                latency_s=time.monotonic() - started,
            )
        try:
            # Stored before the group is finished: a worker that takes over finds it, and does not score.
            payloads = await self._consumer.store_result(delivery, key, tickets, result)
            if payloads is not None:
                scores = await self._finish(delivery, payloads)
                await self._consumer.publish_group(delivery, self._keys.scores(self._lane), key, scores)
                metrics.GROUPS_POST_PROCESSED.labels(self._lane).inc()
                for group_score in scores:
                    self._on_published(self._lane, group_score)
        except LeaseLostError:
            return

    async def _finish(self, delivery: Delivery[Trajectory], payloads: Sequence[bytes]) -> list[Score]:
        results = [decode_payload(payload, GroupResult) for payload in payloads]
        trajectories = await self._trajectories(delivery, results)
        num_missing = trajectories.count(None)
        if num_missing:
            return self._failed(delivery.message.ticket, results, num_missing)
        samples = [RewardSample(each, self._lane) for each in trajectories if each is not None]
        group_outcomes = await self._reward.score_group(samples)
        outcomes = []
        for result, of_group_rewards in zip(results, group_outcomes, strict=True):
            outcomes.append(result.outcomes | of_group_rewards)
        if self._is_post_processed:
            sums = await self._post_processing.run(samples, outcomes)
        else:
            sums = [self._reward.sum_up(by_name) for by_name in outcomes]
        return [
            score_of(total, sample, result.worker, result.latency_s)
            for sample, total, result in zip(samples, sums, results, strict=True)
        ]

    async def _trajectories(
        self, last: Delivery[Trajectory], results: Sequence[GroupResult]
    ) -> list[Trajectory | None]:
        """The trajectories of the results, in their order; None where there is none any more."""
        references = {
            index: Reference(result.entry_id, (last.message.ticket, index), result.tokens_digest)
            for index, result in enumerate(results)
            if not result.trajectory and result.entry_id != last.entry_id
        }
        stream = self._keys.trajectories(self._lane)
        read = await read_trajectories(self._broker, stream, list(references.values()))
        trajectories: list[Trajectory | None] = []
        for index, result in enumerate(results):
            if result.trajectory:
                trajectories.append(decode_payload(result.trajectory, Trajectory))
            elif result.entry_id == last.entry_id:
                trajectories.append(last.message)
            else:
                trajectories.append(read.get(references[index]))
        return trajectories

    def _failed(self, ticket: int, results: Sequence[GroupResult], num_missing: int) -> list[Score]:
        """Scores of a group that nobody can score as a whole any more."""
        log.warning("trajectories of a group are gone; its scores fail", ticket=ticket, missing=num_missing)
        return [
            Score(
                ticket=ticket,
                index=index,
                tokens_digest=result.tokens_digest,
                status=ScoreStatus.FAILED,
                error=GONE.format(num_missing, len(results)),
                worker=result.worker,
                latency_s=result.latency_s,
            )
            for index, result in enumerate(results)
        ]


class PostProcessing:
    """Changes the rewards of a group, in order: each reward class its own scores, then `reward.group` their
    sums."""

    def __init__(
        self, config: RewardConfig, reward: WeightedSum, pictures: "PictureReader | None" = None
    ) -> None:
        self._reward = reward
        self._pictures: PictureReader | None = None
        """For a function of groups that takes pictures."""
        self._limits: RewardLimits = config
        """Limits of `reward.group`: those of the whole section."""
        self._classes = [
            (named, named.reward)
            for named in reward.rewards
            if isinstance(named.reward, FunctionReward) and named.reward.function.post_process is not None
        ]
        """Reward classes with `post_process_scores`."""
        self._execution: Execution | None = None
        self.failures: Counter[str] = Counter()
        """Groups whose post-processing failed for good, by kind of failure."""
        self.log = FailureLog()
        """Failed attempts at it, by cause."""
        if config.group:
            function = load_group_function(config.group, config.group_kwargs, pictures is not None)
            self._execution = Execution(function, config.processes)
            if function.takes_pictures:
                self._pictures = pictures

    @property
    def is_any(self) -> bool:
        return bool(self._classes or self._execution)

    async def run(self, samples: list[RewardSample], outcomes: list[Outcomes]) -> list[RewardOutcome]:
        """The sum of each sample's rewards after post-processing; its component `before_group` has the sum
        before."""
        before = [self._reward.sum_up(by_name) for by_name in outcomes]
        for named, reward in self._classes:
            if named.applies_to(samples[0]):  # all samples of a group are of one data source
                outcomes = await self._apply_class(named, reward, samples, outcomes)
        sums = [self._reward.sum_up(by_name) for by_name in outcomes]
        if self._execution is not None:
            sums = await self._apply_function(self._execution, samples, sums)
        return [_with_former(new, old) for old, new in zip(before, sums, strict=True)]

    async def _apply_class(
        self,
        named: NamedReward,
        reward: FunctionReward,
        samples: list[RewardSample],
        outcomes: list[Outcomes],
    ) -> list[Outcomes]:
        """Have a class change its own outcomes by `post_process_scores`; those of other rewards stay."""
        column = [by_name[named.name] for by_name in outcomes]
        scores = [outcome.value for outcome in column]
        subject = f"post_process_scores of reward {named.name}"
        step = partial(reward.post_process, samples, scores)
        processed = await self._outcomes(subject, named.config, step, len(samples))
        changed: list[Outcomes] = []
        for by_name, old, new in zip(outcomes, column, processed, strict=True):
            changed.append({**by_name, named.name: _with_former(_changed(old, new, subject), old)})
        return changed

    async def _apply_function(
        self, execution: Execution, samples: list[RewardSample], sums: list[RewardOutcome]
    ) -> list[RewardOutcome]:
        """Have the function of `reward.group` change the sums."""
        scores = [total.value for total in sums]
        notes: list[dict[str, Any]] = []
        for total in sums:
            notes.append({
                "score": total.value,
                "status": total.status.value,
                "error": total.error,
                "components": total.components,
            })  # fmt: skip
        step = partial(self._call, execution, samples, scores, notes)
        processed = await self._outcomes(GROUP_FUNCTION, self._limits, step, len(samples))
        return [_changed(old, new, GROUP_FUNCTION) for old, new in zip(sums, processed, strict=True)]

    async def _call(
        self,
        execution: Execution,
        samples: list[RewardSample],
        scores: list[float | None],
        notes: list[dict[str, Any]],
    ) -> list[RewardOutcome]:
        if self._pictures is not None:
            samples = [await self._pictures.with_pictures(sample) for sample in samples]
        return await execution.run(Request(samples, scores=scores, notes=notes), self._limits.timeout_s)

    def failures_by_name(self) -> dict[str, int]:
        """`group:<kind>` -> number of groups whose post-processing failed."""
        return {f"{GROUP}:{kind}": count for kind, count in self.failures.items()}

    @property
    def deaths(self) -> list[Failure]:
        """Processes of `reward.group` that died and failed no attempt, by cause."""
        return [] if self._execution is None else self._execution.deaths(f"a process of the {GROUP_FUNCTION}")

    @property
    def notes(self) -> list[str]:
        """Texts for the heartbeat about what is wrong with the processes of `reward.group`."""
        return [] if self._execution is None else self._execution.notes

    async def close(self) -> None:
        if self._execution is not None:
            await self._execution.close()

    async def _outcomes(
        self,
        subject: str,
        limits: RewardLimits,
        step: Callable[[], Awaitable[list[RewardOutcome]]],
        count: int,
    ) -> list[RewardOutcome]:
        """Run a step over the group: one outcome for each sample, or the same failure for all. `subject` is
        what people read that it is."""

        def note(failure: AttemptError) -> None:
            self.log.note(subject, failure.kind, str(failure))

        try:
            outcomes, _ = await attempt(GROUP, limits, step, note)
        except AttemptError as failure:
            self.failures[failure.kind] += 1
            metrics.REWARD_FAILURES.labels(GROUP, failure.kind).inc()
            failed = RewardOutcome.failed(failure)
            return [replace(failed, error=f"{POST_PROCESSING}: {failed.error}", tries=[])] * count
        return outcomes


def _changed(old: RewardOutcome, new: RewardOutcome, subject: str) -> RewardOutcome:
    """The outcome or sum `old` with what the `subject` made of it.

    | old | new | result |
    |---|---|---|
    | any | failed | the failure of `new` |
    | a value | None | a failure: the subject gave this sample no score |
    | a failure | None | the failure of `old` |
    | any | a value | the value; the detail keeps why `old` had failed |
    """
    if not new.is_ok:
        return replace(
            old,
            status=new.status,
            value=None,
            error=new.error,
            kind=new.kind,
            is_code_error=new.is_code_error,
        )
    if new.value is None:
        if not old.is_ok:
            return old
        no_score = f"the {subject} returned None for this sample"
        return replace(old, status=ScoreStatus.FAILED, value=None, error=no_score)
    detail = old.detail if not old.error else old.detail | {REPLACED: old.error}
    return replace(
        old,
        status=ScoreStatus.OK,
        value=new.value,
        detail=detail,
        error="",
        kind="",
        on_failure="",
        is_code_error=False,
    )


def _with_former(new: RewardOutcome, old: RewardOutcome) -> RewardOutcome:
    """The outcome with a component that tells the value before post-processing."""
    return replace(new, components={**new.components, BEFORE_GROUP: old.value})

"""Scores a group as a whole: the results of its samples gather in Redis, whoever brings the last finishes.

Exactly once, also when that worker dies in the middle: the last trajectory stays pending until one script
publishes all scores and acknowledges it. Whoever takes it over finds the results in Redis, pays for nothing
again, and repeats the group functions only.
"""

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, replace
from typing import Any, ClassVar, cast

from pydantic import Field

from tidemill.common.errors import LeaseLostError
from tidemill.common.process.service import ServiceContext
from tidemill.common.streams import Consumer, Delivery
from tidemill.common.telemetry import metrics
from tidemill.common.wire import codec
from tidemill.common.wire.arrays import BitArray, Int32Array
from tidemill.common.wire.codec import PAYLOAD_FIELD, SCHEMA, VERSION_FIELD
from tidemill.common.wire.messages import Lane, Message, Score, Trajectory
from tidemill.services.reward.outcome import RewardOutcome
from tidemill.services.reward.rewards.post_processing import PostProcessing
from tidemill.services.reward.rewards.weighted_sum import Parts, WeightedSum, score_of
from tidemill.services.reward.sample import RewardSample, SessionFacts


class GroupResult(Message):
    """The parts of one sample with what group functions see of it. The prompt is the same for the group,
    except for what an environment adds to it."""

    kind: ClassVar[str] = "group result"
    index: int = Field(ge=0)
    text: str
    completion_ids: Int32Array
    prompt_ids: Int32Array | None = Field(None, description="of a session; absent: those of the group")
    session: dict[str, Any] | None = None
    loss_mask: BitArray | None = None
    parts: dict[str, dict[str, Any]]
    worker: str = ""
    latency_s: float = 0.0
    tokens_digest: str = ""

    @classmethod
    def of(cls, sample: RewardSample, parts: Parts, worker: str, latency_s: float) -> "GroupResult":
        """The result of a sample."""
        return cls(
            index=sample.key[1],
            text=sample.solution_str,
            completion_ids=sample.completion_ids,
            prompt_ids=None if sample.session is None else sample.prompt_ids,
            session=cast(dict[str, Any] | None, sample.session),
            loss_mask=sample.loss_mask,
            parts={name: asdict(part) for name, part in parts.items()},
            worker=worker,
            latency_s=latency_s,
            tokens_digest=sample.tokens_digest,
        )

    def sample(self, last: RewardSample) -> RewardSample:
        """The sample it is of, by another one of its group."""
        return replace(
            last,
            key=(last.key[0], self.index),
            solution_str=self.text,
            prompt_ids=last.prompt_ids if self.prompt_ids is None else self.prompt_ids,
            completion_ids=self.completion_ids,
            session=cast(SessionFacts | None, self.session),
            loss_mask=self.loss_mask,
            tokens_digest=self.tokens_digest,
        )


class GroupScoring:
    """The way of a trajectory through a lane whose groups are scored as a whole."""

    def __init__(
        self,
        consumer: Consumer[Trajectory],
        context: ServiceContext,
        lane: Lane,
        reward: WeightedSum,
        post_processing: PostProcessing,
        published: Callable[[Lane, Score], None],
    ) -> None:
        self._consumer, self._keys, self._worker, self._lane = consumer, context.keys, context.name, lane
        self._reward, self._post_processing, self._published = reward, post_processing, published

    @property
    def is_needed(self) -> bool:
        """Whether this lane's groups are scored as a whole. Evaluation is never post-processed."""
        return self._reward.has_group_rewards or (self._lane is Lane.TRAIN and self._post_processing.is_any)

    async def bring(
        self, delivery: Delivery[Trajectory], score: Callable[[RewardSample], Awaitable[Parts]]
    ) -> None:
        """Score one trajectory by `score`, and the whole group if it is the last.

        A lost lease is no error: another worker has the trajectory then.
        """
        started = time.monotonic()
        sample = RewardSample.from_trajectory(delivery.message, self._lane)
        ticket = sample.key[0]
        key, tickets = self._keys.results(ticket, self._lane), self._keys.result_tickets(self._lane)
        result = None
        if not await self._consumer.has_result(key, sample.key[1]):
            parts = await score(sample)
            result = GroupResult.of(sample, parts, self._worker, time.monotonic() - started)
        try:
            payloads = await self._consumer.store_result(delivery, key, tickets, result)
            if payloads is not None:
                scores = await self._finish(sample, payloads)
                await self._consumer.publish_group(delivery, self._keys.scores(self._lane), key, scores)
                metrics.GROUPS_POST_PROCESSED.labels(self._lane).inc()
                for made in scores:
                    self._published(self._lane, made)
        except LeaseLostError:
            return

    async def _finish(self, last: RewardSample, payloads: Sequence[bytes]) -> list[Score]:
        """The final scores of a group, by index."""
        results = [
            codec.decode({VERSION_FIELD: SCHEMA, PAYLOAD_FIELD: payload}, GroupResult) for payload in payloads
        ]
        samples = [result.sample(last) for result in results]
        together = await self._reward.score_group(samples)
        parts: list[Parts] = [
            {name: RewardOutcome(**part) for name, part in result.parts.items()} | more
            for result, more in zip(results, together, strict=True)
        ]
        if self._lane is Lane.TRAIN and self._post_processing.is_any:
            sums = await self._post_processing.run(samples, parts)
        else:
            sums = [self._reward.sum_up(part) for part in parts]
        return [
            score_of(total, sample, result.worker, result.latency_s)
            for sample, total, result in zip(samples, sums, results, strict=True)
        ]

"""One ticket's group: generate what is missing, publish each sample as it finishes.

Guarantees: no sample starts before the engine holds the ticket's `min_version`, nor an older version than
the one at which the group was first started; after a takeover only the missing indices are generated;
every published sample was generated under a lease that still held when it was published.
"""

import asyncio
import time

from common import metrics
from common.broker import Broker
from common.keys import Keys
from common.messages import Lane, Ticket, Trajectory
from common.streams import Consumer, Delivery
from services.rollout.engine import Engine, GenerationRequest
from services.rollout.follower import WeightFollower
from services.rollout.sample_counts import SampleCounts

VERSION_FIELD = "version"
"""Field of the progress hash that holds the version at which the group was started."""


class GroupGenerator:
    """Generates groups of one lane with one engine."""

    def __init__(
        self,
        broker: Broker,
        keys: Keys,
        lane: Lane,
        consumer: Consumer[Ticket],
        engine: Engine,
        follower: WeightFollower,
        worker: str,
    ) -> None:
        self.broker, self.keys, self.lane = broker, keys, lane
        self.consumer, self.engine, self.follower = consumer, engine, follower
        self.worker = worker
        self.counts = SampleCounts(lane)
        self.num_published = 0
        self.num_wanted = 0
        """Samples that were asked of the engine and are not there yet."""

    async def generate(self, delivery: Delivery[Ticket]) -> None:
        """Generate and publish the group's missing samples.

        Raises:
            LeaseLostError: another worker has taken the ticket over.
            ValueError: the engine refuses the prompt.
        """
        ticket = delivery.message
        done, started_version = await self._read_progress(ticket.ticket)
        version = await self.follower.reach(max(ticket.min_version, started_version))
        metrics.STAGE_SECONDS.labels("ticket").observe(max(0.0, time.time() - ticket.issued_at))
        if started_version < 0:
            # Not over the version of a worker that took the group over meanwhile and started it earlier.
            progress = self.keys.progress(ticket.ticket, self.lane)
            await self.broker.execute("HSETNX", progress, VERSION_FIELD, version)
        async with asyncio.TaskGroup() as samples:
            for index in sorted(set(range(ticket.group_size)) - done):
                samples.create_task(self._generate_sample(delivery, index))

    async def forget(self, ticket: int) -> None:
        """Remove the progress of a group that will never be complete."""
        await self.broker.execute("DEL", self.keys.progress(ticket, self.lane))

    async def _generate_sample(self, delivery: Delivery[Ticket], index: int) -> None:
        ticket, started_at = delivery.message, time.time()
        request_id = f"{self.lane}-{ticket.ticket}-{index}-{delivery.attempts}"
        request = GenerationRequest(
            request_id, ticket.prompt_ids.tolist(), ticket.sampling, is_urgent=self.lane is Lane.EVAL
        )
        self.num_wanted += 1
        try:
            generation = await self.engine.generate(request)
        finally:
            self.num_wanted -= 1
        sample = Trajectory(
            ticket=ticket.ticket,
            index=index,
            step=ticket.step,
            group_size=ticket.group_size,
            prompt_ids=ticket.prompt_ids,
            prompt_text=ticket.prompt_text,
            own_text=ticket.own_text,
            data_source=ticket.data_source,
            ground_truth=ticket.ground_truth,
            extra=ticket.extra,
            completion_ids=generation.token_ids,
            logprobs=generation.logprobs,
            spans=generation.spans,
            finish=generation.finish,
            text=self.engine.decode(generation.token_ids),
            worker=self.worker,
            started_at=started_at,
            finished_at=time.time(),
        )
        await self.consumer.publish_sample(
            delivery, self.keys.trajectories(self.lane), self.keys.progress(ticket.ticket, self.lane), sample
        )
        self.num_published += 1
        self.counts.observe(sample)

    async def _read_progress(self, ticket: int) -> tuple[set[int], int]:
        """Indices already published, and the version at which the group was started (-1: not yet)."""
        raw = await self.broker.execute("HGETALL", self.keys.progress(ticket, self.lane))
        fields = dict(zip(raw[::2], raw[1::2], strict=True))
        version = int(fields.pop(VERSION_FIELD.encode(), -1))
        return {int(index) for index in fields}, version

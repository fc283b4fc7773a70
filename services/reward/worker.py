"""The reward worker: takes trajectories from the consumer group, publishes one score for each.

Two lanes, each with its own stream, loop and slots, so that evaluation never waits behind training. A lane
fetches only what it has free slots for; a slot is freed when a score is published, when the lease is lost,
or when the trajectory is buried. An error that nobody expected ends the whole process, never one lane alone.
"""

import asyncio
from collections.abc import Callable, Sequence

import structlog

from common.process.service import ServiceContext
from common.streams import Consumer, Delivery, Garbled
from common.telemetry import metrics
from common.wire.keys import REWARD_GROUP
from common.wire.messages import DeadLetter, Lane, Score, Trajectory
from services.reward.functions.processes.capacity import Capacity
from services.reward.groups.group_functions import PostProcessing
from services.reward.groups.grouping import GroupScoring
from services.reward.quarantine import Quarantine
from services.reward.results.publisher import Publisher
from services.reward.rewards.dependencies import RewardServices
from services.reward.rewards.weighted_sum import make_hybrid
from services.reward.scorer import Scorer
from services.reward.worker_metrics import Tally

log = structlog.get_logger(__name__)

BLOCK_S = 0.5
"""Longest wait for new trajectories; a stop is noticed no later than this."""


async def serve(context: ServiceContext) -> None:
    """Score the trajectories of a run until asked to stop."""
    config = context.config.reward
    services = RewardServices.of(context)
    reward = make_hybrid(config, services)
    capacity = Capacity(config, reward)
    scorer = Scorer(reward, config, context.name, context.config.seed)
    post_processing = PostProcessing(config, reward)
    tally = Tally(
        context.activity,
        lambda: reward.failures() | post_processing.failures_by_name(),
        capacity.parallel,
    )
    context.reporters += [tally.report, capacity.report]
    quarantine = Quarantine(context)
    try:
        async with asyncio.TaskGroup() as lanes:
            for lane in (Lane.EVAL, Lane.TRAIN):
                worker = RewardLane(context, lane, scorer, tally, capacity.slots, post_processing, quarantine)
                lanes.create_task(worker.run(), name=f"lane {lane}")
    finally:
        await post_processing.close()
        await reward.close()
        await services.close()


class RewardLane:
    """One lane of a worker."""

    def __init__(
        self,
        context: ServiceContext,
        lane: Lane,
        scorer: Scorer,
        tally: Tally,
        slots: int | Callable[[], int],
        post_processing: PostProcessing,
        quarantine: Quarantine | None = None,
    ) -> None:
        self.context, self.lane, self.scorer, self.tally = context, lane, scorer, tally
        self.keys, self.config = context.keys, context.config
        self.consumer = Consumer(
            context.broker,
            self.keys.trajectories(lane),
            REWARD_GROUP,
            context.consumer_name,
            Trajectory,
            lease_s=self.config.streams.lease_s,
            dead_key=self.keys.dead,
            label=self.keys.name_of(self.keys.trajectories(lane)),
            max_bytes=self.config.streams.max_message_mb << 20,
            stand_in=context.stand_in,
        )
        self.groups = GroupScoring(
            self.consumer,
            self.keys,
            lane,
            scorer.reward,
            post_processing,
            context.name,
            lambda score: tally.published(lane, score),
        )
        self.publisher = Publisher(self.consumer, self.keys.scores(lane), self._settle)
        self.scoring: set[asyncio.Task[Score | None]] = set()
        self.slots = slots if callable(slots) else lambda: slots
        self.num_held = 0
        metrics.SCORE_SLOTS.labels(lane).set_function(self.slots)
        self.slot_freed = asyncio.Event()
        self.quarantine = quarantine or Quarantine(context)
        self._tasks = asyncio.TaskGroup()

    async def run(self) -> None:
        """Fetch and score until the service stops, then finish or hand back what is held."""
        async with self.consumer, self._tasks:
            publishing = self._tasks.create_task(self.publisher.run(), name=f"publish {self.lane}")
            while not self.context.stopping.is_set():
                free = self.slots() - self.num_held
                if free <= 0:
                    self.slot_freed.clear()
                    await self.context.unless_stopping(self.slot_freed.wait())
                    continue
                await self.quarantine.until_open()
                # Not cancelled by a stop: what a broken-off call was given would stay pending until its
                # lease expires.
                await self._accept(await self.consumer.fetch(free, BLOCK_S))
            await self._drain()
            publishing.cancel()

    async def _accept(self, entries: Sequence[Delivery[Trajectory] | Garbled]) -> None:
        """Score what can be scored, and see to the rest."""
        trusted: list[Delivery[Trajectory]] = []
        suspects: list[Delivery[Trajectory]] = []
        for entry in entries:
            if isinstance(entry, Garbled) or self.quarantine.is_worn_out(entry):
                await self._bury(entry)
            else:
                (suspects if self.quarantine.is_suspect(entry) else trusted).append(entry)
        await self.quarantine.admit(self.consumer, trusted)
        for delivery in trusted:
            if not delivery.lost.is_set():
                self.start(delivery)
        if suspects:
            await self.quarantine.work_off(self, suspects)

    def start(self, delivery: Delivery[Trajectory]) -> None:
        """Begin to score a trajectory that is held."""
        self.num_held += 1
        self.quarantine.began()
        self.tally.took(self.lane)
        task = self._tasks.create_task(self._score(delivery))
        self.scoring.add(task)
        # Another worker has the trajectory then: what was begun here is worth nothing any more.
        delivery.on_lost = task.cancel
        task.add_done_callback(lambda _: self._finish(delivery, task))

    async def _score(self, delivery: Delivery[Trajectory]) -> Score | None:
        """The score to publish; None where it was published with its group, or will be."""
        if not self.groups.is_needed:
            return await self.scorer.score(delivery.message, self.lane)
        await self.groups.bring(delivery, self.scorer.parts)
        return None

    def _finish(self, delivery: Delivery[Trajectory], task: asyncio.Task[Score | None]) -> None:
        """A callback and not the end of a coroutine: a task cancelled early would never get there."""
        self.scoring.discard(task)
        if task.cancelled() or task.exception() is not None or (score := task.result()) is None:
            self.tally.let_go(self.lane)
            self._free_slot()
        else:
            self.tally.scored()
            self.publisher.put(delivery, score)

    def _settle(self, _: Delivery[Trajectory], score: Score, is_published: bool) -> None:
        self.tally.settled(self.lane)
        self._free_slot()
        if is_published:
            self.tally.published(self.lane, score)

    def _free_slot(self) -> None:
        self.num_held -= 1
        self.quarantine.ended()
        self.slot_freed.set()

    async def _bury(self, entry: Delivery[Trajectory] | Garbled) -> None:
        """Put an entry that can never be scored into the dead-letter stream, and go on."""
        letter = DeadLetter(
            origin=self.keys.name_of(self.consumer.key),
            entry_id=entry.entry_id,
            fields={name.decode(errors="replace"): value for name, value in entry.fields.items()},
            error=entry.error if isinstance(entry, Garbled) else self._worn_out(entry),
            attempts=1 if isinstance(entry, Garbled) else entry.attempts - 1,
            ticket=-1 if isinstance(entry, Garbled) else entry.message.ticket,
            index=-1 if isinstance(entry, Garbled) else entry.message.index,
            worker=self.context.name,
        )
        if await self.consumer.bury(entry, letter):
            log.error("buried a trajectory", entry=entry.entry_id, stream=letter.origin, error=letter.error)

    def _worn_out(self, delivery: Delivery[Trajectory]) -> str:
        return (
            f"delivered {delivery.attempts - 1} times without a score; each worker that took it died or lost "
            "its lease, in the end with nothing else in flight "
            f"(streams.max_attempts is {self.config.streams.max_attempts})"
        )

    async def _drain(self) -> None:
        """Finish what is in flight within the grace period, hand back the rest, and leave the group."""
        if self.scoring:
            log.info("draining", lane=self.lane.value, in_flight=len(self.scoring))
            _, late = await asyncio.wait(self.scoring, timeout=self.config.reward.drain_s)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)
                log.info("handing back", lane=self.lane.value, count=len(late))
        await self.publisher.flush()
        await self.consumer.leave()

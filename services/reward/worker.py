"""The reward worker: takes trajectories from the consumer group, publishes one score for each.

Invariant: every trajectory gets a score with a status. Only `ok` has a value; a failure is never a zero.
Two lanes, each with its own stream, loop and slots, so that evaluation never waits behind training. A slot is
freed when a score is published, when the lease is lost, or when the trajectory is buried.
"""

import asyncio
import random
import time
from collections.abc import Callable

from tidemill.common.config import RewardConfig
from tidemill.common.process.service import ServiceContext
from tidemill.common.streams import Consumer, Delivery, Garbled
from tidemill.common.streams.lane_worker import LaneWorker
from tidemill.common.telemetry import metrics
from tidemill.common.wire.keys import REWARD_GROUP
from tidemill.common.wire.messages import Lane, Score, ScoreStatus, Trajectory, fault_of
from tidemill.services.reward.quarantine import Quarantine
from tidemill.services.reward.remote.dependencies import RewardDependencies
from tidemill.services.reward.rewards.group_scoring import GroupScoring
from tidemill.services.reward.rewards.post_processing import PostProcessing
from tidemill.services.reward.rewards.weighted_sum import (
    Parts,
    WeightedSum,
    make_weighted_sum,
    score_of,
)
from tidemill.services.reward.sample import RewardSample
from tidemill.services.reward.worker_metrics import Capacity, WorkerMetrics

MAX_BATCH = 256
"""Most scores in one call, so that a script never holds up Redis for long."""
GATHER_S = 0.002
"""How long the first score of a call waits for others: fewer calls, and fewer fetches that follow them."""


async def serve(context: ServiceContext) -> None:
    """Score the trajectories of a run until asked to stop."""
    config = context.config.reward
    dependencies = RewardDependencies.of(context)
    reward = make_weighted_sum(config, dependencies)
    capacity = Capacity(config, reward)
    scorer = Scorer(reward, config, context.name, context.config.seed)
    post_processing = PostProcessing(config, reward)
    counts = WorkerMetrics(
        context.activity, lambda: reward.failures() | post_processing.failures_by_name(), capacity.parallel
    )
    context.reporters += [counts.report, capacity.report]
    quarantine = Quarantine(context)
    try:
        async with asyncio.TaskGroup() as lanes:
            for lane in (Lane.EVAL, Lane.TRAIN):
                worker = RewardLane(
                    context, lane, scorer, counts, capacity.slots, post_processing, quarantine
                )
                lanes.create_task(worker.run(), name=f"lane {lane}")
    finally:
        await post_processing.close()
        await reward.close()
        await dependencies.close()


class Scorer:
    """Scores trajectories by the rewards of a run."""

    def __init__(self, reward: WeightedSum, config: RewardConfig, worker: str, seed: int) -> None:
        self.reward, self._config = reward, config
        self._worker, self._seed = worker, seed

    async def score(self, trajectory: Trajectory, lane: Lane) -> Score:
        """The score of one trajectory; it never raises for what a reward does."""
        if problem := fault_of(trajectory):
            return Score(
                ticket=trajectory.ticket,
                index=trajectory.index,
                status=ScoreStatus.FAILED,
                error=problem,
                worker=self._worker,
            )
        started = time.monotonic()
        sample = RewardSample.from_trajectory(trajectory, lane)
        total = self.reward.sum_up(await self.parts(sample))
        return score_of(total, sample, self._worker, time.monotonic() - started)

    async def parts(self, sample: RewardSample) -> Parts:
        """What each reward says of one sample by itself."""
        if self._config.delay_s is not None:  # the same for a trajectory in every run, whoever scores it
            chance = random.Random(f"{self._seed}:{sample.key[0]}:{sample.key[1]}")
            await asyncio.sleep(chance.uniform(*self._config.delay_s))
        return await self.reward.score(sample)


class Publisher:
    """Publishes finished scores in batches, without making any of them wait: one call takes what has gathered
    during the call before. Each score and the acknowledgement of its trajectory are one unit.

    `settled` is called for each score with whether it was published; False means that the lease was lost.
    `ahead` says how many messages may come with so many acknowledgements.
    """

    def __init__(
        self,
        consumer: Consumer[Trajectory],
        scores_key: str,
        settled: Callable[[Score, bool], None],
        ahead: Callable[[int], int],
    ) -> None:
        self._consumer, self._scores_key, self._settled = consumer, scores_key, settled
        self._ahead = ahead
        self._queue: asyncio.Queue[tuple[Delivery[Trajectory], Score]] = asyncio.Queue()

    def put(self, delivery: Delivery[Trajectory], score: Score) -> None:
        """Hand over a finished score. Bounded by the slots of the lane: a slot is freed by `settled`."""
        self._queue.put_nowait((delivery, score))

    async def run(self) -> None:
        while True:
            batch = [await self._queue.get()]
            await asyncio.sleep(GATHER_S)
            while len(batch) < MAX_BATCH and not self._queue.empty():
                batch.append(self._queue.get_nowait())
            flags = await self._consumer.complete(batch, self._scores_key, self._ahead(len(batch)))
            for (_, score), is_published in zip(batch, flags, strict=True):
                self._settled(score, is_published)
                self._queue.task_done()

    async def flush(self) -> None:
        """Wait until everything handed over has been settled."""
        await self._queue.join()


class RewardLane(LaneWorker[Trajectory]):
    """One lane of a worker."""

    def __init__(
        self,
        context: ServiceContext,
        lane: Lane,
        scorer: Scorer,
        counts: WorkerMetrics,
        slots: int | Callable[[], int],
        post_processing: PostProcessing,
        quarantine: Quarantine | None = None,
    ) -> None:
        super().__init__(context, lane, context.keys.trajectories(lane), REWARD_GROUP, Trajectory)
        self.scorer, self.counts = scorer, counts
        self.groups = GroupScoring(
            self.consumer, context, lane, scorer.reward, post_processing, counts.published
        )
        self.publisher = Publisher(self.consumer, context.keys.scores(lane), self._settle, self._ahead)
        self.slots = slots if callable(slots) else lambda: slots
        self.num_held = 0
        metrics.SCORE_SLOTS.labels(lane).set_function(self.slots)
        self.quarantine = quarantine or Quarantine(context)

    async def run(self) -> None:
        """Score and publish until the service stops, then finish or hand back what is held."""
        async with asyncio.TaskGroup() as tasks:
            publishing = tasks.create_task(self.publisher.run(), name=f"publish {self.lane}")
            await super().run()
            publishing.cancel()

    @property
    def num_free(self) -> int:
        """Trajectories that may be taken."""
        return self.slots() - self.num_held

    async def fetch(self, count: int) -> list[Delivery[Trajectory] | Garbled]:
        """Nothing new while suspects run."""
        await self.quarantine.until_open()
        return await super().fetch(count)

    async def accept(self, deliveries: list[Delivery[Trajectory]]) -> None:
        """Score those that may run beside any others, then the suspects."""
        trusted: list[Delivery[Trajectory]] = []
        suspects: list[Delivery[Trajectory]] = []
        for delivery in deliveries:
            (suspects if self.quarantine.is_suspect(delivery) else trusted).append(delivery)
        await self.quarantine.admit(self.consumer, trusted)
        for delivery in trusted:
            if not delivery.is_lost:
                self.start(delivery)
        if suspects:
            await self.quarantine.work_off(self, suspects)

    def given_up(self, delivery: Delivery[Trajectory]) -> str:
        """Only what was alone when its worker died is buried; and where groups are scored as a whole, what
        has no payload: the others would wait for it."""
        if self.groups.is_needed and (problem := fault_of(delivery.message)):
            return problem
        if not self.quarantine.is_worn_out(delivery):
            return ""
        return (
            f"delivered {delivery.attempts - 1} times without a score; each worker that took it died or lost "
            "its lease, in the end with nothing else in flight "
            f"(streams.max_attempts is {self.context.config.streams.max_attempts})"
        )

    def start(self, delivery: Delivery[Trajectory]) -> None:
        """Begin to score a trajectory that is held."""
        self.num_held += 1
        self.quarantine.began()
        self.counts.took(self.lane)
        task = self.begin(delivery, self._score(delivery))
        # A callback and not the end of a coroutine: a task cancelled early would never get there.
        task.add_done_callback(lambda _: self._finish(delivery, task))

    async def flush(self) -> None:
        """Publish the scores that are there."""
        await self.publisher.flush()

    async def _score(self, delivery: Delivery[Trajectory]) -> Score | None:
        """The score to publish; None where it was published with its group, or will be."""
        if not self.groups.is_needed:
            return await self.scorer.score(delivery.message, self.lane)
        await self.groups.bring(delivery, self.scorer.parts)
        return None

    def _finish(self, delivery: Delivery[Trajectory], task: asyncio.Task[Score | None]) -> None:
        if task.cancelled() or task.exception() is not None or (score := task.result()) is None:
            self.counts.let_go(self.lane)
            self._release()
        else:
            self.counts.scored()
            self.publisher.put(delivery, score)

    def _settle(self, score: Score, is_published: bool) -> None:
        self.counts.settled(self.lane)
        self._release()
        if is_published:
            self.counts.published(self.lane, score)

    def _ahead(self, num_freed: int) -> int:
        """Where every slot is taken, the loop does not fetch: what takes the freed slots may come already."""
        is_full = self.num_free == 0 and self.quarantine.is_open and not self.context.stopping.is_set()
        return num_freed if is_full else 0

    def _release(self) -> None:
        self.num_held -= 1
        self.quarantine.ended()
        self.free_slot()

"""The reward worker: takes trajectories from the consumer group, publishes one score for each.

Invariant: every trajectory gets a score with a status, or is dead-lettered. Only `ok` has a value; a failure
is never a zero. A trajectory for which this machine cannot start something is handed back.

Two lanes, each with its own stream, loop and slots, so that evaluation does not queue behind
training; only while suspects run apart (`quarantine.py`) both stop. A slot is freed when a score is
published, when the lease is lost, or when the trajectory is dead-lettered.

The tasks of a lane, what each waits for, and who wakes it:

    run (LaneWorker)        a free slot, or the stop    woken by _release, by the stop
      |  fetch: trajectories that came with an acknowledgement, else XREADGROUP
      |  start: a first attempt or a task for each
      v
    first attempts          no task: _end_first is called with the reply of the child
      |  a failed one goes on in a task
    _score, many            the reward's answer         woken by the reply of the child or server
      |                                                 both ended where the lease is lost
      |  _keep: a score to publish, and when it must be
      v
    _publish_for_ever       a score that is due         woken with the score of an async function, else by the
      |                                                 timer of the first score; then by Redis
      |  one call: all scores that are there, their acknowledgements, and as many new trajectories
      v
    _release: slots are free, `run` goes on

Beside them: renewals of leases (`Consumer`), and for each function the process that runs it (`functions/`).
What ends together is sent together: requests to a child and its replies, scores and acknowledgements.
"""

import asyncio
import random
import time
from collections import Counter, deque
from collections.abc import Sequence
from functools import partial

import structlog

from tidemill.common.config import RewardConfig
from tidemill.common.errors import MachineFaultError
from tidemill.common.process.activity import LOAD, Activity
from tidemill.common.process.failures import Failure, is_logged
from tidemill.common.process.heartbeats import BLOCKING, FAILING_SHARE, FAILURES, Heartbeat
from tidemill.common.process.service import ServiceContext
from tidemill.common.streams import Delivery, Garbled
from tidemill.common.streams.lane_worker import LaneWorker
from tidemill.common.telemetry import metrics
from tidemill.common.telemetry.batched import Batched
from tidemill.common.wire.keys import REWARD_GROUP
from tidemill.common.wire.messages import Lane, Score, ScoreStatus, Trajectory, fault_of, is_demonstration
from tidemill.services.reward.outcome import BreakOff, OnEnd, RewardOutcome
from tidemill.services.reward.quarantine import Quarantine
from tidemill.services.reward.remote.dependencies import RewardDependencies
from tidemill.services.reward.rewards.groups import GroupScoring, PostProcessing
from tidemill.services.reward.rewards.reward import FunctionReward
from tidemill.services.reward.rewards.weighted_sum import Outcomes, WeightedSum, make_weighted_sum, score_of
from tidemill.services.reward.sample import RewardSample

log = structlog.get_logger(__name__)

SCORING = "score"
IDLE = "wait:trajectories"
RECENT_S = 60.0
"""Time over which the share of attempts that fail is taken."""


class WorkerMetrics:
    """Counts of both lanes: samples in flight, scores by status, and how many samples run in parallel."""

    def __init__(
        self,
        activity: Activity,
        config: RewardConfig,
        reward: WeightedSum,
        post_processing: PostProcessing | None = None,
    ) -> None:
        """`post_processing` is what changes the rewards of whole groups, if anything does."""
        self._activity = activity
        self._config = config
        self._reward = reward
        self._post_processing = post_processing
        self._executions = [
            named.reward.execution for named in reward.rewards if isinstance(named.reward, FunctionReward)
        ]
        self._in_flight: Counter[Lane] = Counter()
        self._num_scoring = 0
        """Samples in flight in both lanes that do not only wait to be published."""
        self._statuses: Counter[ScoreStatus] = Counter()
        self._attempts: deque[tuple[float, int, int]] = deque([(time.monotonic(), 0, 0)])
        """When heartbeats were made, with the scores and the failed attempts until then."""
        self._rated_at = time.monotonic()
        self._num_rated = 0
        """When the last heartbeat was made, and the scores until then."""
        self._gathered = {lane: Batched(partial(_observe, lane)) for lane in Lane}
        for lane in Lane:
            metrics.SCORES_IN_FLIGHT.labels(lane).set_function(partial(self._in_flight.__getitem__, lane))
        activity.enter(IDLE)

    def slots(self) -> int:
        """Most samples that a lane holds; it changes with the parallelism that the rewards measure."""
        return min(self._config.max_in_flight, self._reward.slots or self._config.max_in_flight)

    def count(self, lane: Lane, in_flight: int = 0, unpublished: int = 0) -> None:
        """Change the number of samples in flight, and of those among them that only wait to be published:
        that is Redis's time, not the reward's. A sample that begins is `in_flight=1`, one that has its score
        `unpublished=1`, and when that is published both change by -1."""
        self._in_flight[lane] += in_flight
        self._num_scoring += in_flight - unpublished
        self._activity.enter(SCORING if self._num_scoring > 0 else IDLE)

    def published(self, lane: Lane, score: Score) -> None:
        self._statuses[score.status] += 1
        self._gathered[lane].add((score.status, score.latency_s))
        if score.status is ScoreStatus.OK:
            return
        count = self._statuses[ScoreStatus.FAILED] + self._statuses[ScoreStatus.TIMEOUT]
        if is_logged(count):
            log.warning(
                "no reward for a trajectory",
                ticket=score.ticket,
                index=score.index,
                status=score.status.value,
                error=score.error,
                attempts=score.attempts,
                so_far=count,
            )

    def report(self, beat: Heartbeat) -> None:
        """Fill in this worker's part of a heartbeat, and which functions block."""
        now = time.monotonic()
        num_scored = self._statuses.total()
        rate = (num_scored - self._num_rated) / max(now - self._rated_at, 1e-3)
        self._rated_at = now
        self._num_rated = num_scored
        at_once = [execution.parallel for execution in self._executions]
        parallel = [count for count in at_once if count is not None]
        notes = [note for execution in self._executions for note in execution.notes]
        beat.counts.update(
            in_flight=self._in_flight.total(),
            parallel=min([self.slots(), *parallel]),
            scored=num_scored,
            failed=self._statuses[ScoreStatus.FAILED],
            timeout=self._statuses[ScoreStatus.TIMEOUT],
            per_s=round(rate, 2),
        )
        failures = self._reward.failures()
        deaths = self._reward.deaths
        beat.failures += self._reward.failed_attempts
        if self._post_processing is not None:
            failures |= self._post_processing.failures_by_name()
            deaths += self._post_processing.deaths
            notes += self._post_processing.notes
            beat.failures += self._post_processing.log.failures
        beat.counts.update({f"{FAILURES}{name}": count for name, count in failures.items()})
        beat.counts[FAILING_SHARE] = round(self._failing_share(beat.failures), 4)
        # Last: a death fails no attempt, as its calls are run again.
        beat.failures += deaths
        beat.counts[BLOCKING] = beat.counts.get(BLOCKING, 0) + len(notes)
        if beat.detail:
            notes.insert(0, beat.detail)
        beat.detail = "; ".join(notes)

    def _failing_share(self, failures: Sequence[Failure]) -> float:
        """Share of the last minute's attempts that failed."""
        num_failed = sum(failure.count for failure in failures)
        now = time.monotonic()
        self._attempts.append((now, self._statuses[ScoreStatus.OK], num_failed))
        while len(self._attempts) > 1 and self._attempts[0][0] < now - RECENT_S:
            self._attempts.popleft()
        _, ok_before, failed_before = self._attempts[0]
        recently_ok = self._statuses[ScoreStatus.OK] - ok_before
        recently_failed = num_failed - failed_before
        total = recently_ok + recently_failed
        return recently_failed / total if total else 0.0


async def _fail(error: Exception) -> None:
    """For a task whose error ends its lane, and with it the worker."""
    raise error


def _observe(lane: Lane, scores: Sequence[tuple[ScoreStatus, float]]) -> None:
    """Count published scores: statuses, and the seconds they took."""
    statuses, seconds = zip(*scores, strict=True)
    for status, count in Counter(statuses).items():
        metrics.SCORES_PUBLISHED.labels(lane, status).inc(count)
    metrics.SCORE_SECONDS.labels(lane).observe_many(seconds)


START_WAIT_S = 10.0
"""Longest time that a worker takes no samples because functions are being loaded."""
MAX_BATCH = 256
"""Most scores in one call, so that a script never holds up Redis for long."""
GATHER_S = 0.002
"""How long the first score of a call waits for others: fewer calls, and fewer fetches after them."""
AHEAD_SHARE = 0.33
"""Most samples that a full lane holds beyond its slots, as a share of these. The process that runs the
function begins one the moment another ends, which needs no wake-up of the worker."""
AHEAD_S = 0.2
"""Time in which these must begin at the pace of the last scores. A worker whose rewards take long holds none,
as other workers may begin them earlier."""
PACE_SHARE = 0.1
"""Weight of the last call's scores in the pace."""


async def serve(context: ServiceContext) -> None:
    """Score the trajectories of a run until asked to stop."""
    config = context.config.reward
    dependencies = RewardDependencies.of(context)
    await dependencies.open_pictures(context)
    reward = make_weighted_sum(config, dependencies)
    scorer = Scorer(reward, config, context.name, context.config.seed)
    post_processing = PostProcessing(config, reward, dependencies.pictures)
    quarantine = Quarantine(context)
    starting = asyncio.create_task(reward.start(), name="start of rewards")
    try:
        with context.activity.during(LOAD, "starts the processes of reward functions"):
            # Before the lanes: other workers may score what this one could not begin yet. Calls of a function
            # that takes longer to load wait for the same start.
            await context.unless_stopping(asyncio.wait({starting}, timeout=START_WAIT_S))
        counts = WorkerMetrics(
            context.activity,
            config,
            reward,
            post_processing,
        )
        context.reporters.append(counts.report)
        async with asyncio.TaskGroup() as lanes:
            for lane in (Lane.EVAL, Lane.TRAIN):
                worker = RewardLane(context, lane, scorer, counts, post_processing, quarantine)
                lanes.create_task(worker.run(), name=f"lane {lane}")
    finally:  # the HTTP client and servers close after the rewards that use them
        starting.cancel()
        await post_processing.close()
        await reward.close()
        await dependencies.close()


class Scorer:
    """Scores single trajectories, whatever stream, slot and lease they have."""

    def __init__(self, reward: WeightedSum, config: RewardConfig, worker: str, seed: int) -> None:
        self.reward = reward
        self._config = config
        self._worker = worker
        self._seed = seed

    def begin(self, trajectory: Trajectory, lane: Lane, on_end: OnEnd) -> BreakOff | None:
        """Begin to score a trajectory where no task has to wait for it; see `Reward.begin`."""
        return None if fault_of(trajectory) else self.reward.begin(RewardSample(trajectory, lane), on_end)

    def score_of_outcome(
        self, trajectory: Trajectory, lane: Lane, outcome: RewardOutcome, began_at: float
    ) -> Score:
        """The score of a trajectory whose only reward has this outcome, for what `begin` has begun."""
        total = self.reward.sum_up({self.reward.rewards[0].name: outcome})
        latency_s = time.monotonic() - began_at
        return score_of(total, RewardSample(trajectory, lane), self._worker, latency_s)

    async def score(self, trajectory: Trajectory, lane: Lane, began_at: float = 0.0) -> Score:
        """The score of one trajectory; a reward that fails never makes it raise. A first attempt may have
        begun before, `began_at` on the monotonic clock, and failed.

        Raises:
            MachineFaultError: this machine is short of something.
        """
        problem = fault_of(trajectory)
        if problem:
            return Score(
                ticket=trajectory.ticket,
                index=trajectory.index,
                status=ScoreStatus.FAILED,
                error=problem,
                worker=self._worker,
            )
        started = began_at or time.monotonic()
        sample = RewardSample(trajectory, lane, began_at)
        total = self.reward.sum_up(await self.outcomes(sample))
        return score_of(total, sample, self._worker, time.monotonic() - started)

    async def outcomes(self, sample: RewardSample) -> Outcomes:
        """The outcome of each reward that scores samples one by one."""
        if self._config.delay_s is not None:  # depends on seed, ticket and index only, not on the worker
            chance = random.Random(f"{self._seed}:{sample.key[0]}:{sample.key[1]}")
            await asyncio.sleep(chance.uniform(*self._config.delay_s))
        return await self.reward.score(sample)


class RewardLane(LaneWorker[Trajectory]):
    def __init__(
        self,
        context: ServiceContext,
        lane: Lane,
        scorer: Scorer,
        counts: WorkerMetrics,
        post_processing: PostProcessing,
        quarantine: Quarantine | None = None,
    ) -> None:
        super().__init__(context, lane, context.keys.trajectories(lane), REWARD_GROUP, Trajectory)
        self.scorer = scorer
        self.counts = counts
        self.groups = GroupScoring(
            self.consumer, context, lane, scorer.reward, post_processing, counts.published
        )
        self.num_held = 0
        """Samples that were begun and are not released: not yet published, handed back or lost."""
        self._num_extra_slots = 0
        """How many samples more than its slots this lane may hold."""
        self._num_asked = 0
        """Samples that the call which publishes now has asked for: `run` does not fetch for their slots."""
        self._latency_s = 0.0
        """How long scores have taken lately; 0 before the first."""
        is_direct = not self.groups.is_needed and context.config.reward.delay_s is None
        self._is_queueing = is_direct and scorer.reward.is_queueing
        """Whether the function's process queues samples, so that the lane may hold more than its slots."""
        metrics.SCORE_SLOTS.labels(lane).set_function(counts.slots)
        self.quarantine = quarantine or Quarantine(context)
        self._first_attempts: dict[Delivery[Trajectory], BreakOff] = {}
        """First attempts for which no task waits, and what ends each."""
        self._first_ended = asyncio.Event()
        """Set whenever a first attempt ends."""
        self._finished: list[tuple[Delivery[Trajectory], Score]] = []
        """Scores to publish. The slots bound it: each is freed only when its score is published."""
        self._is_due = asyncio.Event()
        """Set when the scores in `_finished` have waited for others long enough."""
        self._due_timer: asyncio.TimerHandle | None = None
        self._num_unpublished = 0
        """Scores in `_finished`, and those in the call that publishes."""
        self._is_flushed = asyncio.Event()
        self._is_flushed.set()

    async def run(self) -> None:
        """Score and publish until the service stops, then finish or hand back what is held."""
        async with asyncio.TaskGroup() as tasks:
            publishing = tasks.create_task(self._publish_for_ever(), name=f"publish {self.lane}")
            await super().run()
            # Nothing is left to publish: `flush` has waited for all scores before the lane left its group.
            publishing.cancel()

    @property
    def num_free(self) -> int:
        return self.counts.slots() + self._num_extra_slots - self.num_held - self._num_asked

    async def fetch(self, count: int) -> list[Delivery[Trajectory] | Garbled]:
        """Fetch, once no suspects run. Demonstrations are acknowledged, and get no score."""
        await self.quarantine.until_open()
        fetched = await super().fetch(count)
        demonstrations = [
            entry
            for entry in fetched
            if isinstance(entry, Delivery) and is_demonstration(entry.message.ticket)
        ]
        if not demonstrations:
            return fetched
        acknowledged = [(delivery, None) for delivery in demonstrations]
        await self.consumer.complete(acknowledged, self.context.keys.scores(self.lane))
        return [entry for entry in fetched if entry not in demonstrations]

    async def accept(self, deliveries: list[Delivery[Trajectory]]) -> None:
        """Score those that may run beside any others, then the suspects."""
        suspects: list[Delivery[Trajectory]] = []
        trusted: list[Delivery[Trajectory]] = []
        for delivery in deliveries:
            if self.quarantine.is_suspect(delivery):
                suspects.append(delivery)
            else:
                trusted.append(delivery)
        await self.quarantine.admit(self.consumer, trusted)
        for delivery in trusted:
            if not delivery.is_lost:
                self.start(delivery)
        if suspects:
            await self.quarantine.run_suspects(self.consumer, suspects, self.start)

    def given_up(self, delivery: Delivery[Trajectory]) -> str:
        """Why to dead-letter a trajectory, or "".

        Either it was alone when its worker died. Or it has a fault, and groups are scored as a whole: then
        the others of its group would wait for its score.
        """
        if self.groups.is_needed and (problem := fault_of(delivery.message)):
            return problem
        if not self.quarantine.attempts_exhausted(delivery):
            return ""
        return (
            f"delivered {delivery.attempts - 1} times without a score; each worker that took it died or lost "
            "its lease, in the end with nothing else in flight "
            f"(streams.max_attempts is {self.context.config.streams.max_attempts})"
        )

    def start(self, delivery: Delivery[Trajectory]) -> None:
        """Begin to score: without a task where the first attempt needs none."""
        self.num_held += 1
        self.quarantine.began()
        self.counts.count(self.lane, in_flight=1)
        if self._is_queueing:
            began_at = time.monotonic()
            on_end = partial(self._end_first, delivery, began_at)
            break_off = self.scorer.begin(delivery.message, self.lane, on_end)
            if break_off is not None:
                self._first_attempts[delivery] = break_off
                delivery.on_lost = partial(self._break_off, delivery)
                return
        self._start_task(delivery)

    def _start_task(self, delivery: Delivery[Trajectory], began_at: float = 0.0) -> asyncio.Task[bool]:
        task = self.begin_task(delivery, self._score(delivery, began_at))
        # A callback, not the end of a coroutine: a task that is cancelled early never gets there.
        task.add_done_callback(self._release_without_score)
        return task

    def _end_first(
        self, delivery: Delivery[Trajectory], began_at: float, outcome: RewardOutcome | None
    ) -> None:
        """Keep the score of a first attempt; a task makes further attempts where it failed."""
        if self._first_attempts.pop(delivery, None) is None:
            return  # broken off
        delivery.on_lost = None
        try:
            if outcome is not None:
                trajectory = delivery.message
                score = self.scorer.score_of_outcome(trajectory, self.lane, outcome, began_at)
                self._keep(delivery, score)
            else:
                self._start_task(delivery, began_at)
        except Exception as error:
            # The caller is the connection to the function's process. Without this it would lose the error,
            # and the sample would stay held, with nobody at work on it.
            self._tasks.create_task(_fail(error), name=f"error of {delivery.entry_id}")
        # After its task is there: `until_idle` looks for one.
        self._first_ended.set()

    def _break_off(self, delivery: Delivery[Trajectory]) -> None:
        """End a first attempt: the lease is lost, or the worker must leave."""
        delivery.on_lost = None
        break_off = self._first_attempts.pop(delivery, None)
        if break_off is not None:
            break_off()
            self._release()
            self._first_ended.set()

    @property
    def num_at_work(self) -> int:
        return len(self._first_attempts) + super().num_at_work

    async def until_idle(self) -> None:
        while self.num_at_work:
            if self.running:
                await super().until_idle()
            else:
                # Nothing is awaited between the check and this, so no end is missed.
                self._first_ended.clear()
                await self._first_ended.wait()

    async def end_work(self) -> None:
        # Before the tasks: a first attempt that fails meanwhile would begin another one.
        for delivery in list(self._first_attempts):
            self._break_off(delivery)
        await super().end_work()

    async def flush(self) -> None:
        """Publish the scores that are there."""
        self._is_due.set()
        await self._is_flushed.wait()

    async def _score(self, delivery: Delivery[Trajectory], began_at: float = 0.0) -> bool:
        """Score a trajectory; returns whether there is a score to publish. There is none if it was or will be
        published with its group, or if the trajectory was handed back."""
        try:
            if self.groups.is_needed:
                await self.groups.score_in_group(delivery, self.scorer.outcomes)
                return False
            score = await self.scorer.score(delivery.message, self.lane, began_at)
        except MachineFaultError as fault:
            await self.hand_back_for(fault, delivery)
            return False
        self._keep(delivery, score)
        return True

    def _keep(self, delivery: Delivery[Trajectory], score: Score) -> None:
        """Keep a score until it is published."""
        self._finished.append((delivery, score))
        self._num_unpublished += 1
        self._is_flushed.clear()
        self.counts.count(self.lane, unpublished=1)
        if self._is_queueing:  # its process has gathered answers already
            self._is_due.set()
        elif self._due_timer is None:
            self._due_timer = asyncio.get_running_loop().call_later(GATHER_S, self._is_due.set)

    def _release_without_score(self, task: asyncio.Task[bool]) -> None:
        """Free the slot of a task that kept no score; `_publish_for_ever` frees those of scores."""
        if task.cancelled() or task.exception() is not None or not task.result():
            self._release()

    def _cancel_timer(self) -> None:
        if self._due_timer is not None:
            self._due_timer.cancel()
            self._due_timer = None

    async def _publish_for_ever(self) -> None:
        """Publish each score and the acknowledgement of its trajectory as one unit. One call takes the scores
        that gathered during the call before, and while the first of them waited."""
        out_key = self.context.keys.scores(self.lane)
        while True:
            await self._is_due.wait()
            batch = self._finished[:MAX_BATCH]
            del self._finished[:MAX_BATCH]
            if not self._finished:
                self._is_due.clear()
                self._cancel_timer()
            if not batch:
                continue
            # If every slot is taken, `run` does not fetch: this call then fetches for the slots it frees.
            # Asked before the number of slots changes, after which `run` might be fetching for the same ones.
            is_full = self.num_free <= 0 and self._takes_new
            self._set_extra_slots(batch)
            if is_full:
                # For 10 scores, while no slot is free, 10 samples; less those that such a call has fetched
                # before and `run` has not taken yet. Noted, because `run` may wake during the call: by the
                # call before, or by a lease that is lost.
                self._num_asked = max(0, self.num_free + len(batch) - self.consumer.num_ahead)
            are_published = await self.consumer.complete(batch, out_key, self._num_asked)
            # `run` takes first what came with this call.
            self._num_asked = 0
            self.counts.count(self.lane, unpublished=-len(batch))
            self._release(len(batch))
            for (_, score), is_published in zip(batch, are_published, strict=True):
                if is_published:  # else the lease was lost
                    self.counts.published(self.lane, score)
            if self.context.shortage.is_short:
                # It became short during the call: `run` may have handed back what had come before.
                await self.consumer.hand_back_ahead()
            self._num_unpublished -= len(batch)
            # Last, because `flush` waits for it; after that the consumer hands back all it still holds.
            if not self._num_unpublished:
                self._is_flushed.set()

    @property
    def _takes_new(self) -> bool:
        """Whether new samples may be asked for."""
        is_leaving = self.context.stopping.is_set()
        return self.quarantine.is_open and not self.context.shortage.is_short and not is_leaving

    def _set_extra_slots(self, batch: Sequence[tuple[Delivery[Trajectory], Score]]) -> None:
        """Decide how many samples to hold beyond the slots: as many as begin within `AHEAD_S` at the pace of
        the last scores, at most `AHEAD_SHARE`; none while there are free slots."""
        latency_s = sum(score.latency_s for _, score in batch) / len(batch)
        weight = PACE_SHARE if self._latency_s else 1.0
        self._latency_s += weight * (latency_s - self._latency_s)
        num_slots = self.counts.slots()
        if num_slots > self.num_held + self.consumer.num_ahead or not self._is_queueing:
            self._num_extra_slots = 0
        elif self.num_free <= 0:
            # Only then, or `run` might be fetching for the difference.
            share = min(AHEAD_SHARE, AHEAD_S / max(self._latency_s, 1e-3))
            self._num_extra_slots = int(share * num_slots)

    def _release(self, count: int = 1) -> None:
        self.num_held -= count
        self.counts.count(self.lane, in_flight=-count)
        self.quarantine.ended(count)
        self.free_slot()

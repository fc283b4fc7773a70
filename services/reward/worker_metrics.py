"""Counts of one reward worker: for its metrics, its heartbeat, its activity, and its log."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import structlog

from tidemill.common.config import RewardConfig
from tidemill.common.process.activity import Activity
from tidemill.common.process.heartbeats import BLOCKING, FAILURES, Heartbeat
from tidemill.common.telemetry import metrics
from tidemill.common.telemetry.batched import Batched
from tidemill.common.wire.messages import Lane, Score, ScoreStatus
from tidemill.services.reward.rewards.reward import FunctionReward
from tidemill.services.reward.rewards.weighted_sum import WeightedSum

log = structlog.get_logger(__name__)

SCORING = "score"
IDLE = "wait:trajectories"


class WorkerMetrics:
    """What is in flight and what came of the rest, over both lanes."""

    def __init__(
        self,
        activity: Activity,
        failures: Callable[[], dict[str, int]] = dict,
        parallel: Callable[[], int] = lambda: 1,
    ) -> None:
        """`parallel` is how many samples this worker can score at once."""
        self._activity, self._failures, self._parallel = activity, failures, parallel
        self._in_flight: Counter[Lane] = Counter()
        self._num_unpublished = 0
        self._statuses: Counter[ScoreStatus] = Counter()
        self._rated_at, self._rated = time.monotonic(), 0
        self._gathered = {lane: Batched(partial(_book, lane)) for lane in Lane}
        for lane in Lane:
            metrics.SCORES_IN_FLIGHT.labels(lane).set_function(partial(self._in_flight.__getitem__, lane))
        activity.enter(IDLE)

    def took(self, lane: Lane) -> None:
        """Work on one trajectory began."""
        self._move(lane, +1)

    def scored(self) -> None:
        """A score is there and waits to be published, which is Redis's time and not the reward's."""
        self._num_unpublished += 1
        self._show_state()

    def settled(self, lane: Lane) -> None:
        """Such a score is published, or its lease was lost."""
        self._num_unpublished -= 1
        self.let_go(lane)

    def let_go(self, lane: Lane) -> None:
        """The trajectory left this worker, scored or not."""
        self._move(lane, -1)

    def published(self, lane: Lane, score: Score) -> None:
        """A score is in the stream."""
        self._statuses[score.status] += 1
        self._gathered[lane].add((score.status, score.latency_s))
        if score.status is not ScoreStatus.OK:
            self._complain(score)

    def report(self, beat: Heartbeat) -> None:
        """Fill in this worker's part of a heartbeat."""
        now, scored = time.monotonic(), self._statuses.total()
        rate = (scored - self._rated) / max(now - self._rated_at, 1e-3)
        self._rated_at, self._rated = now, scored
        beat.counts.update(
            in_flight=self._in_flight.total(),
            parallel=self._parallel(),
            scored=scored,
            failed=self._statuses[ScoreStatus.FAILED],
            timeout=self._statuses[ScoreStatus.TIMEOUT],
            per_s=round(rate, 2),
        )
        beat.counts.update({f"{FAILURES}{name}": count for name, count in self._failures().items()})

    def _move(self, lane: Lane, change: int) -> None:
        self._in_flight[lane] += change
        self._show_state()

    def _show_state(self) -> None:
        num_scoring = self._in_flight.total() - self._num_unpublished
        self._activity.enter(SCORING if num_scoring else IDLE)

    def _complain(self, score: Score) -> None:
        """Log the 1st failure, the 2nd, the 4th, and so on: a broken reward must not flood the log."""
        count = self._statuses[ScoreStatus.FAILED] + self._statuses[ScoreStatus.TIMEOUT]
        if count & (count - 1) == 0:
            log.warning(
                "no reward for a trajectory",
                ticket=score.ticket,
                index=score.index,
                status=score.status.value,
                error=score.error,
                attempts=score.attempts,
                so_far=count,
            )


def _book(lane: Lane, scores: Sequence[tuple[ScoreStatus, float]]) -> None:
    """Count published scores: statuses, and the seconds they took."""
    statuses, seconds = zip(*scores, strict=True)
    for status, count in Counter(statuses).items():
        metrics.SCORES_PUBLISHED.labels(lane, status).inc(count)
    metrics.SCORE_SECONDS.labels(lane).observe_many(seconds)


class Capacity:
    """How much a worker takes at once, over all rewards of the run; it follows what is measured."""

    def __init__(self, config: RewardConfig, reward: WeightedSum) -> None:
        self._config, self._reward = config, reward
        self._executions = [
            named.reward.execution for named in reward.rewards if isinstance(named.reward, FunctionReward)
        ]

    def slots(self) -> int:
        """Samples that a lane holds."""
        return min(self._config.max_in_flight, self._reward.slots or self._config.max_in_flight)

    def parallel(self) -> int:
        """Samples that are scored at once: no more than the processes of any reward take."""
        counts = [execution.parallel for execution in self._executions]
        return min([self.slots(), *(count for count in counts if count is not None)])

    def report(self, beat: Heartbeat) -> None:
        """Say in a heartbeat which functions block."""
        notes = [note for execution in self._executions for note in execution.notes]
        beat.counts[BLOCKING] = beat.counts.get(BLOCKING, 0) + len(notes)
        beat.detail = "; ".join([*([beat.detail] if beat.detail else []), *notes])

"""What one reward worker counts and can take: for its lanes, metrics, heartbeat, activity, and log."""

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
    """What is in flight and what came of the rest, over both lanes; and how much the rewards take at once."""

    def __init__(
        self,
        activity: Activity,
        config: RewardConfig,
        reward: WeightedSum,
        failures: Callable[[], dict[str, int]] = dict,
    ) -> None:
        """`failures` are those of anything but `reward`, by name."""
        self._activity, self._config, self._reward, self._failures = activity, config, reward, failures
        self._executions = [
            named.reward.execution for named in reward.rewards if isinstance(named.reward, FunctionReward)
        ]
        self._in_flight: Counter[Lane] = Counter()
        self._num_unpublished = 0
        self._statuses: Counter[ScoreStatus] = Counter()
        self._rated_at, self._rated = time.monotonic(), 0
        self._gathered = {lane: Batched(partial(_observe, lane)) for lane in Lane}
        for lane in Lane:
            metrics.SCORES_IN_FLIGHT.labels(lane).set_function(partial(self._in_flight.__getitem__, lane))
        activity.enter(IDLE)

    def slots(self) -> int:
        """Samples that a lane holds; it follows what is measured."""
        return min(self._config.max_in_flight, self._reward.slots or self._config.max_in_flight)

    def count(self, lane: Lane, in_flight: int = 0, unpublished: int = 0) -> None:
        """So many more are in flight, and so many of them only wait to be published, which is Redis's time
        and not the reward's."""
        self._in_flight[lane] += in_flight
        self._num_unpublished += unpublished
        self._activity.enter(SCORING if self._in_flight.total() > self._num_unpublished else IDLE)

    def published(self, lane: Lane, score: Score) -> None:
        self._statuses[score.status] += 1
        self._gathered[lane].add((score.status, score.latency_s))
        if score.status is ScoreStatus.OK:
            return
        # The 1st failure, the 2nd, the 4th, and so on: a broken reward must not flood the log.
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

    def report(self, beat: Heartbeat) -> None:
        """Fill in this worker's part of a heartbeat, and which functions block."""
        now, scored = time.monotonic(), self._statuses.total()
        rate = (scored - self._rated) / max(now - self._rated_at, 1e-3)
        self._rated_at, self._rated = now, scored
        parallel = [count for execution in self._executions if (count := execution.parallel) is not None]
        notes = [note for execution in self._executions for note in execution.notes]
        beat.counts.update(
            in_flight=self._in_flight.total(),
            parallel=min([self.slots(), *parallel]),
            scored=scored,
            failed=self._statuses[ScoreStatus.FAILED],
            timeout=self._statuses[ScoreStatus.TIMEOUT],
            per_s=round(rate, 2),
        )
        failures = self._reward.failures() | self._failures()
        beat.counts.update({f"{FAILURES}{name}": count for name, count in failures.items()})
        beat.counts[BLOCKING] = beat.counts.get(BLOCKING, 0) + len(notes)
        beat.detail = "; ".join([*([beat.detail] if beat.detail else []), *notes])


def _observe(lane: Lane, scores: Sequence[tuple[ScoreStatus, float]]) -> None:
    """Count published scores: statuses, and the seconds they took."""
    statuses, seconds = zip(*scores, strict=True)
    for status, count in Counter(statuses).items():
        metrics.SCORES_PUBLISHED.labels(lane, status).inc(count)
    metrics.SCORE_SECONDS.labels(lane).observe_many(seconds)

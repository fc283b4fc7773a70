"""From a reading to the metrics of the run."""

from collections import Counter

from common import metrics
from common.activity import WAIT
from common.presence import Heartbeat
from services.console.exporter.reading import Reading

STATUSES = ("starting", "running", "finished", "stopped", "failed")
ROLES = ("trainer", "rollout", "reward")
"""Those that a run cannot do without are told also when there is none."""
_LABELLED = (
    metrics.RUN_STATUS,
    metrics.STREAM_LENGTH,
    metrics.STREAM_LAG,
    metrics.STREAM_PENDING,
    metrics.STREAM_OLDEST_AGE_SECONDS,
    metrics.STREAM_CONSUMERS,
    metrics.WORKERS,
    metrics.WORKER_VERSION,
    metrics.WORKER_START_TIMESTAMP,
    metrics.WORKER_IDLE_SHARE,
    metrics.JOB_QUEUE_LENGTH,
)


def set_gauges(reading: Reading) -> None:
    """Replace what the reading before has said: what is gone must not go on being exported."""
    for gauge in _LABELLED:
        gauge.clear()
    metrics.REDIS_UP.set(1)
    metrics.REDIS_MEMORY_BYTES.set(reading.memory_bytes)
    metrics.REDIS_MAX_MEMORY_BYTES.set(reading.max_memory_bytes)
    for status in STATUSES:
        metrics.RUN_STATUS.labels(status).set(reading.status == status)
    metrics.RUN_VERSION.set(reading.version)
    metrics.RUN_STEPS.set(reading.steps)
    metrics.RUN_MAX_STALENESS.set(reading.max_staleness)
    metrics.LAST_COMMIT_TIMESTAMP.set(reading.committed_at)
    for stream, entries in reading.lengths.items():
        metrics.STREAM_LENGTH.labels(stream).set(entries)
    for found in reading.groups:
        where = (found.stream, found.group)
        metrics.STREAM_LAG.labels(*where).set(found.lag)
        metrics.STREAM_PENDING.labels(*where).set(found.pending)
        metrics.STREAM_CONSUMERS.labels(*where).set(found.consumers)
        metrics.STREAM_OLDEST_AGE_SECONDS.labels(*where, "waiting").set(found.waiting_age_s)
        metrics.STREAM_OLDEST_AGE_SECONDS.labels(*where, "held").set(found.held_age_s)
    for (queue, state), jobs in reading.jobs.items():
        metrics.JOB_QUEUE_LENGTH.labels(queue, state).set(jobs)
    _set_workers(reading.workers)


def _set_workers(workers: list[Heartbeat]) -> None:
    alive = Counter(beat.role for beat in workers if beat.is_alive)
    silent = Counter(beat.role for beat in workers if not beat.is_alive)
    for role in {*ROLES, *alive, *silent}:
        metrics.WORKERS.labels(role, "alive").set(alive[role])
        metrics.WORKERS.labels(role, "silent").set(silent[role])
    for beat in workers:
        metrics.WORKER_START_TIMESTAMP.labels(beat.role, beat.name).set(beat.started_at)
        if not beat.is_alive:
            continue
        if beat.role == "rollout":
            metrics.WORKER_VERSION.labels(beat.name).set(beat.version)
        for state, share in beat.shares.items():
            if state.startswith(WAIT):
                cause = state.removeprefix(WAIT)
                metrics.WORKER_IDLE_SHARE.labels(beat.role, beat.name, cause).set(share)

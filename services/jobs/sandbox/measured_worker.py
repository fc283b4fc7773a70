"""RQ's worker with metrics, counted in the process that forks: forks end before anybody could ask them.

What it reads of a job is JSON, as of every `KnownWorker` (JSONSerializer).
"""

import time

from redis.exceptions import RedisError
from rq import Queue
from rq.exceptions import InvalidJobOperation
from rq.job import Job

from common import metrics
from services.jobs.known_worker import KnownWorker

GONE = "finished"
"""A job that succeeded and is kept by nobody is gone when its worker looks."""
UNKNOWN = "unknown"


class MeasuredWorker(KnownWorker):
    """Observes every job: its queue (the part after the run), how it ended, and how long that took."""

    def execute_job(self, job: Job, queue: Queue) -> None:
        """Fork, wait for the job's end, and count it."""
        started = time.monotonic()
        try:
            super().execute_job(job, queue)
        finally:
            labels = (queue.name.rpartition(":")[2], _outcome(job))
            metrics.JOB_SECONDS.labels(*labels).observe(time.monotonic() - started)


def _outcome(job: Job) -> str:
    try:
        return job.get_status(refresh=True).value
    except InvalidJobOperation:
        return GONE
    except RedisError:
        return UNKNOWN

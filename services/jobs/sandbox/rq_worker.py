"""An RQ worker of a run's sandbox queue: `python -m tidemill.services.jobs.sandbox.rq_worker RUN_ID CONFIGS`.

CONFIGS is a JSON list of the run's sandbox sections; no job exceeds them, whatever it asks for.
RQ forks for every job, so a job that goes wrong takes nothing else with it. It ends with the process that
started it. Its name is new at every start: RQ refuses a name whose former holder was killed.
"""

import contextlib
import ctypes
import os
import secrets
import signal
import sys
import time

from pydantic import TypeAdapter
from redis.exceptions import RedisError
from rq import Queue
from rq.exceptions import InvalidJobOperation
from rq.job import Job

from tidemill.common.config.reward_kinds import SandboxConfig
from tidemill.common.errors import TidemillError
from tidemill.common.redis.broker import redis_url
from tidemill.common.redis.client import make_blocking_client
from tidemill.common.telemetry import metrics
from tidemill.common.wire.keys import Keys
from tidemill.services.jobs.known_jobs import KnownWorker, work
from tidemill.services.jobs.sandbox.job import functions_of

GONE = "finished"
"""A job that succeeded and is kept by nobody is gone when its worker looks."""
UNKNOWN = "unknown"


class MeasuredWorker(KnownWorker):
    """Observes every job: its queue (the part after the run), how it ended, and how long that took.

    Counted here because the forks of jobs end before anybody could ask them. What it reads of a job is JSON,
    as of every `KnownWorker` (JSONSerializer).
    """

    def execute_job(self, job: Job, queue: Queue) -> None:
        """Fork, wait for the job's end, and count it."""
        started = time.monotonic()
        try:
            super().execute_job(job, queue)
        finally:
            labels = (queue.name.rpartition(":")[2], _outcome(job))
            metrics.JOB_SECONDS.labels(*labels).observe(time.monotonic() - started)
            with contextlib.suppress(ChildProcessError):  # what code has left without namespaces
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass


def _outcome(job: Job) -> str:
    try:
        return job.get_status(refresh=True).value
    except InvalidJobOperation:
        return GONE
    except RedisError:
        return UNKNOWN


PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
BEAT_S = 2
"""How often a busy worker says that it lives; `services/reward/rewards/sandbox.py` listens for it."""
MAINTENANCE_S = 30
WORKER_TTL_S = 60


def main(run_id: str, configs: str) -> int:
    """Work until SIGTERM; a running job is finished first."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        connection = make_blocking_client(redis_url(), run_id)
    except TidemillError as error:
        print(f"tidemill sandbox: {error}", file=sys.stderr)
        return error.exit_code
    keys = Keys(run_id)

    def make() -> MeasuredWorker:
        worker = MeasuredWorker(
            [keys.sandbox_queue],
            functions_of(run_id, TypeAdapter(list[SandboxConfig]).validate_json(configs)),
            keys.sandbox_names,
            name=f"{keys.sandbox_names}{secrets.token_hex(4)}",
            connection=connection,
            job_monitoring_interval=BEAT_S,
            maintenance_interval=MAINTENANCE_S,
            worker_ttl=WORKER_TTL_S,
            log_job_description=False,
        )
        worker.log_result_lifespan = False
        return worker

    work(make, "tidemill sandbox")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

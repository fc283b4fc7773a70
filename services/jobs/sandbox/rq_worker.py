"""An RQ worker of a run's sandbox queue: `python -m tidemill.services.jobs.sandbox.rq_worker RUN_ID CONFIGS`.

CONFIGS is a JSON list of the run's sandbox sections; no job exceeds them, whatever it asks for.
RQ forks for every job, so a job that goes wrong takes nothing else with it. It ends with the process that
started it, and reaps what code has left without namespaces.
"""

import ctypes
import signal
import sys

from pydantic import TypeAdapter

from tidemill.common.config.reward_kinds import SandboxConfig
from tidemill.common.process.children import hide_memory
from tidemill.common.wire.keys import Keys
from tidemill.services.jobs.known_jobs import serve_queue
from tidemill.services.jobs.sandbox.job import functions_of

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
BEAT_S = 2
"""How often a busy worker says that it lives; `services/reward/rewards/sandbox.py` listens for it."""
MAINTENANCE_S = 30
WORKER_TTL_S = 60


def main(run_id: str, configs: str) -> int:
    if sys.platform == "linux":
        # SIGTERM lets RQ finish the job under way.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    hide_memory()  # it has the password of Redis, and code of models runs as the same user
    keys = Keys(run_id)
    functions = functions_of(run_id, TypeAdapter(list[SandboxConfig]).validate_json(configs))
    return serve_queue(
        run_id, keys.sandbox_queue, keys.sandbox_names, functions, "tidemill sandbox",
        job_monitoring_interval=BEAT_S, maintenance_interval=MAINTENANCE_S, worker_ttl=WORKER_TTL_S,
        log_job_description=False,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

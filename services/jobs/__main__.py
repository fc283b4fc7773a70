"""`python -m tidemill.services.jobs RUN_ID`: an RQ worker for archiving and exports, which nothing waits for.

Jobs travel as JSON, never as pickle, and are one of the functions in `known_jobs.py`. Start it where the
folder of runs is. It waits for a Redis that is away, and takes only processor time that nobody else wants.
"""

import contextlib
import os
import secrets
import sys

from tidemill.common.errors import TidemillError
from tidemill.common.redis.broker import redis_url
from tidemill.common.redis.client import make_blocking_client
from tidemill.common.wire.keys import Keys
from tidemill.services.jobs.known_jobs import KnownWorker, run_functions, work

NICENESS = 10
BEAT_S = 5
"""A busy worker says so this often: who asked for a job knows by it that it is not lost."""


def main(run_id: str, *options: str) -> int:
    """Work until SIGTERM; with `--burst`, until the queue is empty. A running job is finished first."""
    try:
        keys, connection = Keys(run_id), make_blocking_client(redis_url(), run_id)
    except TidemillError as error:
        print(f"tidemill jobs: {error}", file=sys.stderr)
        return error.exit_code
    with contextlib.suppress(OSError):
        os.nice(NICENESS)

    def make() -> KnownWorker:
        return KnownWorker(
            [keys.jobs_queue],
            run_functions(run_id),
            keys.jobs_names,
            name=f"{keys.jobs_names}{secrets.token_hex(4)}",
            connection=connection,
            job_monitoring_interval=BEAT_S,
        )

    work(make, "tidemill jobs", is_burst="--burst" in options)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

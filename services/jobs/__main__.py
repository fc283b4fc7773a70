"""`python -m services.jobs RUN_ID`: an RQ worker for a run's jobs that nothing waits for: archiving, exports.

Jobs travel as JSON, never as pickle. Start it where the folder of runs is. It waits for a Redis that is away,
and takes processor time only where nobody else wants it.
"""

import contextlib
import os
import secrets
import sys
import time

from redis.exceptions import RedisError
from rq import Worker
from rq.serializers import JSONSerializer

from common.broker import redis_url
from common.errors import TidemillError
from common.keys import Keys
from common.redis_client import make_blocking_client

NICENESS = 10
BEAT_S = 5
"""A busy worker says so this often: who asked for a job knows by it that it is not lost."""
PAUSE_S = 1.0


def main(run_id: str, *options: str) -> int:
    """Work until SIGTERM; with `--burst`, until the queue is empty. A running job is finished first."""
    try:
        queue, connection = Keys(run_id).jobs_queue, make_blocking_client(redis_url())
    except TidemillError as error:
        print(f"tidemill jobs: {error}", file=sys.stderr)
        return error.exit_code
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    while True:
        name = f"{run_id}-jobs-{secrets.token_hex(4)}"
        worker = Worker(
            [queue],
            name=name,
            connection=connection,
            serializer=JSONSerializer,
            job_monitoring_interval=BEAT_S,
        )
        try:
            worker.work(logging_level="WARNING", burst="--burst" in options)
            return 0
        except RedisError as error:
            print(f"tidemill jobs: {error}; trying again", file=sys.stderr)
            time.sleep(PAUSE_S)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

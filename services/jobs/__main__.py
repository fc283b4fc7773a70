"""`python -m services.jobs RUN_ID`: an RQ worker for a run's jobs that nothing waits for, such as exports.

Jobs travel as JSON, never as pickle. Start it where the folder of runs is.
"""

import secrets
import sys

from rq.serializers import JSONSerializer

from common.broker import redis_url
from common.errors import TidemillError
from common.keys import Keys
from common.redis_client import make_blocking_client
from services.jobs.measured_worker import MeasuredWorker


def main(run_id: str, *options: str) -> int:
    """Work until SIGTERM; with `--burst`, until the queue is empty. A running job is finished first."""
    try:
        queue, connection = Keys(run_id).jobs_queue, make_blocking_client(redis_url())
    except TidemillError as error:
        print(f"tidemill jobs: {error}", file=sys.stderr)
        return error.exit_code
    name = f"{run_id}-jobs-{secrets.token_hex(4)}"
    worker = MeasuredWorker([queue], name=name, connection=connection, serializer=JSONSerializer)
    worker.work(logging_level="WARNING", burst="--burst" in options)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""`python -m tidemill.services.jobs RUN_ID`: an RQ worker for archiving and exports, which nothing waits for.

Jobs travel as JSON, never as pickle, and are one of the functions in `known_jobs.py`. Start it where the
folder of runs is. It waits for a Redis that is away, and takes only processor time that nobody else wants.
"""

import contextlib
import os
import sys

from tidemill.common.process.children import hide_memory
from tidemill.common.wire.keys import Keys
from tidemill.services.jobs.known_jobs import run_functions, serve_queue

NICENESS = 10
BEAT_S = 5
"""A busy worker says so this often: who asked for a job knows by it that it is not lost."""


def main(run_id: str, *options: str) -> int:
    """Work until SIGTERM; with `--burst`, until the queue is empty."""
    hide_memory()  # it has the password of Redis
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    keys, functions = Keys(run_id), run_functions(run_id)
    return serve_queue(
        run_id, keys.jobs_queue, keys.jobs_names, functions, "tidemill jobs",
        job_monitoring_interval=BEAT_S, is_burst="--burst" in options,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

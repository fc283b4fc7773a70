"""RQ's worker as this project starts it: JSON instead of pickle, known functions, few permissions."""

from collections.abc import Sequence
from typing import Any

from rq import Worker
from rq.serializers import JSONSerializer

from services.jobs.known_job import Functions, known_job


class KnownWorker(Worker):
    """Does the jobs of `queues` that are one of `functions`, and fails all others."""

    def __init__(self, queues: Sequence[str], functions: Functions, **options: Any) -> None:
        fixed = {"serializer": JSONSerializer, "job_class": known_job(functions)}
        super().__init__(list(queues), **options | fixed)

    def _set_ip_address(self, connection: Any) -> None:
        """RQ asks for the list of all clients to find its own address, which workers may not read."""
        self.ip_address = "unknown"

"""A job of RQ that can be one of a few functions only, and nothing that its hash in Redis names besides.

Who may write a job's hash writes what is called: RQ imports whatever dotted name stands there, for the
function and for its callbacks, and sends webhooks to whatever address. Here a name is looked up, never
imported, arguments are validated by the function itself (`pydantic.validate_call`), and the fields of a hash
that a job of ours does not have are not read.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from rq import Worker
from rq.exceptions import NoSuchJobError
from rq.job import Job
from rq.serializers import JSONSerializer

FIELDS = frozenset(
    {
        "created_at",
        "data",
        "description",
        "ended_at",
        "enqueued_at",
        "failure_ttl",
        "last_heartbeat",
        "number_of_retries",
        "origin",
        "result_ttl",
        "retries_left",
        "started_at",
        "status",
        "timeout",
        "ttl",
        "worker_name",
    }
)
"""What is read of a job's hash: no callbacks, no webhooks, no dependencies, no repetitions."""

Functions = Mapping[str, Callable[..., Any]]


class UnknownJobError(Exception):
    """A job names a function that its worker does not have."""


class KnownJob(Job):
    """A job whose function is looked up in `functions`; see `known_job`."""

    functions: ClassVar[Functions] = {}

    def __init__(self, id: str | None = None, connection: Any = None, serializer: Any = None) -> None:
        # Whoever makes it and forgets the serializer: nothing is unpickled.
        super().__init__(id, connection=connection, serializer=JSONSerializer)

    @property
    def func(self) -> Callable[..., Any]:
        """The function of that name.

        Raises:
            UnknownJobError: there is none; nothing has been imported to find out.
        """
        function = self.functions.get(str(self.func_name))
        if function is None or self.instance is not None:
            raise UnknownJobError(
                f"{self.func_name} is no job of this worker; expected one of {', '.join(self.functions)}"
            )
        return function

    def restore(self, raw_data: Mapping[bytes, bytes]) -> None:
        """Read what a job of ours has.

        Raises:
            NoSuchJobError: the hash holds no job that can be read; workers pass over such a job.
        """
        known = {name: value for name, value in raw_data.items() if name.decode(errors="replace") in FIELDS}
        try:
            super().restore(known)
            self._deserialize_data()  # type: ignore[no-untyped-call]
        except NoSuchJobError:
            raise
        except Exception as error:  # whatever RQ's parsing of hostile fields raises
            raise NoSuchJobError(f"job {self.id} cannot be read: {error!r}") from None


def known_job(functions: Functions) -> type[KnownJob]:
    """The kind of job that calls these functions, by their names in Redis."""
    return type("KnownJob", (KnownJob,), {"functions": dict(functions)})


class KnownWorker(Worker):
    """Does the jobs of `queues` that are one of `functions`, and fails all others."""

    def __init__(self, queues: Sequence[str], functions: Functions, **options: Any) -> None:
        fixed = {"serializer": JSONSerializer, "job_class": known_job(functions)}
        super().__init__(list(queues), **options | fixed)

    def _set_ip_address(self, connection: Any) -> None:
        """RQ asks for the list of all clients to find its own address, which workers may not read."""
        self.ip_address = "unknown"

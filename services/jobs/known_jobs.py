"""Jobs of RQ that can be one of a few functions only, and nothing that their hash in Redis names besides.

Who may write a job's hash writes what is called: RQ imports whatever dotted name stands there, for the
function and for its callbacks, and sends webhooks to whatever address. Here a name is looked up, never
imported, arguments are validated by the function itself (`pydantic.validate_call`), and the fields of a hash
that a job of ours does not have are not read.
"""

import contextlib
import os
import secrets
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, Field, JsonValue, StrictBool, StringConstraints, validate_call
from redis.exceptions import RedisError
from rq import Queue, Worker
from rq.exceptions import InvalidJobOperation, NoSuchJobError, StopRequested
from rq.job import Job
from rq.serializers import JSONSerializer

from tidemill.common.errors import TidemillError
from tidemill.common.process.programs import JobFunction
from tidemill.common.redis.broker import redis_url
from tidemill.common.redis.client import make_blocking_client
from tidemill.common.streams.selection import StreamName
from tidemill.common.telemetry import metrics

# fmt: off
FIELDS = frozenset((
    "created_at", "data", "description", "ended_at", "enqueued_at", "failure_ttl", "last_heartbeat",
    "number_of_retries", "origin", "result_ttl", "retries_left", "started_at", "status", "timeout", "ttl",
    "worker_name",
))
# fmt: on
"""What is read of a job's hash: no callbacks, no webhooks, no dependencies, no repetitions."""

PAUSE_S = 1.0

Functions = Mapping[str, Callable[..., Any]]


class UnknownJobError(Exception):
    """A job names a function that its worker does not have."""


class KnownJob(Job):
    """A job whose function is looked up in `functions`; see `KnownWorker`."""

    functions: ClassVar[Functions] = {}
    queues: ClassVar[frozenset[str]] = frozenset()
    """Those that its worker reads; RQ keeps books on whatever queue a job says that it is of."""

    names: ClassVar[str] = ""
    """What ids of its worker's jobs begin with: it may not look at others."""

    @classmethod
    def fetch(cls, id: str, *arguments: Any, **options: Any) -> Job:
        """Raises NoSuchJobError: there is none, or it is none of this worker's."""
        if not id.startswith(cls.names):
            raise NoSuchJobError(f"{id} is no job of this worker")
        return super().fetch(id, *arguments, **options)

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
            if self.origin not in self.queues:
                raise NoSuchJobError(f"job {self.id} is of the queue {self.origin}")
        except NoSuchJobError:
            raise
        except Exception as error:  # whatever RQ's parsing of hostile fields raises
            raise NoSuchJobError(f"job {self.id} cannot be read: {error!r}") from None


class KnownWorker(Worker):
    """Does the jobs of one queue that are one of `functions`, and fails all others; ids begin with `names`.

    Counts each job: its queue (the part after the run), how it ended, and how long that took. The forks of
    jobs end before anybody could ask them.
    """

    def __init__(self, queue: str, functions: Functions, names: str, **options: Any) -> None:
        self.is_asked_to_stop = False
        own = {"functions": dict(functions), "queues": frozenset([queue]), "names": names}
        # RQ refuses a name whose former holder was killed, so it is new at every start.
        super().__init__(
            [queue], name=f"{names}{secrets.token_hex(4)}", serializer=JSONSerializer,
            job_class=type("KnownJob", (KnownJob,), own), **options,
        )  # fmt: skip

    def request_stop(self, signum: int, frame: Any) -> None:
        self.is_asked_to_stop = True
        super().request_stop(signum, frame)  # type: ignore[no-untyped-call]

    def execute_job(self, job: Job, queue: Queue) -> None:
        started = time.monotonic()
        try:
            super().execute_job(job, queue)
        finally:
            try:
                outcome = job.get_status(refresh=True).value
            except InvalidJobOperation:
                outcome = "finished"  # it succeeded, and is kept by nobody
            except RedisError:
                outcome = "unknown"
            labels = (queue.name.rpartition(":")[2], outcome)
            metrics.JOB_SECONDS.labels(*labels).observe(time.monotonic() - started)
            with contextlib.suppress(ChildProcessError):  # orphans of jobs
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass

    def _set_ip_address(self, connection: Any) -> None:
        """RQ asks for the list of all clients to find its own address, which workers may not read."""
        self.ip_address = "unknown"


def serve_queue(
    run_id: str,
    queue: str,
    names: str,
    functions: Functions,
    name: str,
    is_burst: bool = False,
    **options: Any,
) -> int:
    """Do the jobs of a run's queue until SIGTERM, or until nothing is left to do. A running job is finished
    first. RQ's worker is replaced whenever it has ended, as it does where Redis was away during a job.

    Args:
        run_id: The run, whose Redis it is.
        queue: The only queue that is read.
        names: What ids of its jobs begin with.
        functions: What jobs may ask for, by name.
        name: Stands before what is printed.
        is_burst: End when the queue is empty.
        options: For RQ's worker.

    Returns:
        The exit code.
    """
    try:
        connection = make_blocking_client(redis_url(), run_id)
    except TidemillError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return error.exit_code
    while True:
        worker = KnownWorker(queue, functions, names, connection=connection, **options)
        problem = "RQ's worker ended"
        try:
            worker.work(logging_level="WARNING", burst=is_burst)
            for own in worker.queues:  # an id that is no text ends it, and would at every start
                connection.delete(own.intermediate_queue_key)
            if is_burst and not sum(own.count for own in worker.queues):
                return 0
        except RedisError as error:
            problem = str(error)
        if worker.is_asked_to_stop:
            return 0
        print(f"{name}: {problem}; trying again", file=sys.stderr, flush=True)
        with contextlib.suppress(StopRequested):
            time.sleep(PAUSE_S)


EntryId = Annotated[str, StringConstraints(pattern=r"^(\d{1,20}(-\d{1,20})?|\+)$")]
Text = Annotated[str, Field(min_length=1, max_length=4096)]
Version = Annotated[str, StringConstraints(pattern=r"^(best|last|\d{1,18})$")]


def is_run(run_id: str) -> AfterValidator:
    """Accepts the id of this run and no other."""

    def check(value: str) -> str:
        if value != run_id:
            raise ValueError(f"this worker is of run {run_id}, and the job of {value}")
        return value

    return AfterValidator(check)


def run_functions(run_id: str) -> Functions:
    """What the worker of a run's jobs may be asked for; imported by the job that needs it, in its fork."""

    def own_folder(value: str) -> str:
        if Path(_absolute(value)).name != run_id:
            raise ValueError(f"expected the absolute path of the run's folder, which ends in /{run_id}")
        return value

    RunFolder = Annotated[Text, AfterValidator(own_folder)]

    @validate_call
    def archive(
        run_id: Annotated[Text, is_run(run_id)],
        run_dir: RunFolder,
        until: dict[StreamName, EntryId],
        is_last: StrictBool = False,
    ) -> dict[str, int]:
        from tidemill.services.jobs import archive

        return archive.archive(run_id, run_dir, until, is_last)

    @validate_call
    def export(
        run_dir: RunFolder,
        model: Text,
        dtype: Annotated[str, StringConstraints(pattern=r"^\w{1,32}$")],
        version: Version,
        output: Annotated[Text, AfterValidator(_absolute)],
        overrides: dict[Text, JsonValue] | None = None,
    ) -> dict[str, Any]:
        from tidemill.services.jobs import export

        return export.export(run_dir, model, dtype, version, output, overrides)

    return {JobFunction.ARCHIVE: archive, JobFunction.EXPORT: export}


def _absolute(value: str) -> str:
    if not Path(value).is_absolute() or ".." in Path(value).parts:
        raise ValueError("expected an absolute path")
    return value

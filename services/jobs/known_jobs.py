"""Jobs of RQ that can be one of a few functions only, and nothing that their hash in Redis names besides.

Who may write a job's hash writes what is called: RQ imports whatever dotted name stands there, for the
function and for its callbacks, and sends webhooks to whatever address. Here a name is looked up, never
imported, arguments are validated by the function itself (`pydantic.validate_call`), and the fields of a hash
that a job of ours does not have are not read.
"""

import contextlib
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, Field, JsonValue, StrictBool, StringConstraints, validate_call
from redis.exceptions import RedisError
from rq import Worker
from rq.exceptions import NoSuchJobError, StopRequested
from rq.job import Job
from rq.serializers import JSONSerializer

from tidemill.common.process.programs import JobFunction
from tidemill.common.streams.selection import StreamName

# fmt: off
FIELDS = frozenset((
    "created_at", "data", "description", "ended_at", "enqueued_at", "failure_ttl", "last_heartbeat",
    "number_of_retries", "origin", "result_ttl", "retries_left", "started_at", "status", "timeout", "ttl",
    "worker_name",
))
# fmt: on
"""What is read of a job's hash: no callbacks, no webhooks, no dependencies, no repetitions."""

PAUSE_S = 1.0
MAX_DATA_BYTES = 256 << 20
"""Of a job's function and arguments, unpacked."""

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
        name = str(self.func_name)
        # A job that waits since before the package had one name says `services.jobs...`.
        function = self.functions.get(name) or self.functions.get(f"tidemill.{name}")
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
            known[b"data"] = _bounded(known[b"data"])
            super().restore(known)
            self._deserialize_data()  # type: ignore[no-untyped-call]
            if self.origin not in self.queues:
                raise NoSuchJobError(f"job {self.id} is of the queue {self.origin}")
        except NoSuchJobError:
            raise
        except Exception as error:  # whatever RQ's parsing of hostile fields raises
            raise NoSuchJobError(f"job {self.id} cannot be read: {error!r}") from None


def _bounded(data: bytes) -> bytes:
    """A job's data, unpacked within bounds. RQ unpacks without any, so it gets data that does not grow."""
    unpacking = zlib.decompressobj()
    try:
        plain = unpacking.decompress(data, MAX_DATA_BYTES)
    except zlib.error:  # it is not packed
        plain = data
    if unpacking.unconsumed_tail:
        raise ValueError(f"its data has more than {MAX_DATA_BYTES:,} bytes")
    return zlib.compress(plain, 0)


class KnownWorker(Worker):
    """Does the jobs of `queues` that are one of `functions`, and fails all others; ids begin with `names`."""

    def __init__(self, queues: Sequence[str], functions: Functions, names: str, **options: Any) -> None:
        own = {"functions": dict(functions), "queues": frozenset(queues), "names": names}
        job_class = type("KnownJob", (KnownJob,), own)
        super().__init__(list(queues), **options | {"serializer": JSONSerializer, "job_class": job_class})
        self._is_asked_to_stop = self._has_found_nothing = False

    @property
    def is_done(self) -> bool:
        """Whether it ended because it was to. RQ also ends, without an error, where Redis goes away during a
        job."""
        return self._is_asked_to_stop or self._has_found_nothing

    def request_stop(self, signum: int, frame: Any) -> None:
        """What a signal calls."""
        self._is_asked_to_stop = True
        super().request_stop(signum, frame)  # type: ignore[no-untyped-call]

    def dequeue_job_and_maintain_ttl(self, *arguments: Any, **options: Any) -> Any:
        """The next job. RQ ends where an id is no text, and would at every start: such ids are taken out."""
        while True:
            try:
                found = super().dequeue_job_and_maintain_ttl(*arguments, **options)
                self._has_found_nothing = found is None  # it waits for ever, or was told to until all is done
                return found
            except UnicodeDecodeError:
                for queue in self.queues:
                    self._take_out_unreadable(queue.intermediate_queue_key)

    def _take_out_unreadable(self, key: str) -> None:
        found: list[Any] = self.connection.lrange(key, 0, -1)
        for job_id in found:
            if job_id.decode(errors="ignore").encode() != job_id:
                self.connection.lrem(key, 0, job_id)

    def _set_ip_address(self, connection: Any) -> None:
        """RQ asks for the list of all clients to find its own address, which workers may not read."""
        self.ip_address = "unknown"


def work(make: Callable[[], KnownWorker], name: str, is_burst: bool = False) -> None:
    """Work until a signal, or until nothing is left to do; with a new worker whenever Redis was away. `name`
    stands before what it says."""
    while True:
        worker = make()
        try:
            worker.work(logging_level="WARNING", burst=is_burst)
            if worker.is_done:
                return
            problem = "RQ's worker ended"
        except RedisError as error:
            problem = str(error)
        print(f"{name}: {problem}; trying again", file=sys.stderr, flush=True)
        with contextlib.suppress(StopRequested):
            time.sleep(PAUSE_S)
        if worker.is_done:
            return


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

        return archive.archive(run_id, run_dir, {str(name): last for name, last in until.items()}, is_last)

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

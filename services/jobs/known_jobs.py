"""Jobs of RQ that can be one of a few functions only, and nothing that their hash in Redis names besides.

Who may write a job's hash writes what is called: RQ imports whatever dotted name stands there, for the
function and for its callbacks, and sends webhooks to whatever address. Here a name is looked up, never
imported, arguments are validated by the function itself (`pydantic.validate_call`), and the fields of a hash
that a job of ours does not have are not read.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, Field, JsonValue, StrictBool, StringConstraints, validate_call
from rq import Worker
from rq.exceptions import NoSuchJobError
from rq.job import Job
from rq.serializers import JSONSerializer

from common.process.programs import JobFunction
from common.streams.selection import StreamName

# fmt: off
FIELDS = frozenset((
    "created_at", "data", "description", "ended_at", "enqueued_at", "failure_ttl", "last_heartbeat",
    "number_of_retries", "origin", "result_ttl", "retries_left", "started_at", "status", "timeout", "ttl",
    "worker_name",
))
# fmt: on
"""What is read of a job's hash: no callbacks, no webhooks, no dependencies, no repetitions."""

Functions = Mapping[str, Callable[..., Any]]


class UnknownJobError(Exception):
    """A job names a function that its worker does not have."""


class KnownJob(Job):
    """A job whose function is looked up in `functions`; see `KnownWorker`."""

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


class KnownWorker(Worker):
    """Does the jobs of `queues` that are one of `functions`, and fails all others."""

    def __init__(self, queues: Sequence[str], functions: Functions, **options: Any) -> None:
        job_class = type("KnownJob", (KnownJob,), {"functions": dict(functions)})
        super().__init__(list(queues), **options | {"serializer": JSONSerializer, "job_class": job_class})

    def _set_ip_address(self, connection: Any) -> None:
        """RQ asks for the list of all clients to find its own address, which workers may not read."""
        self.ip_address = "unknown"


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
        from services.jobs import archive

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
        from services.jobs import export

        return export.export(run_dir, model, dtype, version, output, overrides)

    return {JobFunction.ARCHIVE: archive, JobFunction.EXPORT: export}


def _absolute(value: str) -> str:
    if not Path(value).is_absolute() or ".." in Path(value).parts:
        raise ValueError("expected an absolute path")
    return value

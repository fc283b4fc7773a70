"""What the worker of a run's jobs may be asked for: two functions, with arguments that are validated first.

The modules are imported by the job that needs them, in its fork, and by no name that came from Redis.
"""

from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, StrictBool, StringConstraints, validate_call

from common.process.programs import JobFunction
from common.streams.selection import StreamName
from services.jobs.known_job import Functions

EntryId = Annotated[str, StringConstraints(pattern=r"^(\d{1,20}(-\d{1,20})?|\+)$")]
Text = Annotated[str, Field(min_length=1, max_length=4096)]
Version = Annotated[str, StringConstraints(pattern=r"^(best|last|\d{1,18})$")]


def orders_of(run_id: str) -> Functions:
    """The functions by name, for this run and no other."""

    def own_run(value: str) -> str:
        if value != run_id:
            raise ValueError(f"this worker is of run {run_id}, and the job of {value}")
        return value

    def own_folder(value: str) -> str:
        path = Path(value)
        if not path.is_absolute() or ".." in path.parts or path.name != run_id:
            raise ValueError(f"expected the absolute path of the run's folder, which ends in /{run_id}")
        return value

    @validate_call
    def archive(
        run_id: Annotated[Text, AfterValidator(own_run)],
        run_dir: Annotated[Text, AfterValidator(own_folder)],
        until: dict[StreamName, EntryId],
        is_last: StrictBool = False,
    ) -> dict[str, int]:
        from services.jobs import archive

        return archive.archive(run_id, run_dir, {str(name): last for name, last in until.items()}, is_last)

    @validate_call
    def export(
        run_dir: Annotated[Text, AfterValidator(own_folder)],
        model: Text,
        dtype: Annotated[str, StringConstraints(pattern=r"^\w{1,32}$")],
        version: Version,
        output: Annotated[Text, AfterValidator(_absolute)],
    ) -> dict[str, Any]:
        from services.jobs import export

        return export.export(run_dir, model, dtype, version, output)

    return {JobFunction.ARCHIVE: archive, JobFunction.EXPORT: export}


def _absolute(value: str) -> str:
    if not Path(value).is_absolute() or ".." in Path(value).parts:
        raise ValueError("expected an absolute path")
    return value

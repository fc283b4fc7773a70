"""Names of functions in jobs that wait in Redis."""

import pytest

from tidemill.common.process.programs import JobFunction
from tidemill.services.jobs.known_jobs import KnownJob, UnknownJobError


class Known(KnownJob):
    functions = {JobFunction.EXPORT: len}  # noqa: RUF012


def test_a_job_is_known_by_its_name() -> None:
    job = Known(connection=object())
    job._func_name = JobFunction.EXPORT.value
    assert job.func is len


@pytest.mark.parametrize("name", ["services.jobs.archive.archive", "os.system", "jobs.export.export"])
def test_no_other_name_is_known(name: str) -> None:
    job = Known(connection=object())
    job._func_name = name
    with pytest.raises(UnknownJobError, match="is no job of this worker"):
        _ = job.func

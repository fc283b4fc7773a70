"""Names of functions in jobs that wait in Redis, also from before the package had one name."""

import pytest

from tidemill.common.process.programs import JobFunction
from tidemill.services.jobs.known_jobs import KnownJob, UnknownJobError


class Known(KnownJob):
    functions = {JobFunction.EXPORT: len}  # noqa: RUF012


@pytest.mark.parametrize("name", [JobFunction.EXPORT.value, "services.jobs.export.export"])
def test_a_job_is_known_by_its_name_of_today_and_of_before(name: str) -> None:
    job = Known(connection=object())
    job._func_name = name
    assert job.func is len


@pytest.mark.parametrize("name", ["services.jobs.archive.archive", "os.system", "jobs.export.export"])
def test_no_other_name_is_known(name: str) -> None:
    job = Known(connection=object())
    job._func_name = name
    with pytest.raises(UnknownJobError, match="is no job of this worker"):
        _ = job.func

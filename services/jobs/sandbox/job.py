"""The RQ job: run one completion's code against its tests, each in a jail, and leave the result in Redis.

The result is written under a key of the run before RQ hears that the job is done, so a worker that dies in
between costs nothing but a second run. What the code does is a result; what the sandbox fails to do is an
error, which the reward service tries again and never takes for a zero.
"""

import json
import time
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import validate_call
from rq import get_current_job

from tidemill.common.config.reward_kinds import SandboxConfig
from tidemill.common.process.programs import JobFunction
from tidemill.common.wire.keys import Keys
from tidemill.services.jobs.known_jobs import Functions, is_run
from tidemill.services.jobs.sandbox.jail import SandboxError, run_program
from tidemill.services.jobs.sandbox.memory_group import memory_group
from tidemill.services.jobs.sandbox.programs import Case, TestsError, make_cases

RESULT_TTL_S = 3600
MAX_SHOWN_CHARS = 500
LATE = {"outcome": "timeout", "code": None, "stdout": "", "stderr": "total_s is used up", "wall_s": 0.0}
PROBE = [Case("import random\nprint(6 * 7)", "", "42")]
REMEDY = (
    "Nothing is run without a jail. It takes bubblewrap and libseccomp (apt install "
    "bubblewrap libseccomp2) and user namespaces: the sysctls user.max_user_namespaces and "
    "kernel.apparmor_restrict_unprivileged_userns may forbid them; in Docker start the worker with "
    "--security-opt seccomp=unconfined (and apparmor=unconfined on Ubuntu), or on a machine of its own."
)
BOUNDED = ("max_cases", "time_s", "total_s", "memory_mb", "file_mb")


def functions_of(run_id: str, configs: Sequence[SandboxConfig]) -> Functions:
    """The one function of a sandbox worker, for this run, within the bounds of its configs."""

    @validate_call
    def run_code(
        run_id: Annotated[str, is_run(run_id)], job_id: str, code: str, tests: Any, config: SandboxConfig
    ) -> None:
        job = get_current_job()
        if job is None or job.id != job_id:
            raise ValueError(f"the job is not {job_id}, whose result it would write")
        result = run_tests(code, tests, within(config, configs))
        job.connection.set(Keys(run_id).sandbox_result(job_id), json.dumps(result), ex=RESULT_TTL_S)

    return {JobFunction.RUN_CODE: run_code}


def within(asked: SandboxConfig, own: Sequence[SandboxConfig]) -> SandboxConfig:
    """What a job asks for, as far as the worker's own run allows: who asks does not decide how safe it is."""
    bounded = {name: min(getattr(asked, name), max(getattr(c, name) for c in own)) for name in BOUNDED}
    packages = asked.packages and any(config.packages for config in own)
    return asked.model_copy(update={**bounded, "packages": packages})


def run_tests(code: str, tests: Any, config: SandboxConfig) -> dict[str, Any]:
    """How many tests passed, or why none could be run."""
    try:
        cases = make_cases(code, tests, config.max_cases)
    except TestsError as error:
        return {"error": str(error), "is_final": True}
    try:
        results = run_cases(cases, config)
    except (SandboxError, OSError) as error:
        return {"error": str(error), "is_final": False}
    passed = [case.passed(result) for case, result in zip(cases, results, strict=True)]
    failed = next((result for result, is_passed in zip(results, passed, strict=True) if not is_passed), None)
    return {
        "passed": sum(passed),
        "total": len(passed),
        "outcomes": [result["outcome"] for result in results],
        "wall_s": round(sum(result["wall_s"] for result in results), 3),
        "first_failure": _shown(failed) if failed else None,
    }


def _shown(result: dict[str, Any]) -> dict[str, Any]:
    return {
        "outcome": result["outcome"],
        "code": result.get("code"),
        "stdout": result["stdout"][:MAX_SHOWN_CHARS],
        "stderr": result["stderr"][-MAX_SHOWN_CHARS:],
    }


def run_cases(cases: Sequence[Case], config: SandboxConfig) -> list[dict[str, Any]]:
    """The result of each case (`jail.run_program`).

    Raises:
        SandboxError: a jail could not be set up.
    """
    deadline = time.monotonic() + config.total_s
    results: list[dict[str, Any]] = []
    with memory_group((config.memory_mb + config.file_mb) << 20) as group:
        for case in cases:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                results.append(LATE)
                continue
            try:
                time_s = min(config.time_s, left_s)
                results.append(run_program(case.source, case.stdin, config, time_s, group))
            except SandboxError as error:
                raise SandboxError(f"no jail can be set up here: {error}. {REMEDY}") from None
    return results


def probe(config: SandboxConfig) -> None:
    """See that code can be run on this machine. Raises SandboxError: it cannot."""
    (result,) = run_cases(PROBE, config.model_copy(update={"time_s": 60.0, "total_s": 60.0}))
    if not PROBE[0].passed(result):
        raise SandboxError(f"the sandbox cannot run Python here: {result['stderr'] or result['outcome']}")

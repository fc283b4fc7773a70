"""The RQ job: run one completion's code against its tests, and leave the result in Redis.

The result is written under a key of the run before RQ hears that the job is done, so a worker that dies in
between costs nothing but a second run. What the code does is a result; what the sandbox fails to do is an
error, which the reward service tries again and never takes for a zero.
"""

import json
from typing import Any

from rq import get_current_job

from common.config.sandbox import SandboxConfig
from common.keys import Keys
from services.jobs.sandbox.programs import TestsError, make_cases
from services.jobs.sandbox.runner import SandboxError, run_cases

MAX_SHOWN_CHARS = 500


def run_code(run_id: str, job_id: str, code: str, tests: Any, config: dict[str, Any]) -> None:
    """Entry point of RQ; its arguments travel as JSON."""
    job = get_current_job()
    assert job is not None
    limits = SandboxConfig.model_validate(config)
    result = judge(code, tests, limits)
    job.connection.set(Keys(run_id).sandbox_result(job_id), json.dumps(result), ex=limits.result_ttl_s)


def judge(code: str, tests: Any, config: SandboxConfig) -> dict[str, Any]:
    """How many tests passed, or why none could be run."""
    try:
        cases = make_cases(code, tests, config.max_cases)
    except TestsError as error:
        return {"error": str(error), "is_final": True}
    try:
        results, isolation = run_cases(cases, config)
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
        "isolation": isolation,
    }


def _shown(result: dict[str, Any]) -> dict[str, Any]:
    return {
        "outcome": result["outcome"],
        "code": result.get("code"),
        "stdout": result["stdout"][:MAX_SHOWN_CHARS],
        "stderr": result["stderr"][-MAX_SHOWN_CHARS:],
    }

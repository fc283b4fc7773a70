"""The RQ job: run one completion's code against its tests, each in a jail.

The worker writes the result under a key of the run before RQ marks the job as done, so a worker that dies in
between costs at most a second run. Whatever the code does is a result; a failure of the sandbox is an error,
which the reward service retries and never counts as a zero.

A ground truth is read by `forms.py`, and refused where it tests nothing. A program passes by what it writes,
never by its exit code alone: code that ends early, with `sys.exit(0)` for instance, must not pass. Outputs
and results are judged outside the jail (`comparison.py`). Statements run in another process than the code
(`statements.py`): the code sees neither them nor the proof that they ran to the end.
"""

import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import validate_call
from rq import get_current_job

from tidemill.common.config.reward_kinds import SandboxConfig
from tidemill.common.errors import TidemillError
from tidemill.common.process.shortage import is_machine_fault, make_fault, number_in_text
from tidemill.services.reward.sandbox.bubblewrap import SandboxError
from tidemill.services.reward.sandbox.comparison import is_same_output, is_same_result
from tidemill.services.reward.sandbox.errors import TestsError
from tidemill.services.reward.sandbox.forms import CallTest, OutputTest, Test, read_tests
from tidemill.services.reward.sandbox.jail import KilledJailError, probe_warm, run_program
from tidemill.services.reward.sandbox.preamble import write_imports
from tidemill.services.reward.sandbox.warm import WarmJails

CALLS = Path(__file__).with_name("calls.py").read_text(encoding="utf-8")
STATEMENTS = Path(__file__).with_name("statements.py").read_text(encoding="utf-8")
PYTEST = Path(__file__).with_name("pytest_subset.py").read_text(encoding="utf-8")
SOURCES = (CALLS, STATEMENTS)
"""Programs that are the same in all cases of their form."""


@dataclass(frozen=True, slots=True)
class Case:
    """One test as a program, its input, and what its output must be."""

    source: str
    stdin: str
    before: str = ""
    """Imports that run before the source."""
    expected: str = ""
    accepted: tuple[Any, ...] = ()
    """Of the call of a function: the results that pass."""
    proof: str = ""
    """Written by a program that ran to its end; not the code's to know, except that of a call."""

    def passed(self, result: dict[str, Any]) -> bool:
        if result["outcome"] != "done" or result.get("code") != 0:
            return False
        if not self.proof:
            return is_same_output(result["stdout"], self.expected)
        _, marker, written = result["stdout"].rpartition(self.proof)
        if not marker:
            return False
        return is_same_result(written, list(self.accepted)) if self.accepted else not written.strip()


def make_cases(
    code: str, tests: Any, max_cases: int, columns: Mapping[str, Any] | None = None, packages: bool = False
) -> list[Case]:
    """The programs that test `code`; `forms.py` has the forms of `tests`, and what `columns` may add.

    Raises:
        TestsError: there are none.
    """
    return [_make_case(code, test) for test in read_tests(tests, columns or {}, packages)[:max_cases]]


def _make_case(code: str, test: Test) -> Case:
    if isinstance(test, OutputTest):
        return Case(code, test.stdin, before=write_imports(code), expected=test.expected)
    proof = secrets.token_hex(16)
    order: dict[str, Any] = {"proof": proof, "code": code}
    if isinstance(test, CallTest):
        imports = write_imports(code, {test.name})
        order |= {"imports": imports, "name": test.name, "arguments": test.arguments}
        return Case(CALLS, json.dumps(order), accepted=tuple(test.accepted), proof=proof)
    order |= {
        "code": _whole(code, test.setup),
        "imports": f"{write_imports(code + test.setup, test.code_names)}\n{test.setup}",
        "setup": f"{write_imports(test.text + test.setup, test.code_names)}\n{test.setup}",
        "test": test.text,
        "code_names": sorted(test.code_names),
        "case": test.case,
        "pytest": PYTEST,
    }
    return Case(STATEMENTS, json.dumps(order), proof=proof)


def _whole(code: str, setup: str) -> str:
    """The code, after the head of the function where it is only the body, as base models write it."""
    is_body = setup and code.lstrip("\r\n")[:1] in (" ", "\t")
    return f"{setup.rstrip()}\n{code}" if is_body else code


STDIN_FILE = "/dev/stdin"
RESULT_TTL_S = 3600
MAX_SHOWN_CHARS = 500
LATE = {"outcome": "timeout", "code": None, "stdout": "", "stderr": "total_s is used up", "wall_s": 0.0}
PROBE = [Case("import random\nprint(6 * 7)", "", expected="42")]
PROBE_LIMITS = {"time_s": 60.0, "total_s": 60.0}
REMEDY = (
    "Nothing is run without a jail. It takes bubblewrap and libseccomp (apt install "
    "bubblewrap libseccomp2) and user namespaces: the sysctls user.max_user_namespaces and "
    "kernel.apparmor_restrict_unprivileged_userns may forbid them; in Docker start the worker with "
    "--security-opt seccomp=unconfined (and apparmor=unconfined on Ubuntu), or on a machine of its own."
)
BOUNDED = ("max_cases", "time_s", "total_s", "memory_mb", "file_mb")


def run_code_of(
    own_run: str, configs: Sequence[SandboxConfig], warm: WarmJails | None = None
) -> Callable[..., dict[str, Any]]:
    """The only function that sandbox workers of `own_run` execute; `configs` bound what jobs ask for."""

    @validate_call
    def run_code(
        run_id: str,
        job_id: str,
        code: str,
        tests: Any,
        config: SandboxConfig,
        columns: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        if run_id != own_run:
            raise ValueError(f"this worker is of run {own_run}, and the job of {run_id}")
        job = get_current_job()
        if job is None or job.id != job_id:
            raise ValueError(f"the job is not {job_id}, whose result it would write")
        return run_tests(code, tests, within(config, configs), columns, warm)

    return run_code


def within(asked: SandboxConfig, configs: Sequence[SandboxConfig]) -> SandboxConfig:
    """The limits that a job asks for, cut to those of the worker's run: a job must not loosen its jail."""
    limits: dict[str, Any] = {}
    for name in BOUNDED:
        highest = max(getattr(config, name) for config in configs)
        limits[name] = min(getattr(asked, name), highest)
    limits["packages"] = asked.packages and any(config.packages for config in configs)
    return asked.model_copy(update=limits)


def run_tests(
    code: str, tests: Any, config: SandboxConfig, columns: Mapping[str, Any] | None = None,
    warm: WarmJails | None = None,
) -> dict[str, Any]:  # fmt: skip
    """How many tests passed, or why none could be run.

    Raises:
        MachineFaultError: this machine is short of something: the job is for another one.
    """
    try:
        cases = make_cases(code, tests, config.max_cases, columns, config.packages)
    except TestsError as error:
        return {"error": str(error), "is_final": True}
    try:
        results = run_cases(cases, config, warm)
    except (SandboxError, OSError) as error:
        # Bubblewrap starts processes, too, and says in words why it cannot.
        number = number_in_text(str(error))
        if number:
            raise make_fault(number, "a jail could not be set up", str(error)) from None
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


def run_cases(
    cases: Sequence[Case], config: SandboxConfig, warm: WarmJails | None = None
) -> list[dict[str, Any]]:
    """The result of each case (`jail.run_program`).

    Raises:
        SandboxError: a jail could not be set up.
    """
    deadline = time.monotonic() + config.total_s
    jails = warm
    results: list[dict[str, Any]] = []
    for case in cases:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            results.append(LATE)
            continue
        try:
            result = run_program(
                case.source,
                case.stdin,
                config,
                min(config.time_s, left_s),
                case.before,
                # The input of other cases holds their proof.
                has_file=not case.proof and STDIN_FILE in case.source,
                warm=jails,
            )
        except KilledJailError:
            raise
        except SandboxError as error:
            raise SandboxError(f"no jail can be set up here: {error}. {REMEDY}") from None
        results.append(result)
        if result["lost_s"]:
            # Not the code's time. The cases after it get jails of their own, so no job loses more than once.
            deadline += result["lost_s"]
            jails = None
    return results


def probe(config: SandboxConfig) -> None:
    """Check that code can be run on this machine. Raises SandboxError: it cannot."""
    (result,) = run_cases(PROBE, config.model_copy(update=PROBE_LIMITS))
    if not PROBE[0].passed(result):
        raise SandboxError(f"the sandbox cannot run Python here: {result['stderr'] or result['outcome']}")


def make_warm_jails(configs: Sequence[SandboxConfig]) -> tuple[WarmJails | None, str]:
    """Jails that are ready for such programs, and a sentence that says so; None, and why there are none.

    Where this machine is short of something, they are tried again later."""
    warm = WarmJails(SOURCES)
    (case,) = PROBE
    try:
        for config in configs:
            result = probe_warm(warm, config.model_copy(update=PROBE_LIMITS), case.source, case.before)
            if not case.passed(result):
                raise SandboxError(f"it cannot run Python: {result['stderr'] or result['outcome']}")
    except (TidemillError, OSError) as error:
        warm.close()
        if is_machine_fault(error) or number_in_text(str(error)):
            warm.note_failure()
            return (
                warm,
                f"programs are run in a jail that is made for each, until one can be ready here: {error}",
            )
        return None, f"each program is run in a jail that is made for it, because none is ready here: {error}"
    return warm, "programs are run in a jail that is ready"

"""The RQ job: run one completion's code against its tests, each in a jail, and leave the result in Redis.

The result is written under a key of the run before RQ marks the job as done, so a worker that dies in between
costs at most a second run. Whatever the code does is a result; a failure of the sandbox is an error, which
the reward service retries and never counts as a zero.

A program passes by what it writes, never by its exit code alone: code that ends early, with `sys.exit(0)` for
instance, must not pass. Outputs and results are judged outside the jail. Statements run in another process
than the code (`statements.py`): the code sees neither them nor the proof that they ran to the end.
"""

import json
import math
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import validate_call
from rq import get_current_job

from tidemill.common.config.reward_kinds import SandboxConfig
from tidemill.common.errors import RewardError
from tidemill.common.wire.keys import Keys
from tidemill.services.jobs.sandbox.jail import SandboxError, run_program

TOLERANCE = 1e-6
CALL = """
import json as _json, sys as _sys
_arguments = [_json.loads(line) for line in _sys.stdin.read().splitlines() if line.strip()]
_scope = {{"__name__": "__solution__"}}
exec(compile({code!r}, "solution.py", "exec"), _scope)
_holder = _scope["Solution"]() if "Solution" in _scope and {name!r} not in _scope else None
_function = getattr(_holder, {name!r}) if _holder is not None else _scope[{name!r}]
_sys.stdout.write("\\n{proof}" + _json.dumps(_function(*_arguments), default=list))
"""
STATEMENTS = Path(__file__).with_name("statements.py").read_text(encoding="utf-8")


class TestsError(RewardError):
    """The ground truth holds no tests that can be run."""


@dataclass(frozen=True, slots=True)
class Case:
    """One test: the program, its input, and what its output must be."""

    source: str
    stdin: str
    expected: str
    proof: str = ""
    is_call: bool = False

    def passed(self, result: dict[str, Any]) -> bool:
        if result["outcome"] != "done" or result.get("code") != 0:
            return False
        if not self.proof:
            return _is_same_text(result["stdout"], self.expected)
        _, marker, rest = result["stdout"].rpartition(self.proof)
        if not marker:
            return False
        return _is_same_value(rest, self.expected) if self.is_call else not rest.strip()


def make_cases(code: str, tests: Any, max_cases: int) -> list[Case]:
    """The programs that test `code`; see `SandboxConfig` for the forms of `tests`.

    Raises:
        TestsError: there are none.
    """
    tests = _decoded(tests)
    if isinstance(tests, list):
        tests = {"assert_case": tests}
    if isinstance(tests, str) and tests.strip():
        tests = {"test": tests}
    if not isinstance(tests, dict):
        raise TestsError(
            f"the ground truth is {str(tests)[:80]!r}; expected a map with tests, see the README"
        )
    if asserts := tests.get("assert_case"):
        asserts = [asserts] if isinstance(asserts, str) else asserts
        if not isinstance(asserts, list):
            raise TestsError(f"assert_case is {str(asserts)[:80]!r}; expected a list of statements")
        return [_assertion(code, str(test)) for test in asserts[:max_cases]]
    if tests.get("test"):
        call = f"\ncheck({tests['entry_point']})" if tests.get("entry_point") else ""
        return [_assertion(code, f"{tests['test']}{call}")]
    inputs, outputs = tests.get("inputs"), tests.get("outputs")
    if (
        not isinstance(inputs, list)
        or not isinstance(outputs, list)
        or len(inputs) != len(outputs)
        or not inputs
    ):
        raise TestsError(
            f"the ground truth has {', '.join(map(str, list(tests)[:6])) or 'nothing'}; expected inputs and "
            "outputs of one length, assert_case, or test"
        )
    pairs: Sequence[tuple[Any, Any]] = list(zip(inputs, outputs, strict=True))[:max_cases]
    if name := tests.get("fn_name"):
        return [_call(code, str(name), given, expected) for given, expected in pairs]
    return [Case(code, _as_text(given), _as_text(expected)) for given, expected in pairs]


def _decoded(tests: Any) -> Any:
    """`tests` decoded, if it is JSON text, as datasets keep it; otherwise unchanged."""
    if isinstance(tests, str):
        try:
            return json.loads(tests)
        except ValueError:
            return tests
    return tests


def _assertion(code: str, test: str) -> Case:
    proof = secrets.token_hex(16)
    stdin = json.dumps({"proof": proof, "code": code, "test": test})
    return Case(STATEMENTS, stdin, "", proof=proof)


def _call(code: str, name: str, given: Any, expected: Any) -> Case:
    if not isinstance(given, str | list):
        raise TestsError(f"an input of {name} is {str(given)[:80]!r}; expected a list of its arguments")
    proof = secrets.token_hex(16)
    stdin = given if isinstance(given, str) else "\n".join(json.dumps(value) for value in given)
    source = CALL.format(code=code, name=name, proof=proof)
    wanted = expected if isinstance(expected, str) else json.dumps(expected)
    return Case(source, stdin, wanted, proof=proof, is_call=True)


def _as_text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _is_same_text(got: str, expected: str) -> bool:
    """Whether lines are equal up to trailing blanks, or else all words, numbers up to rounding."""
    lines, wanted = ([line.rstrip() for line in text.rstrip().split("\n")] for text in (got, expected))
    if lines == wanted:
        return True
    words, wanted_words = got.split(), expected.split()
    return len(words) == len(wanted_words) and all(map(_is_same_word, words, wanted_words))


def _is_same_word(got: str, expected: str) -> bool:
    if got == expected:
        return True
    try:
        return _is_close(float(got), float(expected))
    except ValueError:
        return False


def _is_same_value(got: str, expected: str) -> bool:
    """Whether both are equal JSON. A single result that the dataset wraps into a list is accepted."""
    try:
        value, wanted = json.loads(got), json.loads(expected)
    except (ValueError, RecursionError):  # the second where code returns very deeply nested lists
        return got.strip() == expected.strip()
    return _equal(value, wanted) or (
        isinstance(wanted, list) and len(wanted) == 1 and _equal(value, wanted[0])
    )


def _equal(value: Any, wanted: Any) -> bool:
    if isinstance(value, float) or isinstance(wanted, float):
        both = isinstance(value, (int, float)) and isinstance(wanted, (int, float))
        return both and _is_close(value, wanted)
    if isinstance(value, list) and isinstance(wanted, list):
        return len(value) == len(wanted) and all(map(_equal, value, wanted))
    return bool(value == wanted)


def _is_close(value: float, wanted: float) -> bool:
    try:
        return math.isclose(value, wanted, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    except OverflowError:  # a whole number beyond all floats
        return value == wanted


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


def run_code_of(own_run: str, configs: Sequence[SandboxConfig]) -> Callable[..., None]:
    """The only function that sandbox workers of `own_run` execute; `configs` bound what jobs ask for."""

    @validate_call
    def run_code(run_id: str, job_id: str, code: str, tests: Any, config: SandboxConfig) -> None:
        if run_id != own_run:
            raise ValueError(f"this worker is of run {own_run}, and the job of {run_id}")
        job = get_current_job()
        if job is None or job.id != job_id:
            raise ValueError(f"the job is not {job_id}, whose result it would write")
        result = run_tests(code, tests, within(config, configs))
        job.connection.set(Keys(run_id).sandbox_result(job_id), json.dumps(result), ex=RESULT_TTL_S)

    return run_code


def within(asked: SandboxConfig, own: Sequence[SandboxConfig]) -> SandboxConfig:
    """The limits that a job asks for, cut to those of the worker's run: a job must not loosen its jail."""
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
    for case in cases:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            results.append(LATE)
            continue
        try:
            results.append(run_program(case.source, case.stdin, config, min(config.time_s, left_s)))
        except SandboxError as error:
            raise SandboxError(f"no jail can be set up here: {error}. {REMEDY}") from None
    return results


def probe(config: SandboxConfig) -> None:
    """Check that code can be run on this machine. Raises SandboxError: it cannot."""
    (result,) = run_cases(PROBE, config.model_copy(update={"time_s": 60.0, "total_s": 60.0}))
    if not PROBE[0].passed(result):
        raise SandboxError(f"the sandbox cannot run Python here: {result['stderr'] or result['outcome']}")

"""Whatever code writes is judged, and a job's worker decides how far its limits go."""

import json
from typing import Any

import pytest

from tidemill.common.config.reward_kinds import SandboxConfig
from tidemill.services.reward.sandbox.job import make_cases, run_code_of, run_tests, within


def passed(expected: Any, written: str) -> bool:
    (case,) = make_cases("", {"fn_name": "f", "inputs": [[1]], "outputs": [expected]}, 1)
    return case.passed({"outcome": "done", "code": 0, "stdout": case.proof + written})


@pytest.mark.parametrize(
    ("expected", "written"),
    [
        (1.5, "1" + "0" * 400),
        ([0.5, 1.5], "[0.5, 1" + "0" * 400 + "]"),
        (1, "[" * 100_000 + "]" * 100_000),
        (1, "[" * 100_000),
        (1, "9" * 10_000),
        (1.0, "NaN"),
        (1.0, "Infinity"),
    ],
    ids=["large", "large in a list", "nested", "cut off", "too long a number", "no number", "infinite"],
)
def test_odd_answers_are_wrong(expected: Any, written: str) -> None:
    assert not passed(expected, written)


def test_large_whole_numbers_are_compared_as_they_are() -> None:
    assert passed(10**400, "1" + "0" * 400)
    assert not passed(10**400, "1.5")


def test_one_statement_needs_no_list() -> None:
    (case,) = make_cases("", {"assert_case": "assert f(1) == 1"}, 5)
    assert json.loads(case.stdin)["test"] == "assert f(1) == 1"


@pytest.mark.parametrize(
    "tests",
    [
        {"fn_name": "f", "inputs": [1], "outputs": [1]},
        {"fn_name": "f", "inputs": [{"a": 1}], "outputs": [1]},
        {"assert_case": {"a": 1}},
    ],
)
def test_tests_of_another_form_are_a_failure_in_words_and_not_of_the_sandbox(tests: Any) -> None:
    result = run_tests("", tests, SandboxConfig())
    assert result["is_final"] and "expected" in result["error"]


OWN = [SandboxConfig(memory_mb=256, packages=False), SandboxConfig(memory_mb=512, time_s=2.0)]


def test_who_asks_does_not_decide_how_safe_it_is() -> None:
    asked = SandboxConfig(memory_mb=1 << 20, time_s=3600.0, packages=True)
    limits = within(asked, OWN)
    assert (limits.memory_mb, limits.packages) == (512, False)
    assert limits.time_s == 6.0
    assert within(OWN[1], OWN) == OWN[1]


def test_a_job_of_another_run_or_of_another_id_is_refused() -> None:
    run_code = run_code_of("mine", OWN)
    with pytest.raises(ValueError, match="the job of yours"):
        run_code("yours", "1", "print()", {}, {})
    with pytest.raises(ValueError, match="whose result it would write"):
        run_code("mine", "1", "print()", {}, {})
    with pytest.raises(ValueError, match="memory_mb"):
        run_code("mine", "1", "print()", {}, {"memory_mb": -1})

"""Whose fault the exception of an agent's program is."""

import json
import traceback

import pytest

from tidemill.services.rollout.environments.program_errors import cause_in, cause_of


def raised_from(error: Exception, cause: BaseException) -> Exception:
    error.__cause__ = cause
    return error


def framework(package: str, name: str) -> Exception:
    """An exception of a package that is not installed here."""
    error: Exception = type(name, (Exception,), {"__module__": f"{package}.errors.deep"})("wrong")
    return error


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (json.JSONDecodeError("x", "y", 0), "model"),
        (framework("pydantic_ai", "UnexpectedModelBehavior"), "model"),
        (framework("agents", "ModelBehaviorError"), "model"),
        (framework("another", "ModelBehaviorError"), "unknown"),
        (KeyError("x"), "unknown"),
        (FileNotFoundError("x"), "machine"),
        (framework("openai", "APIConnectionError"), "machine"),
        (raised_from(framework("instructor", "InstructorRetryException"), ConnectionError()), "machine"),
        (raised_from(RuntimeError(), json.JSONDecodeError("x", "y", 0)), "unknown"),
        (ExceptionGroup("two", [json.JSONDecodeError("x", "y", 0)] * 2), "model"),
        (ExceptionGroup("two", [json.JSONDecodeError("x", "y", 0), OSError()]), "machine"),
        (ExceptionGroup("two", [json.JSONDecodeError("x", "y", 0), KeyError()]), "unknown"),
    ],
)
def test_the_class_of_an_exception_says_whose_fault_it_is(error: BaseException, cause: str) -> None:
    assert cause_of(error) == cause


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("import json; json.loads('x')", "model"),
        ("import pydantic; pydantic.TypeAdapter(int).validate_python('x')", "model"),
        ("open('/no/such/file')", "machine"),
        ("import no_such_module", "machine"),
        ("{}['x']", "unknown"),
    ],
)
def test_so_does_the_traceback_of_a_command(code: str, cause: str) -> None:
    try:
        exec(code, {})
    except Exception:
        assert cause_in(f"working\n{traceback.format_exc()}", 1) == cause


def test_an_exit_code_without_a_traceback_says_nothing_and_one_of_a_signal_that_it_was_killed() -> None:
    assert cause_in("no browser\nKeyError: x", 7) == "unknown"
    assert [cause_in("", code) for code in (-9, 137)] == ["machine", "machine"]

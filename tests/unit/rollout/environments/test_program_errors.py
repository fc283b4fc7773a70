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


def traceback_of(code: str) -> str:
    try:
        exec(code, {})
    except Exception:
        return f"working\n{traceback.format_exc()}"
    raise AssertionError


@pytest.mark.parametrize(
    ("output", "code", "cause"),
    [
        (traceback_of("import json; json.loads('x')"), 1, "model"),
        (traceback_of("import pydantic; pydantic.TypeAdapter(int).validate_python('x')"), 1, "model"),
        (traceback_of("open('/no/such/file')"), 1, "machine"),
        (traceback_of("import no_such_module"), 1, "machine"),
        (traceback_of("{}['x']"), 1, "unknown"),
        ("no browser\nKeyError: x", 7, "unknown"),
        ("", -9, "machine"),
        ("", 137, "machine"),
        ("docker: Cannot connect to the Docker daemon.", 125, "machine"),
        ("", 255, "machine"),
    ],
)
def test_so_do_the_traceback_and_the_exit_code_of_a_command(output: str, code: int, cause: str) -> None:
    assert cause_in(output, code) == cause

"""What tests use of pytest, and how one test function or method is run; for the process of the tests in a
jail.

Standard library only: `statements.py` runs this file as the module `pytest`. There are `raises`, `approx`,
`fixture` (functions of the tests, also with `yield`), `mark.parametrize`, `param` and `fail`; other marks do
nothing. What is not here is refused before anything runs (`statement_checks.py`).
"""

import inspect
import itertools
import math
import numbers
import re
import unittest
from typing import Any

REL = 1e-6
ABS = 1e-12


class Failed(AssertionError):
    """A test that failed by `fail`, or because nothing was raised."""


def fail(reason: str = "", pytrace: bool = True) -> None:
    raise Failed(reason)


def main(*args: Any, **named: Any) -> int:
    """Does nothing: each test is run by `run_case`."""
    return 0


class _Raised:
    """What `raises` gives: `value` and `type` of the exception."""

    value: Any = None
    type: Any = None

    def match(self, pattern: str) -> bool:
        assert re.search(pattern, str(self.value)), f"{pattern!r} does not match {self.value!r}"
        return True


class _Raises:
    def __init__(self, expected: Any, match: "str | None") -> None:
        self._expected = expected
        self._match = match
        self._raised = _Raised()

    def __enter__(self) -> _Raised:
        return self._raised

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        if kind is None:
            raise Failed(f"{self._expected} was not raised")
        if not issubclass(kind, self._expected):
            return False
        self._raised.type = kind
        self._raised.value = error
        if self._match is not None:
            self._raised.match(self._match)
        return True


def raises(expected: Any, *args: Any, match: "str | None" = None, **named: Any) -> Any:
    context = _Raises(expected, match)
    if not args:
        return context
    with context as raised:
        args[0](*args[1:], **named)
    return raised


class _Approx:
    """Equal to numbers, or lists and maps of them, within a tolerance."""

    __array_priority__ = 100
    __array_ufunc__ = None

    def __init__(self, expected: Any, rel: "float | None", abs: "float | None") -> None:
        self._expected = expected
        self._rel = rel
        self._abs = abs

    def __eq__(self, value: Any) -> bool:
        return self._is_close(value, self._expected)

    def _is_close(self, value: Any, expected: Any) -> bool:
        if hasattr(expected, "tolist"):
            expected = expected.tolist()
        if hasattr(value, "tolist"):
            value = value.tolist()
        if isinstance(expected, dict):
            is_same = isinstance(value, dict) and value.keys() == expected.keys()
            return is_same and all(self._is_close(value[key], expected[key]) for key in expected)
        if isinstance(expected, (list, tuple)):
            is_same = isinstance(value, (list, tuple)) and len(value) == len(expected)
            return is_same and all(map(self._is_close, value, expected))
        if value == expected:
            return True
        if isinstance(value, bool) or not isinstance(value, numbers.Number):
            return False  # an object of the code decides itself what `-` gives
        if self._rel is None and self._abs is not None:
            tolerance = self._abs
        else:
            rel = REL if self._rel is None else self._rel
            tolerance = max(rel * abs(expected), ABS if self._abs is None else self._abs)
        difference = abs(value - expected)
        return bool(difference <= tolerance) and not math.isinf(difference)

    __hash__ = None  # type: ignore[assignment]


def approx(
    expected: Any, rel: "float | None" = None, abs: "float | None" = None, nan_ok: bool = False
) -> _Approx:
    return _Approx(expected, rel, abs)


class _Param:
    def __init__(self, values: "tuple[Any, ...]") -> None:
        self.values = values


def param(*values: Any, marks: Any = (), id: Any = None) -> _Param:
    return _Param(values)


class _Mark:
    """`mark.parametrize` notes names and values at the function; all other marks do nothing."""

    def __getattr__(self, name: str) -> Any:
        def mark(*args: Any, **named: Any) -> Any:
            if name != "parametrize" and len(args) == 1 and not named and callable(args[0]):
                return args[0]
            return lambda function: (
                _parametrized(function, *args, **named) if name == "parametrize" else function
            )

        return mark


mark = _Mark()


def _parametrized(function: Any, argnames: Any, argvalues: Any, **_: Any) -> Any:
    names = [name.strip() for name in argnames.split(",")] if isinstance(argnames, str) else list(argnames)
    rows = []
    for values in argvalues:
        if isinstance(values, _Param):
            values = values.values
        elif len(names) == 1:
            values = (values,)
        rows.append(dict(zip(names, values, strict=True)))
    function.parameters = [*getattr(function, "parameters", []), rows]
    return function


def fixture(*args: Any, autouse: bool = False, **_: Any) -> Any:
    def mark_as_fixture(function: Any) -> Any:
        function.is_fixture = True
        function.is_autouse = autouse
        return function

    return mark_as_fixture(args[0]) if args else mark_as_fixture


def run_case(scope: "dict[str, Any]", name: str) -> None:
    """Run a test function, or a method of a test class, with its fixtures and all of its parameters."""
    holder, _, method = name.rpartition(".")
    if not holder:
        _run_function(scope, scope[name], None)
        return
    kind = scope[holder]
    if issubclass(kind, unittest.TestCase):
        result = unittest.TestResult()
        unittest.TestSuite([kind(method)]).run(result)
        problems = result.errors + result.failures + result.skipped
        assert result.testsRun == 1 and result.wasSuccessful() and not problems, problems
        return
    instance = kind()
    for setup in ("setup_class", "setup_method", "setup"):
        function = getattr(instance, setup, None)
        if function is not None and not getattr(function, "is_fixture", False):
            function(*[None] * len(inspect.signature(function).parameters))
    _run_function(scope, getattr(instance, method), instance)


def _run_function(scope: "dict[str, Any]", function: Any, instance: Any) -> None:
    rows = getattr(function, "parameters", [])
    assert all(rows), "there are no parameters to run it with"
    for setting in itertools.product(*rows):
        values = {name: value for row in setting for name, value in row.items()}
        _run_once(scope, function, instance, values)


def _run_once(scope: "dict[str, Any]", function: Any, instance: Any, values: "dict[str, Any]") -> None:
    generators: list[Any] = []
    values = dict(values)

    def value_of(name: str) -> Any:
        if name not in values:
            function = getattr(instance, name, None) or scope[name]
            values[name] = called(function)
        return values[name]

    def called(function: Any) -> Any:
        result = function(**{each: value_of(each) for each in needed_by(function)})
        if inspect.isgenerator(result):
            generators.append(result)
            return next(result)
        return result

    def needed_by(function: Any) -> "list[str]":
        parameters = inspect.signature(function).parameters.values()
        return [each.name for each in parameters if each.default is each.empty or each.name in values]

    members = {name: getattr(instance, name) for name in dir(instance)} if instance is not None else {}
    for name, member in {**scope, **members}.items():
        if vars_of(member).get("is_autouse") is True:
            value_of(name)
    arguments = {name: value_of(name) for name in needed_by(function)}
    function(**arguments)
    for generator in reversed(generators):
        next(generator, None)


def vars_of(value: Any) -> "dict[str, Any]":
    """Attributes of a function; nothing of other objects, which may be of the code."""
    function = getattr(value, "__func__", value) if inspect.ismethod(value) else value
    return vars(function) if inspect.isfunction(function) else {}

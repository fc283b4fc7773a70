"""Outputs and results are compared as contests mean them: integers exactly, lines as lines."""

from typing import Any

import pytest

from tidemill.services.reward.sandbox.comparison import is_same_output, is_same_result


@pytest.mark.parametrize(("written", "expected"), [
    ("3", "3\n"), ("3 \n\n", "3"), ("  1  2", "1 2"), ("a\nb", "a\nb\n"),
    ("1.0", "1"), ("1", "1.0"), ("-0", "0"), ("+5", "5"), ("1e5", "100000"),
    ("0.3333333333333", "0.3333333334"), ("1e-7", "0.0000001"), ("0.1", "0.10"), ("1e-12", "0.0"),
    ("99999999999999999999.5", "99999999999999999999.50000001"),
    ("YES", "YES"), ("nan", "nan"), ("0101", "0101"),
])  # fmt: skip
def test_the_same_output(written: str, expected: str) -> None:
    assert is_same_output(written, expected)


@pytest.mark.parametrize(("written", "expected"), [
    ("123456889", "123456789"), ("1000001", "1000000"), ("20240102", "20240101"), ("3.0000001", "3"),
    ("10000000000000000000000001", "10000000000000000000000000"),
    ("0.0000009", "0.0000001"), ("0.33", "0.3333333"), ("1.5", "1.6"),
    ("1 2 3 4", "1 2\n3 4"), ("1\n2", "1 2"), ("a\n\nb", "a\nb"), ("1 2", "1"), ("1", "1 1"),
    ("Yes", "YES"), ("101", "0101"), ("007", "7"), ("nan", "1.0"), ("inf", "1.0"), ("1_0", "10"),
    ("", "0"), (".", "0"), ("1e9999999999", "1.0"), ("٣", "3"), ("2e307", "1e308"),
])  # fmt: skip
def test_another_output(written: str, expected: str) -> None:
    assert not is_same_output(written, expected)


@pytest.mark.parametrize(("written", "expected"), [
    ("3", 3), ("3.0", 3), ("3", 3.0), ("0.30000000000000004", 0.3), ('"a"', "a"), ("null", None),
    ("true", True),
    ('{"mean": 0.333333333, "n": [1, 2.0]}', {"mean": 1 / 3, "n": [1, 2]}),
])  # fmt: skip
def test_the_same_result(written: str, expected: Any) -> None:
    assert is_same_result(written, [expected])


@pytest.mark.parametrize(("written", "expected"), [
    ("4", 3), ("3.0000001", 3), ("123456889", 123456789), ("true", 1), ("1", True), ('"3"', 3), ("3", "3"),
    ('{"a": 1}', {"a": 1, "b": 2}), ('{"a": 0.34}', {"a": 0.333333}), ("[1, 2]", [1]), ("[1]", [[1]]),
    ("null", 0),
    ("", 3), ("3 4", 3), ("NaN", 1.0), ("[" * 100_000, 3), ("9" * 10_000, 3),
])  # fmt: skip
def test_another_result(written: str, expected: Any) -> None:
    assert not is_same_result(written, [expected])

"""What fails is counted by its cause, and its reason names the user's line."""

import json
from functools import partial

import pytest

from tidemill.common.process.failures import (
    MAX_CAUSES,
    OTHER,
    FailureLog,
    added_up,
    cause_of,
    doubling,
    shorten,
)
from tidemill.common.process.users_code import defined_at, raised_at


def parses(text: str) -> None:
    json.loads(text)  # raises within the library


def test_a_reason_names_the_users_line_and_not_the_librarys() -> None:
    first = parses.__code__.co_firstlineno
    with pytest.raises(ValueError) as caught:
        parses("{")
    assert raised_at(caught.value) == f"test_failures.py, line {first + 1}"
    assert defined_at(parses) == f"test_failures.py, line {first}"
    assert raised_at(ValueError("never raised")) == "" and defined_at(len) == ""


class Called:
    def __call__(self) -> None: ...


def test_a_partial_and_an_object_are_defined_where_their_function_is() -> None:
    called = Called.__call__.__code__.co_firstlineno
    first = parses.__code__.co_firstlineno
    assert defined_at(partial(partial(parses), "{")) == f"test_failures.py, line {first}"
    assert defined_at(Called()) == f"test_failures.py, line {called}"


@pytest.mark.parametrize(
    ("first", "second", "is_the_same"),
    [
        ("KeyError: 'a' (my.py, line 4)", "KeyError: 'b' (my.py, line 4)", True),
        ("KeyError: 'a' (my.py, line 4)", "KeyError: 'a' (my.py, line 5)", False),
        ("KeyError: 'a' (my.py, line 4)", "IndexError: 'a' (my.py, line 4)", False),
        ("returned None (my.py, line 4)", "returned None (my.py, line 4)", True),
        (
            "SyntaxError: bad (<string>, line 1) (my.py, line 4)",
            "SyntaxError: bad (<string>, line 2) (my.py, line 4)",
            True,
        ),
        (
            "SyntaxError: bad (<string>, line 1) (my.py, line 4)",
            "SyntaxError: bad (<string>, line 1) (my.py, line 9)",
            False,
        ),
        (
            "no answer in 5 s: score (my.py, line 4), in read (ssl.py, line 1166)",
            "no answer in 5 s: score (my.py, line 4), in connect (socket.py, line 836)",
            True,
        ),
        ("a.example answered 500: id 17", "a.example answered 500: id 18", True),
    ],
)
def test_failures_of_one_cause_are_counted_together(first: str, second: str, is_the_same: bool) -> None:
    assert (cause_of(first) == cause_of(second)) is is_the_same


def test_a_process_keeps_the_last_reason_of_each_cause_and_few_causes() -> None:
    log = FailureLog()
    for letter in "ab":
        log.note("reward r", "error", f"KeyError: '{letter}' (my.py, line 4)", 2)
    (failure,) = log.failures
    assert (failure.what, failure.count) == ("reward r", 4) and "'b'" in failure.reason
    for number in range(3 * MAX_CAUSES):
        log.note("reward r", "error", f"KeyError: 'c' (my.py, line {number})")
    assert len(log.failures) <= MAX_CAUSES + 1
    assert sum(failure.count for failure in log.failures) == 4 + 3 * MAX_CAUSES
    assert any(failure.cause == OTHER for failure in log.failures)


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("KeyError: 'a' (f.py, line 4)", "KeyError: 'a' (f.py, line 4)"),
        ("ValueError: no digit in\n an answer (f.py, line 4)", "ValueError: no digi… (f.py, line 4)"),
        ("a server answered with a page of its own", "a server answered with a page of i…"),
        (f"E: ({'long' * 9}.py, line 4)", "… (longlonglonglonglonglonglonglong"),
    ],
)
def test_a_long_reason_keeps_the_users_line(reason: str, expected: str) -> None:
    assert shorten(reason, 35) == expected and len(expected) <= 35
    log = FailureLog()
    log.note("reward r", "error", f"ValueError: {'x' * 1000} (f.py, line 4)")
    assert log.failures[0].reason.endswith("x… (f.py, line 4)")


def test_counts_of_several_processes_are_added_up_the_most_frequent_first() -> None:
    logs = [FailureLog(), FailureLog()]
    for log in logs:
        log.note("reward r", "error", "KeyError: 'a' (my.py, line 4)", 3)
    logs[1].note("reward r", "timeout", "no result", 10)
    sums = added_up(failure for log in logs for failure in log.failures)
    assert [(failure.kind, failure.count) for failure in sums] == [("timeout", 10), ("error", 6)]


def test_a_doubling_is_the_power_of_two_below() -> None:
    assert [doubling(count) for count in (0, 1, 2, 3, 4, 7, 8, 900)] == [0, 1, 2, 2, 4, 4, 8, 512]

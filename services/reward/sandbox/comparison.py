"""Whether what a program wrote, or a function returned, is what was expected.

* Lines: as many as expected. Blanks at their ends, and blank lines at the ends of the text, do not count.
* Words of a line: the same text, or the same number.
* An expected integer: exactly. `1.0` is 1; 1000001 is not 1000000; `007` and other words with leading zeros
  are text.
* Another expected number: within `RELATIVE` of it, or within `ABSOLUTE`; digits beyond a float's count too.
* `inf`, `nan`, `YES` and `Yes`: text.
* Results of functions: integers, other numbers and texts by the same rules, in lists and maps too.

LiveCodeBench's and verl's graders compare lines too. LiveCodeBench's knows no tolerance; verl's is 1e-5.
"""

import json
import re
from decimal import Decimal, InvalidOperation, localcontext
from typing import Any

RELATIVE = Decimal("1e-6")
ABSOLUTE = Decimal("1e-9")
INTEGER = re.compile(r"[+-]?(0|[1-9]\d*)", re.ASCII)
NUMBER = re.compile(r"[+-]?(0|[1-9]\d*)?(\.\d*)?([eE][+-]?\d{1,4})?", re.ASCII)
FEW_DIGITS = 4000
DIGITS = 60
"""Precision of differences; comparisons for equality are exact."""


def is_same_output(text: str, expected: str) -> bool:
    lines = _lines(text)
    expected_lines = _lines(expected)
    return len(lines) == len(expected_lines) and all(map(_is_same_line, lines, expected_lines))


def is_same_result(written: str, expected: list[Any]) -> bool:
    """Whether a function's result, as JSON, is one of the values that are accepted."""
    try:
        value = json.loads(written, parse_float=Decimal, parse_int=_integer)
    except (ValueError, RecursionError, ArithmeticError):  # not JSON, nested very deeply, a number too large
        return False
    try:
        return any(_is_same_value(value, each) for each in expected)
    except RecursionError:
        return False


def _integer(digits: str) -> int | Decimal:
    """An integer; exact as a Decimal too, where Python refuses to read so many digits."""
    return int(digits) if len(digits) <= FEW_DIGITS else Decimal(digits)


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().split("\n")]


def _is_same_line(line: str, expected: str) -> bool:
    if line == expected:
        return True
    words = line.split()
    expected_words = expected.split()
    return len(words) == len(expected_words) and all(map(_is_same_word, words, expected_words))


def _is_same_word(word: str, expected: str) -> bool:
    if word == expected:
        return True
    number = _number(word)
    expected_number = _number(expected)
    if number is None or expected_number is None:
        return False
    if number == expected_number:
        return True
    return INTEGER.fullmatch(expected) is None and _is_close(number, expected_number)


def _number(word: str) -> Decimal | None:
    if not word.strip("+-.eE") or NUMBER.fullmatch(word) is None:
        return None
    try:
        return Decimal(word)
    except InvalidOperation:
        return None


def _is_same_value(value: Any, expected: Any) -> bool:
    if isinstance(value, bool) or isinstance(expected, bool):
        return value is expected
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(map(_is_same_value, value, expected))
    if isinstance(value, dict) and isinstance(expected, dict):
        return value.keys() == expected.keys() and all(
            _is_same_value(value[key], expected[key]) for key in value
        )
    if isinstance(value, int | float | Decimal) and isinstance(expected, int | float):
        if value == expected:
            return True
        # By its shortest text: 0.1 means a tenth, and not the float next to it.
        return isinstance(expected, float) and _is_close(Decimal(str(value)), Decimal(str(expected)))
    return type(value) is type(expected) and bool(value == expected)


def _is_close(number: Decimal, expected: Decimal) -> bool:
    if not (number.is_finite() and expected.is_finite()):
        return False
    with localcontext() as context:
        context.prec = DIGITS
        context.traps[InvalidOperation] = False
        difference = abs(number - expected)
        return bool(difference <= max(RELATIVE * abs(expected), ABSOLUTE))

"""Calls a function of untrusted code, and writes its result as JSON; the jail runs this file as the program.

Standard library only, and few imports: it runs for each test. The result is compared outside the jail
(`comparison.py`), so whatever the code does to this process is only another way to return a value.
"""

import json
import numbers
import os
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

FEW_DIGITS = 400
"""A Decimal with a larger exponent is written as the nearest float."""


def plain(value: Any) -> Any:
    """The value as JSON knows it: sequences and other iterables as lists, sets as sorted lists, numbers as
    numbers, dates as their ISO text, records as maps of their fields, arrays as nested lists."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if hasattr(type(value), "__members__"):  # of an Enum
        return plain(value.value)
    if isinstance(value, (int, float)):
        return value
    if isinstance(value, Mapping):
        return {_key(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, (set, frozenset)):
        return [plain(inner) for inner in _sorted(value)]
    if isinstance(value, (bytes, bytearray)):
        return value.decode(errors="replace")
    if hasattr(value, "isoformat"):  # dates and times
        return value.isoformat()
    if hasattr(value, "total_seconds"):  # timedelta
        return str(value)
    if hasattr(value, "tolist"):  # numbers and arrays of numpy, tensors, array.array
        return plain(value.tolist())
    if isinstance(value, numbers.Rational):
        return value.numerator if value.denominator == 1 else float(value)
    if hasattr(value, "as_tuple") and hasattr(value, "to_integral_value"):  # Decimal
        is_whole = value.is_finite() and value.adjusted() < FEW_DIGITS and value == value.to_integral_value()
        return int(value) if is_whole else float(value)
    if isinstance(value, numbers.Complex):
        return [value.real, value.imag]
    if hasattr(type(value), "__dataclass_fields__"):
        return {name: plain(getattr(value, name)) for name in value.__dataclass_fields__}
    return [plain(inner) for inner in value]


def _key(key: Any) -> Any:
    return key if isinstance(key, (str, int, float, type(None))) else str(key)


def _sorted(values: Any) -> "list[Any]":
    try:
        return sorted(values)
    except TypeError:
        return sorted(values, key=repr)


def function_of(scope: "dict[str, Any]", name: str) -> Any:
    """A function, or a method of `Solution`, as LeetCode has it."""
    if name not in scope and "Solution" in scope:
        return getattr(scope["Solution"](), name)
    return scope[name]


def main() -> None:
    order = json.load(sys.stdin)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    module = ModuleType("__solution__")
    sys.modules[module.__name__] = module  # dataclasses and pickle look up a class's module
    scope = vars(module)
    exec(compile(order["imports"], "<imports>", "exec", dont_inherit=True), scope)
    exec(compile(order["code"], "solution.py", "exec", dont_inherit=True), scope)
    function = function_of(scope, order["name"])
    returned = function(*order["arguments"])
    if hasattr(returned, "cr_await"):  # of a coroutine
        import asyncio  # here, because it takes long to load

        returned = asyncio.new_event_loop().run_until_complete(returned)
    result = json.dumps(plain(returned))
    sys.stdout.write("\n" + order["proof"] + result)


if __name__ == "__main__":
    main()

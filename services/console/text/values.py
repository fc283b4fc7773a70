"""Messages as plain values, for JSON and for tables; ranges as people type them."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from pydantic import BaseModel

from common.streams.selection import Range


def plain_fields(message: BaseModel) -> dict[str, Any]:
    """The fields of a message; inner models become mappings, arrays stay."""
    return {
        name: value.model_dump() if isinstance(value, BaseModel) else value
        for name, value in message.__dict__.items()
        if name in type(message).model_fields
    }


def jsonable(value: Any) -> Any:
    """The value as JSON has it: arrays as lists, bytes in hex, null for numbers that are not finite."""
    if isinstance(value, np.ndarray):
        return jsonable(value.tolist())
    if isinstance(value, BaseModel):
        return jsonable(value.model_dump())
    if isinstance(value, bytes | bytearray):
        return bytes(value).hex()
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, int | float | str | bool | None) else str(value)


def parse_range(text: str, parse: Callable[[str], float] = float) -> Range | None:
    """`A..B`, `A..`, `..B` or `A`; None where neither end is given.

    Raises:
        ValueError: an end cannot be parsed.
    """
    first, dots, last = text.partition("..")
    low = parse(first.strip()) if first.strip() else None
    high = (parse(last.strip()) if last.strip() else None) if dots else low
    return None if low is None and high is None else (low, high)

"""JSON of data sets, in which nothing is dropped in silence."""

import json
from typing import Any


def parse_json(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is not valid JSON (then a `JSONDecodeError`), or an object has a key twice, of which
            Python's parser would keep the last one.
        RecursionError: it is nested too deep.
    """
    return _DECODER.decode(text)


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    columns = dict(pairs)
    if len(columns) != len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {repeated!r} is there twice in one object")
    return columns


_DECODER = json.JSONDecoder(object_pairs_hook=_make_object)

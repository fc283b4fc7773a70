"""Files of rows: what readers of all kinds have in common."""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

Located = tuple[str, dict[str, Any]]
"""A row's origin, for messages, and its columns."""


class RowFile(ABC):
    """A file whose rows can be read in any order."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of rows."""

    @abstractmethod
    def __getitem__(self, index: int) -> Located:
        """Row number `index`, read from the file now."""

    def __iter__(self) -> Iterator[Located]:
        return (self[index] for index in range(len(self)))


def check_names(names: Sequence[str]) -> None:
    """Raises ValueError: two columns have one name, so that one of them would hide the other."""
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"more than one column is called {repeated[0]!r}; rename all but one")


def in_words(value: Any) -> str:
    """Describes a value in a message: its type, and the beginning of its `repr`."""
    if value is None:
        return "null"
    number = "a number"
    names = {bool: "a boolean", int: number, float: number, str: "text", list: "a list", dict: "an object"}
    kind = names.get(type(value), type(value).__name__)
    text = repr(value)
    if len(text) > 40:
        text = f"{text[:37]}..."
    return f"{kind} {text}"


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

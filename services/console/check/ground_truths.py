"""What reward functions get of the data: the first row's values with their types, and rows that differ."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from tidemill.common.data.dataset import PROMPT, Row

MAX_ROWS = 10_000
"""Rows of a data set that are looked at: those of a streamed one are read from disk for it."""
MAX_CHARACTERS = 60
MAX_KEYS = 12


def describe_arguments(row: Row) -> list[str]:
    """The arguments of a reward function for this row, one a line."""
    keys = [*row.extra, *([PROMPT] if isinstance(row.prompt, list) and PROMPT not in row.extra else [])]
    keys = keys[:MAX_KEYS] + [f"{len(keys) - MAX_KEYS} more"] * (len(keys) > MAX_KEYS)
    return [
        f"ground_truth: {show(row.ground_truth)}",
        f"data_source: {show(row.data_source)}",
        f"extra_info: {', '.join(keys) if keys else 'no keys of the data'}",
        *([f"images: {len(row.images)}, for functions that name images"] if row.images else []),
    ]


def find_odd_truths(rows: Mapping[str, Sequence[Row]]) -> Iterator[str]:
    """A sentence for each data set whose ground truths are of several types, or are null in some rows."""
    for name, members in rows.items():
        counts: Counter[str] = Counter()
        first: dict[str, Row] = {}
        for row in islice(members, MAX_ROWS):
            kind = _kind_of(row.ground_truth)
            counts[kind] += 1
            first.setdefault(kind, row)
        if len(counts) < 2:
            continue
        usual = counts.most_common(1)[0][0]
        others = [
            f"{kind} in {count:,} (first: {first[kind].origin}, {show(first[kind].ground_truth)})"
            for kind, count in counts.items()
            if kind != usual
        ]
        yield (
            f"{name}: the ground truth is {usual} in {counts[usual]:,} rows, and {', '.join(others)}; the "
            "reward gets each as it is"
        )


def show(value: Any) -> str:
    """A value and its type, such as `42 (int)`, shortened."""
    text = "null" if value is None else repr(value)
    if len(text) > MAX_CHARACTERS:
        half = MAX_CHARACTERS // 2
        text = f"{text[:half]} ... {text[-half:]}"
    size = f" of {len(value):,}" if isinstance(value, list | dict | bytes) else ""
    return f"{text} ({type(value).__name__}{size})"


def _kind_of(value: Any) -> str:
    """The type in words. Whole numbers and fractions are numbers: JSON does not keep them apart."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return "a number"
    names: dict[type, str] = {str: "text", bytes: "bytes", list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)

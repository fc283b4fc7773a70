"""What the engine chose beside token ids: arrays by name.

An array has a row for each token of a segment; the rows of all segments follow one another.

* `kept`: the ids that sampling could choose from (top-p, top-k, min-p); a row for each completion token. An
  empty row: all ids.
* `routes`: the experts that each layer's router chose, [layers, k]; a row for each token but the last.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import PlainSerializer, PlainValidator

from tidemill.common.wire.arrays import Int32, is_same
from tidemill.common.wire.segments import Segment

KEPT = "kept"
ROUTES = "routes"
ROUTES_FAULT = "its routes "
"""How the reason begins, if a sample has failed because of its routes."""
VERSION = 1
"""Version of the meaning of these rows."""
NUM_ROWS: Mapping[str, Callable[[Segment], int]] = {
    KEPT: lambda segment: len(segment.completion_ids),
    ROUTES: lambda segment: len(segment.prompt_ids) + len(segment.completion_ids) - 1,
}
"""Name -> number of rows of a segment."""
DTYPES = ("uint8", "uint16", "int32")


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """R rows, of one shape or of different lengths.

    Example: the ids that a token was sampled from, for three tokens: `values` [5, 9, 5, 2, 5, 7] and
    `offsets` [0, 2, 3, 6] are the rows [5, 9], [5] and [2, 5, 7]. Routes have one shape: `values` [R, layers,
    experts chosen].
    """

    values: NDArray[Any]
    """[R, ...]; rows of different lengths are concatenated."""
    offsets: Int32 | None = None
    """[R + 1], where each row begins among `values`, and the end; None: rows of one shape."""

    def __len__(self) -> int:
        return len(self.values) if self.offsets is None else len(self.offsets) - 1

    def __getitem__(self, rows: slice) -> "Rows":
        """The rows of a slice; its step is ignored."""
        first, end, _ = rows.indices(len(self))
        if self.offsets is None:
            return Rows(self.values[first:end])
        # There is one offset more than rows: an empty slice has one, too.
        offsets = self.offsets[first : max(first, end) + 1]
        return Rows(self.values[offsets[0] : offsets[-1]], offsets - offsets[0])

    def take(self, places: NDArray[Any]) -> "Rows":
        """The rows at these places.

        Example: places [2, 0] of the rows [5, 9], [5] and [2, 5, 7]: `counts` [3, 2], the new offsets [0, 3,
        5], `within` [0, 1, 2, 0, 1], `starts` [3, 3, 3, 0, 0]; the rows are [2, 5, 7] and [5, 9].
        """
        if self.offsets is None:
            return Rows(self.values[places])
        counts = np.diff(self.offsets)[places]
        offsets = np.cumsum([0, *counts], dtype=np.int32)
        # For each value, its index within its row, and where this row begins among the old values.
        within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], counts)
        starts = np.repeat(self.offsets[:-1][places], counts)
        return Rows(self.values[starts + within], offsets)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Rows):
            return NotImplemented
        return is_same(self.values, other.values) and is_same(self.offsets, other.offsets)

    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def of_lists(cls, rows: Sequence[Sequence[int] | Int32]) -> "Rows":
        """Rows of different lengths."""
        values = [np.asarray(row, dtype=np.int32) for row in rows]
        offsets = np.cumsum([0, *map(len, values)], dtype=np.int32)
        return cls(np.concatenate([np.zeros(0, np.int32), *values]), offsets)

    @classmethod
    def nothing(cls, num_rows: int) -> "Rows":
        """Empty rows. They have offsets, as rows of different lengths have."""
        return cls(np.zeros(0, np.int32), np.zeros(num_rows + 1, np.int32))

    @classmethod
    def joined(cls, parts: Sequence["Rows"]) -> "Rows":
        """The rows of all parts (at least one), in order."""
        values = np.concatenate([rows.values for rows in parts])
        if parts[0].offsets is None:
            return cls(values)
        counts = [np.diff(rows.offsets) for rows in parts if rows.offsets is not None]
        return cls(values, np.cumsum([0, *np.concatenate(counts)], dtype=np.int32))

    def as_plain(self) -> dict[str, Any]:
        """The map that is sent."""
        plain: dict[str, Any] = {
            "version": VERSION,
            "dtype": str(self.values.dtype),
            "shape": self.values.shape,
            "values": self.values,
        }
        if self.offsets is not None:
            plain["offsets"] = self.offsets
        return plain


def _validated(value: Any) -> Rows:
    """Rows from the map that was sent. Raises ValueError: it is of another version, or inconsistent."""
    if isinstance(value, Rows):
        return value
    if not isinstance(value, dict):
        raise ValueError(f"rows are a map, got {type(value).__name__}")
    version = value.get("version")
    dtype = value.get("dtype")
    shape = value.get("shape")
    offsets = value.get("offsets")
    if version != VERSION:
        raise ValueError(f"version {version} of these rows is not known; update the older side")
    if dtype not in DTYPES or not all(isinstance(n, int) and n >= 0 for n in shape or ()):
        raise ValueError(f"rows of dtype {dtype} and shape {shape}; there are {', '.join(DTYPES)}")
    # Raises ValueError where the bytes do not have this shape.
    values = np.frombuffer(value.get("values", b""), np.dtype(dtype).newbyteorder("<")).reshape(shape)
    if offsets is None:
        return Rows(values)
    offsets = np.frombuffer(offsets, "<i4")
    if values.ndim != 1 or not len(offsets) or offsets[0] or (np.diff(offsets) < 0).any():
        raise ValueError("offsets of rows must begin at 0 and never fall")
    if offsets[-1] != len(values):
        raise ValueError(f"rows end at value {offsets[-1]} of {len(values)}")
    return Rows(values, offsets)


WireRows = Annotated[Rows, PlainValidator(_validated), PlainSerializer(Rows.as_plain)]


def check_rows(rows: Mapping[str, Rows], segments: Sequence[Segment]) -> None:
    """Raises ValueError: names are unknown, or the rows do not fit the tokens of these segments."""
    for name, column in rows.items():
        if name not in NUM_ROWS:
            raise ValueError(f"choices {name!r} are not known; update the older side")
        if len(column) != (expected := sum(map(NUM_ROWS[name], segments))):
            raise ValueError(f"{len(column)} rows of {name} for {expected} tokens")

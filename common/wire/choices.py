"""What the engine chose beside token ids: arrays by name.

An array has a row for each token of a segment; the rows of all segments follow one another.

* `kept`: the ids that sampling could choose from (top-p, top-k, min-p); a row for each completion token. An
  empty row: all ids.
* `routes`: the experts that each layer's router chose, [layers, k]; a row for each token but the last.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
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


@dataclass(frozen=True, slots=True)
class Routing:
    """What the routes of a model have to look like.

    Example: `layers` (1, 3), `num_experts` 8: layers 1 and 3 have a router, and each chooses among 8 experts.
    """

    layers: tuple[int, ...]
    """Numbers of the layers that have a router."""
    num_experts: int


def find_routes_fault(routes: Rows, routing: Routing | None = None) -> str:
    """Why these routes are not what a router chose, as a sentence; empty where they may be.

    A router chooses K different experts for each token. Rows that an engine did not fill in are zeros, which
    name expert 0 K times. With K = 1 such a row cannot be told from a choice of expert 0.

    Args:
        routes: rows [layers, K] of one sample.
        routing: that of the model. Without it, a layer that is zero at every token counts as a layer without
            a router, because engines leave those at zero. If all layers are zero, none of them counts so.
    """
    num_rows, num_layers, _ = routes.values.shape
    if not num_rows:
        return ""
    # [K, R, L], so that each comparison runs over memory in order.
    experts_KRL = np.ascontiguousarray(np.moveaxis(routes.values, -1, 0))
    layers: Sequence[int] = range(num_layers)
    # Rows have the routers' layers alone, or all layers of the model; of these the routers' ones are checked.
    if routing is not None and num_layers != len(routing.layers):
        last_layer = max(routing.layers)
        if last_layer >= num_layers:
            return f"{ROUTES_FAULT}have {num_layers} layers, and the model has a router in layer {last_layer}"
        layers = routing.layers
        experts_KRL = experts_KRL[:, :, list(layers)]
    if routing is not None:
        highest = int(experts_KRL.max())
        if highest >= routing.num_experts:
            return f"{ROUTES_FAULT}name expert {highest}, and the model has {routing.num_experts} a layer"
    is_repeated_RL = _name_one_twice(experts_KRL)
    if routing is None and is_repeated_RL.any():
        has_router_L = experts_KRL.any(axis=(0, 1))
        if has_router_L.any():
            is_repeated_RL &= has_router_L
    if not is_repeated_RL.any():
        return ""
    token, position = np.argwhere(is_repeated_RL)[0].tolist()
    chosen = experts_KRL[:, token, position].tolist()
    num_tokens = int(is_repeated_RL.any(axis=1).sum())
    return (
        f"{ROUTES_FAULT}name an expert twice at {num_tokens} of {num_rows} tokens (first: token {token}, "
        f"layer {layers[position]}, experts {chosen}), which no router does: the engine did not record them "
        "(for vLLM see its issue 54730); use another version of the engine, or set rollout.record_routes: "
        "false"
    )


def _name_one_twice(experts_KRL: NDArray[Any]) -> NDArray[np.bool_]:
    """Where an expert is chosen twice for one token in one layer. Shape [R, L]."""
    is_repeated_RL = np.zeros(experts_KRL.shape[1:], dtype=np.bool_)
    for first_RL, second_RL in combinations(experts_KRL, 2):
        is_repeated_RL |= first_RL == second_RL
    return is_repeated_RL


def check_rows(rows: Mapping[str, Rows], segments: Sequence[Segment]) -> None:
    """Raises ValueError: names are unknown, or the rows do not fit the tokens of these segments."""
    for name, column in rows.items():
        if name not in NUM_ROWS:
            raise ValueError(f"choices {name!r} are not known; update the older side")
        if len(column) != (expected := sum(map(NUM_ROWS[name], segments))):
            raise ValueError(f"{len(column)} rows of {name} for {expected} tokens")

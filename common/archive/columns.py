"""Messages as typed columns and back.

Guarantees: what is read from a row equals what was written into it, byte for byte of its payload. Where the
columns alone would not give the same bytes (a newer release's fields, a value that no column takes, an entry
that cannot be decoded at all), the row keeps the original fields beside them.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin

import numpy as np
import pyarrow as pa

from tidemill.common.streams.entries import Entry, Fields, Garbled, decoded, id_order
from tidemill.common.streams.selection import time_of
from tidemill.common.wire import codec
from tidemill.common.wire.codec import PAYLOAD_FIELD, SCHEMA, VERSION_FIELD
from tidemill.common.wire.messages import Commit, Message, SamplingParams, Trajectory

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
ID, ID_MS, ID_SEQ = "id", "id_ms", "id_seq"
"""The entry's id, and its two numbers."""
ORIGINAL = "original"
"""The fields of the entry as they were, where the other columns do not say everything."""

NUM_TURNS = "num_turns"
"""Turns of a session; null for a single turn, which has none in its record."""

Convert = Callable[[Any], Any]
RawEntry = tuple[str, Fields]


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True, slots=True)
class Column:
    """One field of a message as a column, `give` into it and `take` out of it."""

    name: str
    type: pa.DataType
    give: Convert = _same
    take: Convert = _same
    has_statistics: bool = False
    """Least and greatest value of each row group are kept, so that readers skip what cannot match."""
    repeats: bool = False
    """Values recur, so that a dictionary of them saves room."""
    dtype: Any = None
    """Of numpy, where the field is an array."""


def _clamped(value: int | None) -> int | None:
    """Beyond 64 bits the row keeps the original, and the column the nearest value."""
    return None if value is None else min(max(value, INT64_MIN), INT64_MAX)


def _json(value: Any) -> str | None:
    """JSON, or None for what JSON cannot say: the row keeps the original then."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return None


def _from_json(text: str | None) -> Any:
    return None if text is None else json.loads(text)


_SIMPLE: dict[Any, pa.DataType] = {
    int: pa.int64(),
    float: pa.float64(),
    tuple[str, ...]: pa.list_(pa.string()),
}
"""A row with a field of another type keeps its original."""
_KEY = pa.struct([("ticket", pa.int64()), ("index", pa.int64())])
_DROPPED = pa.struct([("ticket", pa.int64()), ("index", pa.int64()), ("reason", pa.string())])
_SPAN = pa.struct([("version", pa.int64()), ("first_token", pa.int64())])
_FILE = pa.struct([("name", pa.string()), ("num_bytes", pa.int64()), ("checksum", pa.string())])
_SAMPLING = pa.struct(
    [(n, _SIMPLE[f.annotation]) for n, f in SamplingParams.model_fields.items() if f.annotation in _SIMPLE]
)
_FIELDS = pa.list_(pa.struct([("name", pa.binary()), ("value", pa.binary())]))
_NUMBERS = pa.map_(pa.string(), pa.float64())
OUTCOME = ("source", "row", "num_solved", "num_scored")
_OUTCOME = pa.struct([(name, pa.string() if name == "source" else pa.int64()) for name in OUTCOME])


def _without_nulls(row: Mapping[str, Any]) -> dict[str, Any]:
    """A struct without what its message had left out."""
    return {name: value for name, value in row.items() if value is not None}


def _row(names: Sequence[str]) -> tuple[Convert, Convert]:
    """A tuple to a struct and back."""
    return lambda row: dict(zip(names, row, strict=True)), lambda row: tuple(row[name] for name in names)


def _rows(names: Sequence[str]) -> tuple[Convert, Convert]:
    """Tuples to structs and back."""
    return (
        lambda rows: [dict(zip(names, row, strict=True)) for row in rows],
        lambda rows: tuple(tuple(row[name] for name in names) for row in rows),
    )


def _keys_of(minis: Any) -> Any:
    return [[[{"ticket": t, "index": i} for t, i in micro] for micro in mini] for mini in minis]


def _keys_back(minis: Any) -> Any:
    return tuple(tuple(tuple((k["ticket"], k["index"]) for k in micro) for micro in mini) for mini in minis)


_BY_NAME = {
    "prompt_ids": Column("prompt_ids", pa.list_(pa.int32()), dtype=np.int32, repeats=True),
    "completion_ids": Column("completion_ids", pa.list_(pa.int32()), dtype=np.int32),
    "logprobs": Column("logprobs", pa.list_(pa.float32()), dtype=np.float32),
    "teacher_logprobs": Column("teacher_logprobs", pa.list_(pa.float32()), dtype=np.float32),
    "loss_mask": Column("loss_mask", pa.list_(pa.bool_()), dtype=np.bool_),
    "spans": Column("spans", pa.list_(_SPAN), *_rows(("version", "first_token"))),
    "sampling": Column("sampling", _SAMPLING, lambda value: value.model_dump(), _without_nulls),
    "components": Column("components", _NUMBERS, take=dict),
    "metrics": Column("metrics", _NUMBERS, take=dict),
    "advantages": Column("advantages", pa.map_(pa.string(), pa.list_(pa.float64())), take=dict),
    "mini_batches": Column("mini_batches", pa.list_(pa.list_(pa.list_(_KEY))), _keys_of, _keys_back),
    "groups": Column("groups", pa.list_(pa.int64()), list, tuple),
    "dropped": Column("dropped", pa.list_(_DROPPED), *_rows(("ticket", "index", "reason"))),
    "outcome": Column("outcome", _OUTCOME, *_row(OUTCOME)),
    "outcomes": Column("outcomes", pa.list_(_OUTCOME), *_rows(OUTCOME)),
    "sizes": Column("sizes", pa.map_(pa.string(), pa.int64()), take=dict),
    "files": Column("files", pa.list_(_FILE), lambda files: [file.model_dump() for file in files]),
    # Tuples again: with lists no score would equal its columns, and each would keep its original beside them.
    "tries": Column("tries", pa.string(), _json, lambda text: tuple(map(tuple, json.loads(text)))),
    "fields": Column("fields", pa.map_(pa.string(), pa.binary()), take=dict),
    "claim": Column("claim", pa.string(), lambda value: value.model_dump_json(), _from_json),
    "session": Column("session", pa.binary(), lambda value: codec.pack(value, codec.as_plain), codec.unpack),
}
LONG_TEXTS = ("text", "error")
_DERIVED: dict[type[Message], tuple[Column, ...]] = {
    Trajectory: tuple(
        Column(name, pa.int64(), has_statistics=True, repeats=True)
        for name in ("min_version", "max_version", NUM_TURNS)
    ),
    Commit: tuple(Column(name, pa.int64(), has_statistics=True) for name in ("first_ticket", "last_ticket")),
}


@cache
def columns_of(message_type: type[Message]) -> tuple[Column, ...]:
    """The columns of the message's own fields."""
    return tuple(_column(name, field.annotation) for name, field in message_type.model_fields.items())


@cache
def derived_of(message_type: type[Message]) -> tuple[Column, ...]:
    """Columns that follow from the message and are there to be searched by."""
    return _DERIVED.get(message_type, ())


def _column(name: str, annotation: Any) -> Column:
    if name in _BY_NAME:
        return _BY_NAME[name]
    if isinstance(annotation, UnionType):
        annotation = next(part for part in get_args(annotation) if part is not NoneType)
    if annotation is int:
        return Column(name, pa.int64(), _clamped, has_statistics=True, repeats=True)
    if annotation is float:
        return Column(name, pa.float64(), has_statistics=True)
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        return Column(name, pa.string(), str, repeats=True)
    if annotation is str or get_origin(annotation) is Literal:
        return Column(name, pa.string(), repeats=name not in LONG_TEXTS)
    return Column(name, pa.string(), _json, _from_json, repeats=True)


def table_of(raw_entries: Sequence[RawEntry], message_type: type[Message]) -> tuple[pa.Table, list[Message]]:
    """Entries as one table, and the messages of those that can be decoded."""
    records = [decoded(entry_id.encode(), fields, message_type) for entry_id, fields in raw_entries]
    messages = [record.message if isinstance(record, Entry) else None for record in records]
    ids = [id_order(entry_id) for entry_id, _ in raw_entries]
    arrays = {
        ID: pa.array([entry_id for entry_id, _ in raw_entries], pa.string()),
        ID_MS: pa.array([ms for ms, _ in ids], pa.uint64()),
        ID_SEQ: pa.array([sequence for _, sequence in ids], pa.uint64()),
    }
    for columns, value_of in ((columns_of(message_type), _field), (derived_of(message_type), _derived)):
        for column in columns:
            values = [None if m is None else value_of(column.name, m) for m in messages]
            arrays[column.name] = _array(column, values)
    # Read back from the arrays: whatever a column does not take, for not knowing a new field, is lost there.
    columns = columns_of(message_type)
    rows = zip(*(_values(arrays[column.name], column) for column in columns), strict=True)
    kept = [
        None
        if m is not None and _is_exact(m, fields, {c.name: v for c, v in zip(columns, row, strict=True)})
        else [{"name": name, "value": value} for name, value in fields.items()]
        for m, (_, fields), row in zip(messages, raw_entries, rows, strict=True)
    ]
    arrays[ORIGINAL] = pa.array(kept, _FIELDS)
    return pa.table(arrays), [message for message in messages if message is not None]


def records_of(table: pa.Table, message_type: type[Message]) -> Iterator[Entry[Message] | Garbled]:
    """The entries of a table that has all columns, in its order.

    Raises:
        ValidationError: a row holds no message: the file was not written by `table_of`.
    """
    columns = [column for column in columns_of(message_type) if column.name in table.column_names]
    values = [_values(table[column.name].combine_chunks(), column) for column in columns]
    names = [column.name for column in columns]
    originals = table[ORIGINAL].to_pylist()
    for entry_id, original, *row in zip(table[ID].to_pylist(), originals, *values, strict=True):
        if original is not None:
            fields = {item["name"]: item["value"] for item in original}
            yield decoded(entry_id.encode(), fields, message_type)
        else:
            yield Entry(entry_id, message_type.model_validate(dict(zip(names, row, strict=True))))


def raw_entries_of(table: pa.Table, message_type: type[Message]) -> Iterator[RawEntry]:
    """The same entries as they were in the stream."""
    originals = table[ORIGINAL].to_pylist()
    for original, record in zip(originals, records_of(table, message_type), strict=True):
        if original is not None:
            yield record.entry_id, {item["name"]: item["value"] for item in original}
        elif isinstance(record, Entry):
            yield record.entry_id, codec.encode(record.message)


def schema_of(message_type: type[Message]) -> pa.Schema:
    """The schema of a stream's files."""
    return table_of([], message_type)[0].schema


def _is_exact(message: Message, fields: Fields, row: dict[str, Any]) -> bool:
    """Whether what the columns hold of the message gives back the entry's bytes."""
    if fields.keys() != {VERSION_FIELD, PAYLOAD_FIELD} or fields[VERSION_FIELD] != SCHEMA:
        return False
    # Not validated again: what was valid once has the same bytes, or is not the same.
    return codec.encode_payload(type(message).model_construct(**row)) == fields[PAYLOAD_FIELD]


def _field(name: str, message: Message) -> Any:
    return message.__dict__[name]


def _derived(name: str, message: Message) -> int | None:
    if isinstance(message, Trajectory):
        if name == NUM_TURNS:
            return sum(len(segment.turns) for segment in message.segments) if message.session else None
        return _clamped(message.min_version if name == "min_version" else message.max_version)
    assert isinstance(message, Commit)
    tickets = [*message.groups, *(ticket for ticket, _, _ in message.dropped)]
    if not tickets:
        return None
    return _clamped(min(tickets) if name == "first_ticket" else max(tickets))


def _array(column: Column, values: list[Any]) -> pa.Array:
    if column.dtype is not None:
        return _list_array(column, values)
    given = [None if value is None else column.give(value) for value in values]
    try:
        return pa.array(given, column.type)
    except (OverflowError, pa.ArrowException):
        for row, value in enumerate(given):  # some row has what no column takes
            try:
                pa.array([value], column.type)
            except (OverflowError, pa.ArrowException):
                given[row] = None
        return pa.array(given, column.type)


def _list_array(column: Column, values: list[Any]) -> pa.Array:
    """Arrays of numpy as lists, without going through Python's numbers."""
    lengths = [0 if value is None else len(value) for value in values]
    offsets = np.zeros(len(values) + 1, dtype=np.int32)
    np.cumsum(lengths, out=offsets[1:])
    there = [value for value in values if value is not None]
    flat = np.concatenate(there) if there else np.zeros(0, dtype=column.dtype)
    mask = pa.array([value is None for value in values], pa.bool_())
    items = pa.array(flat.astype(column.dtype, copy=False))
    return pa.ListArray.from_arrays(pa.array(offsets), items, type=column.type, mask=mask)


def _values(array: pa.Array, column: Column) -> list[Any]:
    if column.dtype is None:
        return [None if value is None else column.take(value) for value in array.to_pylist()]
    flat = _flat(array.values, column.dtype)
    offsets = array.offsets.to_pylist()
    ends = zip(offsets[:-1], offsets[1:], array.is_valid().to_pylist(), strict=True)
    return [flat[first:last] if is_valid else None for first, last, is_valid in ends]


def _flat(values: pa.Array, dtype: Any) -> np.ndarray[Any, Any]:
    """A view on the numbers of an array without nulls. pyarrow's own way imports pandas where it is."""
    data = values.buffers()[1]
    if data is None:
        return np.zeros(0, dtype=dtype)
    first, last = values.offset, values.offset + len(values)
    if dtype is np.bool_:
        bits = np.unpackbits(np.frombuffer(data, np.uint8), count=last, bitorder="little")
        return bits[first:].astype(np.bool_)
    return np.frombuffer(data, dtype, count=last)[first:]


def widen(bounds: MutableMapping[str, tuple[float, float]], messages: Sequence[Message]) -> None:
    """Let the bounds hold these messages too."""
    for name, values in _measures(messages).items():
        known = [*values, *bounds.get(name, ())]
        if finite := [value for value in known if value is not None and math.isfinite(value)]:
            bounds[name] = (min(finite), max(finite))


def _measures(messages: Sequence[Message]) -> Mapping[str, list[float | None]]:
    """What segments are searched by, over some messages of one type."""
    found: dict[str, list[float | None]] = {"ticket": [], "step": [], "version": [], "time": []}
    for message in messages:
        found["time"].append(time_of(message))
        found["step"].append(getattr(message, "step", None))
        if isinstance(message, Trajectory):
            found["version"] += [message.min_version, message.max_version]
        else:
            found["version"].append(getattr(message, "version", None))
        if isinstance(message, Commit):
            found["ticket"] += [*message.groups, *(ticket for ticket, _, _ in message.dropped)]
        else:
            found["ticket"].append(getattr(message, "ticket", None))
    return found

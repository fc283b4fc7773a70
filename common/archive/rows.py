"""Entries as rows of a Parquet file: the fields as they were on the wire, and a few columns to search by.

Guarantees: what is read from a row is what was written into it, byte for byte. No field of a message is known
here, so none can be lost: readers decode the payload as they decode an entry of Redis. The index columns only
narrow a search; null means that the message has no such field.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import pyarrow as pa

from tidemill.common.streams.entries import Entry, Fields, Garbled, decoded
from tidemill.common.streams.selection import tickets_of, time_of, versions_of
from tidemill.common.wire.codec import PAYLOAD_FIELD, VERSION_FIELD
from tidemill.common.wire.messages import Message

RawEntry = tuple[str, Fields]
ArchivedRecord = Entry[Message] | Garbled

ID = "id"
"""Column of the entry's id."""
SCHEMA_VERSION = "schema"
"""Column of the entry's field `v`."""
PAYLOAD = "payload"
"""Column of the entry's field `p`."""
OTHERS = "other_fields"
"""Column of any other fields of the entry; no release writes one."""
INT64_MIN = -(2**63)
INT64_MAX = 2**63 - 1

_INTEGERS = ("ticket", "last_ticket", "index", "step", "version", "last_version")
_TEXTS = ("worker", "status")
INDEX = (*_INTEGERS, "time", "value", *_TEXTS)
"""Columns to search by.

`ticket` and `last_ticket` are the least and the greatest ticket of a commit, `version` and `last_version` the
least and the greatest version of a trajectory. Other messages have one ticket and one version at most: both
columns of a pair hold it.
"""
SCHEMA = pa.schema(
    [
        (ID, pa.string()),
        *((name, pa.int64()) for name in _INTEGERS),
        *((name, pa.float64()) for name in ("time", "value")),
        *((name, pa.string()) for name in _TEXTS),
        (SCHEMA_VERSION, pa.binary()),
        (PAYLOAD, pa.binary()),
        (OTHERS, pa.map_(pa.binary(), pa.binary())),
    ]
)
BOUNDED = {"ticket": "last_ticket", "step": "step", "version": "last_version", "time": "time"}
"""Quantities with bounds in a segment's footer: column of the least value -> column of the greatest."""


def table_of(raw_entries: Sequence[RawEntry], message_type: type[Message]) -> pa.Table:
    """A row for each entry, with the columns of `SCHEMA`."""
    rows = []
    for entry_id, fields in raw_entries:
        row = {
            ID: entry_id,
            **_index_of(decoded(entry_id.encode(), fields, message_type)),
            SCHEMA_VERSION: fields.get(VERSION_FIELD),
            PAYLOAD: fields.get(PAYLOAD_FIELD),
            OTHERS: [item for item in fields.items() if item[0] not in (VERSION_FIELD, PAYLOAD_FIELD)],
        }
        rows.append(row)
    return pa.Table.from_pylist(rows, SCHEMA)


def raw_entries_of(table: pa.Table, places: Iterable[int] | None = None) -> Iterator[RawEntry]:
    """The entries as they were in the stream, of all rows or those at `places`.

    Raises:
        KeyError: the file is not of this form.
    """
    ids = table[ID]
    schemas = table[SCHEMA_VERSION]
    payloads = table[PAYLOAD]
    others_of_rows = table[OTHERS]
    indices = range(len(table)) if places is None else places
    for index in indices:
        entry_id = ids[index].as_py()
        schema = schemas[index].as_py()
        payload = payloads[index].as_py()
        others = others_of_rows[index].as_py()
        columns = {VERSION_FIELD: schema, PAYLOAD_FIELD: payload}
        fields = {name: value for name, value in columns.items() if value is not None}
        yield entry_id, fields | dict(others)


def records_of(
    table: pa.Table, message_type: type[Message], places: Iterable[int] | None = None
) -> Iterator[ArchivedRecord]:
    for entry_id, fields in raw_entries_of(table, places):
        yield decoded(entry_id.encode(), fields, message_type)


def widen(bounds: MutableMapping[str, tuple[float, float]], table: pa.Table) -> None:
    """Extend `bounds`, column -> (least, greatest), to these rows."""
    for name, last in BOUNDED.items():
        values = [*table[name].to_pylist(), *table[last].to_pylist(), *bounds.get(name, ())]
        # Without NaN, which would exclude rows that match, and infinity, which would exclude no row.
        finite = [value for value in values if value is not None and math.isfinite(value)]
        if finite:
            bounds[name] = (min(finite), max(finite))


def _index_of(record: ArchivedRecord) -> Mapping[str, Any]:
    if isinstance(record, Garbled):
        return {}
    message = record.message
    bounds = {
        "ticket": min(tickets_of(message), default=None),
        "last_ticket": max(tickets_of(message), default=None),
        "version": min(versions_of(message), default=None),
        "last_version": max(versions_of(message), default=None),
    }
    fields = {name: vars(message).get(name) for name in ("index", "step", "value", "worker", "status")}
    columns = bounds | fields
    # Values beyond 64 bits are clamped: the payload has the exact one.
    integers = {name: columns[name] for name in _INTEGERS if columns[name] is not None}
    clamped = {name: min(max(value, INT64_MIN), INT64_MAX) for name, value in integers.items()}
    return columns | clamped | {"time": time_of(message)}

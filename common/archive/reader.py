"""Reads the archive of one stream, opening only what can hold what is asked for.

Guarantees: selected entries come in the order of the stream, or in the reverse of it; never more than one row
group is in memory. Segments are passed over by their manifest, row groups by their statistics, rows by the
columns that the selection asks for; what remains is decided by the messages themselves.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tidemill.common.archive.columns import (
    ID_MS,
    INT64_MAX,
    INT64_MIN,
    NUM_TURNS,
    columns_of,
    derived_of,
    records_of,
)
from tidemill.common.archive.manifest import Manifest, Segment
from tidemill.common.errors import ArchiveError
from tidemill.common.streams.entries import Entry, Garbled, id_order
from tidemill.common.streams.selection import TEXTS, Range, Selection, StreamName
from tidemill.common.wire.messages import Commit, Message, Trajectory

PART_ROWS = 256
"""Rows made into messages at once."""
_PLAIN = re.compile(r"[^\\.^$*+?{}\[\]|()]+")
"""Patterns that mean themselves."""
_TIMES = ("finished_at", "scored_at", "issued_at", "announced_at", "died_at")

Record = Entry[Message] | Garbled


@dataclass(frozen=True, slots=True)
class Condition:
    """Rows may match where `low_column` is at most `high` and `high_column` at least `low`."""

    low_column: str
    high_column: str
    low: float | None
    high: float | None

    @property
    def columns(self) -> set[str]:
        return {self.low_column, self.high_column}

    def mask(self, table: pa.Table) -> pa.ChunkedArray:
        """The rows that may match."""
        lowest, highest = table[self.low_column], table[self.high_column]
        masks = [pc.is_valid(highest)]
        if self.low is not None:
            masks.append(pc.greater_equal(highest, _scalar(self.low, highest.type)))
        if self.high is not None:
            masks.append(pc.less_equal(lowest, _scalar(self.high, lowest.type)))
        return reduce(pc.and_, masks)

    def may_match(self, statistics: dict[str, Any]) -> bool:
        """Whether a row group with these bounds of columns can hold such a row."""
        lowest, highest = statistics.get(self.low_column), statistics.get(self.high_column)
        if lowest is None or highest is None:
            return True
        is_low_enough = self.high is None or bool(lowest[0] <= self.high)
        return is_low_enough and (self.low is None or bool(highest[1] >= self.low))


def select(
    manifest: Manifest, stream: StreamName, selection: Selection, backwards: bool = False
) -> Iterator[list[Record]]:
    """The selected entries of an archive, some at a time.

    Raises:
        ArchiveError: a file is missing or damaged.
    """
    segments = [s for s in manifest.segments if _may_hold(s, selection)]
    for segment in reversed(segments) if backwards else segments:
        try:
            yield from _select_in(manifest.path(segment), stream, selection, backwards)
        except FileNotFoundError:
            if segment in Manifest.load(manifest.folder).segments:
                raise ArchiveError(f"{manifest.path(segment)} is in its manifest, but not there") from None
            # Removed by the run's retention while we read.


def _may_hold(segment: Segment, selection: Selection) -> bool:
    """Whether the manifest leaves the possibility that a segment holds a selected entry."""
    if selection.first_id != "-" and id_order(segment.last_id) < id_order(selection.first_id):
        return False
    if selection.last_id != "+" and id_order(segment.first_id) > id_order(selection.last_id):
        return False
    ranges = (selection.tickets, selection.steps, selection.versions, selection.times)
    asked = zip(("ticket", "step", "version", "time"), ranges, strict=True)
    return all(segment.may_hold(name, *wanted) for name, wanted in asked if wanted is not None)


def _select_in(
    path: Path, stream: StreamName, selection: Selection, backwards: bool
) -> Iterator[list[Record]]:
    search = _Search(stream.message_type, selection)
    try:
        with pq.ParquetFile(path, memory_map=True) as file:
            groups = range(file.metadata.num_row_groups)
            for group in reversed(groups) if backwards else groups:
                if not search.may_match(file.metadata.row_group(group)):
                    continue
                yield from search.parts(file, group, backwards)
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError) as error:
        raise ArchiveError(
            f"{path} cannot be read: {error}. `tidemill archive --check` says what is whole"
        ) from None


class _Search:
    """What a selection asks of the columns of one message type."""

    def __init__(self, message_type: type[Message], selection: Selection) -> None:
        self.message_type, self.selection = message_type, selection
        names = {column.name for column in (*columns_of(message_type), *derived_of(message_type))}
        self.conditions = [c for c in _conditions(message_type, selection) if c.columns <= names | {ID_MS}]
        asked = {
            "index": selection.index,
            "worker": selection.worker or None,
            "status": selection.status and str(selection.status),
        }
        self.equals = {k: value for k, value in asked.items() if value is not None and k in names}
        self.texts = [name for name in TEXTS if selection.pattern and name in names]

    def may_match(self, group: Any) -> bool:
        """Whether the statistics of a row group leave that possibility."""
        wanted = {name for condition in self.conditions for name in condition.columns}
        statistics = {}
        for index in range(group.num_columns):
            column = group.column(index)
            if column.path_in_schema in wanted and (known := column.statistics) and known.has_min_max:
                statistics[column.path_in_schema] = (known.min, known.max)
        return all(condition.may_match(statistics) for condition in self.conditions)

    def parts(self, file: pq.ParquetFile, group: int, backwards: bool) -> Iterator[list[Record]]:
        """The selected entries of a row group, a few at a time: who wants the first waits for no more."""
        table = self._rows(file, group)
        if table is None:
            return
        firsts = range(0, len(table), PART_ROWS)
        for first in reversed(firsts) if backwards else firsts:
            records = records_of(table.slice(first, PART_ROWS), self.message_type)
            found = [record for record in records if self._is_selected(record)]
            if found:
                yield found[::-1] if backwards else found

    def _rows(self, file: pq.ParquetFile, group: int) -> pa.Table | None:
        """The rows of a row group that may be selected, by their columns."""
        deciding = {name for condition in self.conditions for name in condition.columns} | self.equals.keys()
        rows: pa.Array | None = None
        if deciding:
            table = file.read_row_group(group, columns=sorted(deciding))
            rows = pc.indices_nonzero(self._mask(table))
        if self.texts and (rows is None or len(rows)):
            rows = self._with_text(file, group, rows)
        if rows is not None and not len(rows):
            return None
        table = file.read_row_group(group)
        return table if rows is None or len(rows) == len(table) else table.take(rows)

    def _mask(self, table: pa.Table) -> pa.ChunkedArray:
        masks = [condition.mask(table) for condition in self.conditions]
        masks += [pc.equal(table[name], _constant(value)) for name, value in self.equals.items()]
        return reduce(pc.and_, masks)

    def _with_text(self, file: pq.ParquetFile, group: int, rows: pa.Array | None) -> pa.Array:
        """Of these rows, those with the pattern in a text, and all sessions: no column has what was said in
        them as text. Null is a text that has no column's form."""
        columns = self.texts
        if NUM_TURNS in file.schema_arrow.names:  # files of older releases have no sessions
            columns = [*columns, NUM_TURNS]
        table = file.read_row_group(group, columns=columns)
        if rows is not None:
            table = table.take(rows)
        masks = [_matches(table[name], self.selection.pattern) for name in self.texts]
        if NUM_TURNS in columns:
            masks.append(pc.is_valid(table[NUM_TURNS]))
        found = reduce(pc.or_, masks)
        places = pc.indices_nonzero(found)
        return places if rows is None else rows.take(places)

    def _is_selected(self, record: Record) -> bool:
        if isinstance(record, Garbled):
            return self.selection.takes_garbled(record.entry_id)
        return self.selection.matches(record.entry_id, record.message)


def _matches(texts: pa.ChunkedArray, pattern: str) -> pa.ChunkedArray:
    """Which texts hold the pattern: by Arrow where it means the same there, by Python otherwise."""
    if _PLAIN.fullmatch(pattern):
        return pc.or_kleene(pc.match_substring(texts, pattern), pc.is_null(texts))
    search = re.compile(pattern).search
    found = [text is None or search(text) is not None for text in texts.to_pylist()]
    bits = pa.py_buffer(np.packbits(np.array(found, np.bool_), bitorder="little"))
    return pa.chunked_array([pa.Array.from_buffers(pa.bool_(), len(found), [None, bits])])


def _conditions(message_type: type[Message], selection: Selection) -> Iterator[Condition]:
    """The selection's ranges as conditions on columns."""
    low = None if selection.first_id == "-" else id_order(selection.first_id)[0]
    high = None if selection.last_id == "+" else id_order(selection.last_id)[0]
    if low is not None or high is not None:
        yield Condition(ID_MS, ID_MS, low, high)
    tickets = ("first_ticket", "last_ticket") if message_type is Commit else ("ticket", "ticket")
    versions = ("min_version", "max_version") if message_type is Trajectory else ("version", "version")
    time = next((name for name in _TIMES if name in message_type.model_fields), "")
    ranges: Sequence[tuple[tuple[str, str], Range | None]] = (
        (tickets, selection.tickets),
        (("step", "step"), selection.steps),
        (versions, selection.versions),
        ((time, time), selection.times),
        (("value", "value"), selection.rewards),
    )
    for columns, wanted in ranges:
        if wanted is not None:
            yield Condition(*columns, *wanted)


# Scalars are made of buffers: pyarrow's own way imports pandas where there is one, and that takes longer than
# a lookup.


def _scalar(value: float, kind: pa.DataType) -> pa.Scalar:
    """A bound in the column's type, where that can say it: floats lose digits of great integers."""
    if pa.types.is_integer(kind) and float(value).is_integer():
        is_unsigned = kind == pa.uint64()
        least, greatest = (0, 2**64 - 1) if is_unsigned else (INT64_MIN, INT64_MAX)
        whole = min(max(int(value), least), greatest)
        number = np.array([whole], np.uint64 if is_unsigned else np.int64)
        return pa.Array.from_buffers(kind, 1, [None, pa.py_buffer(number)])[0]
    number = np.array([value], np.float64)
    return pa.Array.from_buffers(pa.float64(), 1, [None, pa.py_buffer(number)])[0]


def _constant(value: str | int) -> pa.Scalar:
    if isinstance(value, int):
        return _scalar(value, pa.int64())
    data = value.encode()
    ends = np.array([0, len(data)], np.int32)
    return pa.StringArray.from_buffers(1, pa.py_buffer(ends), pa.py_buffer(data))[0]

"""Reads the archive of one stream, opening only what can hold what is asked for.

Guarantees: selected entries come in the order of the stream, or in the reverse of it; never more than one row
group is in memory. Segments are skipped by their manifest and rows by their index columns; what remains is
decided by the messages themselves.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tidemill.common.archive.manifest import ArchiveSegment, Manifest
from tidemill.common.archive.rows import BOUNDED, ID, ArchivedRecord, records_of
from tidemill.common.errors import ArchiveError
from tidemill.common.streams.entries import Garbled, id_order
from tidemill.common.streams.selection import Range, Selection, StreamName

PART_ROWS = 256
"""Rows decoded at once: who wants the first one waits for no more."""


def select(
    manifest: Manifest, stream: StreamName, selection: Selection, backwards: bool = False
) -> Iterator[list[ArchivedRecord]]:
    """The selected entries of an archive, some at a time.

    Raises:
        ArchiveError: a file is missing or damaged.
    """
    segments = [s for s in manifest.segments if _may_hold(s, selection)]
    for segment in reversed(segments) if backwards else segments:
        path = manifest.path(segment)
        try:
            yield from _select_in(path, stream, selection, backwards)
        except FileNotFoundError:
            if segment in Manifest.load(manifest.folder).segments:
                raise ArchiveError(f"{path} is in its manifest, but not there") from None
            # Removed by the run's retention while we read.
        except (pa.ArrowException, OSError, KeyError) as error:
            raise ArchiveError(
                f"{path} cannot be read: {error}. `tidemill archive --check` says what is whole"
            ) from None


def _select_in(
    path: Path, stream: StreamName, selection: Selection, backwards: bool
) -> Iterator[list[ArchivedRecord]]:
    step = -1 if backwards else 1
    with pq.ParquetFile(path, memory_map=True) as file:
        for group in range(file.metadata.num_row_groups)[::step]:
            places = _places(file, group, selection)[::step]
            if not places:
                continue  # the payloads of this row group are not read
            table = file.read_row_group(group)
            for first in range(0, len(places), PART_ROWS):
                part = records_of(table, stream.message_type, places[first : first + PART_ROWS])
                if found := [record for record in part if _is_selected(record, selection)]:
                    yield found


def _ranges(selection: Selection) -> Mapping[str, Range]:
    """What is asked of columns that the manifest knows the bounds of."""
    asked = {
        "ticket": selection.tickets,
        "step": selection.steps,
        "version": selection.versions,
        "time": selection.times,
    }
    return {name: wanted for name, wanted in asked.items() if wanted is not None}


def _may_hold(segment: ArchiveSegment, selection: Selection) -> bool:
    """Whether the manifest leaves the possibility that a segment holds a selected entry."""
    if selection.first_id != "-" and id_order(segment.last_id) < id_order(selection.first_id):
        return False
    if selection.last_id != "+" and id_order(segment.first_id) > id_order(selection.last_id):
        return False
    return all(segment.may_hold(name, *wanted) for name, wanted in _ranges(selection).items())


def _places(file: pq.ParquetFile, group: int, selection: Selection) -> list[int]:
    """The rows of a row group that may be selected, by their index columns."""
    # Compared in Python: pyarrow's scalars and masks import pandas where there is one, and that takes longer
    # than a lookup.
    ranges = [(name, BOUNDED[name], *wanted) for name, wanted in _ranges(selection).items()]
    if selection.rewards is not None:
        ranges.append(("value", "value", *selection.rewards))
    asked = {
        "index": selection.index,
        "worker": selection.worker or None,
        "status": selection.status and str(selection.status),
    }
    equal = {name: value for name, value in asked.items() if value is not None}
    names = {ID, *equal, *(name for least, greatest, _, _ in ranges for name in (least, greatest))}
    columns = file.read_row_group(group, columns=sorted(names)).to_pydict()

    def may_match(place: int) -> bool:
        row = {name: column[place] for name, column in columns.items()}
        return (
            selection.has_id(row[ID])
            and all(row[name] == value for name, value in equal.items())
            and all(_overlaps(row[least], row[greatest], *ends) for least, greatest, *ends in ranges)
        )

    return [place for place in range(len(columns[ID])) if may_match(place)]


def _overlaps(least: Any, greatest: Any, low: float | None, high: float | None) -> bool:
    """Whether a value between these two can lie in the range; a message that has none never does."""
    return least is not None and (low is None or greatest >= low) and (high is None or least <= high)


def _is_selected(record: ArchivedRecord, selection: Selection) -> bool:
    if isinstance(record, Garbled):
        return selection.takes_garbled(record.entry_id)
    return selection.matches(record.entry_id, record.message)

"""Reads the archive of one stream, opening only files that can hold selected entries.

Guarantees: selected entries come in the order of the stream, or in the reverse of it; never more than one row
group is in memory. Segments are skipped by their footers and rows by their index columns; the rest is decided
by the messages themselves.
"""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tidemill.common.archive.manifest import ArchiveSegment, Manifest
from tidemill.common.archive.rows import BOUNDED, ID, ArchivedRecord, records_of
from tidemill.common.command_line import command_line
from tidemill.common.errors import ArchiveError
from tidemill.common.streams.entries import id_order
from tidemill.common.streams.selection import Range, Selection, StreamName, overlap

PART_ROWS = 256
"""Rows decoded at once; few, so that the first selected one comes soon."""


def select(
    manifest: Manifest, stream: StreamName, selection: Selection, backwards: bool = False
) -> Iterator[list[ArchivedRecord]]:
    """The selected entries of an archive, in batches.

    Raises:
        ArchiveError: a file is missing or damaged.
    """
    segments = [s for s in manifest.segments if _may_hold(s, selection)]
    for segment in reversed(segments) if backwards else segments:
        try:
            yield from _select_in(segment.path, stream, selection, backwards)
        except (pa.ArrowException, OSError, KeyError, ValueError) as error:
            removed = Manifest.load(manifest.folder).removed
            if isinstance(error, FileNotFoundError) and id_order(segment.last_id) <= id_order(
                removed.last_id
            ):
                continue  # the run's retention removed it during this read
            raise ArchiveError(
                f"{segment.path} cannot be read: {error}. "
                f"`{command_line('archive', '--check')}` says what is whole"
            ) from None


def _select_in(
    path: Path, stream: StreamName, selection: Selection, backwards: bool
) -> Iterator[list[ArchivedRecord]]:
    step = -1 if backwards else 1
    # Not mapped into memory: where a file that is read becomes shorter, the kernel would end the process.
    with pq.ParquetFile(path) as file:
        for group in range(file.metadata.num_row_groups)[::step]:
            places = _places(file, group, selection)[::step]
            if not places:
                continue  # the payloads of this row group are not read
            table = file.read_row_group(group)
            for first in range(0, len(places), PART_ROWS):
                records = records_of(table, stream.message_type, places[first : first + PART_ROWS])
                selected = [record for record in records if selection.takes(record)]
                if selected:
                    yield selected


def _ranges(selection: Selection) -> dict[str, Range | None]:
    """Selected ranges by index column, for the columns whose bounds are in the footers."""
    asked = (selection.tickets, selection.steps, selection.versions, selection.times)
    return {name: wanted for name, wanted in zip(BOUNDED, asked, strict=True) if wanted is not None}


def _may_hold(segment: ArchiveSegment, selection: Selection) -> bool:
    """Whether a segment can hold a selected entry, judged by its name and footer."""
    is_before = id_order(segment.last_id) < id_order(selection.first_id)
    if is_before or id_order(segment.first_id) > id_order(selection.last_id):
        return False
    bounds = segment.details.bounds
    ranges = _ranges(selection).items()
    return bounds is None or all(overlap(wanted, *bounds.get(name, (None, None))) for name, wanted in ranges)


def _places(file: pq.ParquetFile, group: int, selection: Selection) -> list[int]:
    """Numbers of the rows in a row group that may be selected, judged by their index columns."""
    # Compared in Python: pyarrow's scalars and masks import pandas where there is one, and that takes longer
    # than a lookup.
    limits = _ranges(selection) | {"value": selection.rewards}
    ranges = [(wanted, name, BOUNDED.get(name, name)) for name, wanted in limits.items() if wanted]
    asked = {"index": selection.index, "worker": selection.worker or None}
    equal = {name: value for name, value in asked.items() if value is not None}
    names = {ID, *equal, *(name for _, *ends in ranges for name in ends)}
    columns = file.read_row_group(group, columns=sorted(names)).to_pydict()

    def may_match(index: int) -> bool:
        row = {name: column[index] for name, column in columns.items()}
        return (
            selection.has_id(row[ID])
            and all(row[name] == value for name, value in equal.items())
            and all(overlap(wanted, row[least], row[greatest]) for wanted, least, greatest in ranges)
        )

    return [index for index in range(len(columns[ID])) if may_match(index)]

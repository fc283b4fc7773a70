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
    segments = [segment for segment in manifest.segments if _may_hold(segment, selection)]
    if backwards:
        segments.reverse()
    for segment in segments:
        try:
            yield from _select_in(segment.path, stream, selection, backwards)
        except (pa.ArrowException, OSError, KeyError, ValueError) as error:
            if isinstance(error, FileNotFoundError) and _is_removed(manifest.folder, segment):
                continue
            raise ArchiveError(
                f"{segment.path} cannot be read: {error}. "
                f"`{command_line('archive', '--check')}` says what is whole"
            ) from None


def _is_removed(folder: Path, segment: ArchiveSegment) -> bool:
    """Whether the run's retention has removed a segment, since the manifest was read."""
    removed = Manifest.load(folder).removed
    return id_order(segment.last_id) <= id_order(removed.last_id)


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


def _ranges(selection: Selection) -> dict[str, Range]:
    """Selected ranges of the quantities in `BOUNDED`, by the columns of their least values."""
    wanted = {
        "ticket": selection.tickets,
        "step": selection.steps,
        "version": selection.versions,
        "time": selection.times,
    }
    return {name: limits for name, limits in wanted.items() if limits is not None}


def _may_hold(segment: ArchiveSegment, selection: Selection) -> bool:
    """Whether a segment can hold a selected entry, judged by its name and footer."""
    is_before = id_order(segment.last_id) < id_order(selection.first_id)
    if is_before or id_order(segment.first_id) > id_order(selection.last_id):
        return False
    bounds = segment.details.bounds
    if bounds is None:  # the footer cannot be read
        return True
    for name, wanted in _ranges(selection).items():
        # No entry of the segment has the quantity where it has no bounds.
        least, greatest = bounds.get(name, (None, None))
        if not overlap(wanted, least, greatest):
            return False
    return True


def _places(file: pq.ParquetFile, group: int, selection: Selection) -> list[int]:
    """Numbers of the rows in a row group that may be selected, judged by their index columns."""
    ranges = [(wanted, name, BOUNDED[name]) for name, wanted in _ranges(selection).items()]
    """Each range, with the columns that hold the least and the greatest value of a row."""
    if selection.rewards is not None:
        ranges.append((selection.rewards, "value", "value"))
    exact: dict[str, int | str] = {}
    """Columns that must hold exactly this."""
    if selection.index is not None:
        exact["index"] = selection.index
    if selection.worker:
        exact["worker"] = selection.worker
    names = {ID, *exact}
    for _, least, greatest in ranges:
        names.update((least, greatest))
    # Compared in Python: pyarrow's scalars and masks import pandas where there is one, and that takes longer
    # than a lookup.
    columns = file.read_row_group(group, columns=sorted(names)).to_pydict()

    def may_match(index: int) -> bool:
        if not selection.has_id(columns[ID][index]):
            return False
        if any(columns[name][index] != value for name, value in exact.items()):
            return False
        return all(
            overlap(wanted, columns[least][index], columns[greatest][index])
            for wanted, least, greatest in ranges
        )

    return [index for index in range(len(columns[ID])) if may_match(index)]

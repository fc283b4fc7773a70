"""Takes files in that no manifest lists: a writer died before it could, or the manifest has lost its line.

Such a file may be the only copy of its entries, because Redis was trimmed. So it is read whole, with the
checksums of its pages; listed where its entries continue the others; and else kept under another name, where
readers of `*.parquet` do not find it, and said. Only what retention has removed already goes.
"""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import structlog

from common import codec
from common.archive.bounds import widen
from common.archive.columns import ID, ORIGINAL, records_of
from common.archive.manifest import PREVIOUS_ID, SUFFIX, Bounds, Manifest, Segment, segment_name
from common.entries import Entry, id_order
from common.files import file_checksum
from common.messages import Message

log = structlog.get_logger(__name__)

KEPT_SUFFIX = ".unlisted"
"""Appended to the name of a file that cannot be listed and is not removed either."""


class _UnfitError(Exception):
    """The file cannot be listed; says why."""


def unlisted(manifest: Manifest) -> list[Path]:
    """Files of entries that the manifest does not list, in the order of their ids."""
    listed = {segment.file for segment in manifest.segments}
    return sorted(p for p in manifest.folder.glob(f"*{SUFFIX}") if p.name not in listed)


def kept_aside(folder: Path) -> list[Path]:
    """Files that could not be listed."""
    return sorted(folder.glob(f"*{SUFFIX}{KEPT_SUFFIX}"))


def with_unlisted(manifest: Manifest, message_type: type[Message]) -> Manifest:
    """List what is whole and fits, put the rest aside. Call within `writing`."""
    found: list[Segment] = []
    for path in unlisted(manifest):
        try:
            segment = _segment_of(path, message_type)
            if id_order(segment.last_id) <= id_order(manifest.removed.last_id):
                path.unlink()  # retention has taken it off the list, and died before this
                continue
            _check_place(segment, (*manifest.segments, *found))
        except _UnfitError as error:
            aside = path.with_name(path.name + KEPT_SUFFIX)
            log.error(
                "a file of the archive cannot be listed; it is kept", path=str(aside), problem=str(error)
            )
            path.rename(aside)
            continue
        found.append(segment)
    if found or manifest.is_torn:
        log.warning(
            "the archive's manifest was restored from its files",
            folder=str(manifest.folder),
            files=[segment.file for segment in found],
        )
        return manifest.including(found)
    return manifest


def _check_place(segment: Segment, others: tuple[Segment, ...]) -> None:
    first, last = id_order(segment.first_id), id_order(segment.last_id)
    for other in others:
        if first <= id_order(other.last_id) and id_order(other.first_id) <= last:
            raise _UnfitError(f"it has entries that {other.file} has too")


def _segment_of(path: Path, message_type: type[Message]) -> Segment:
    """What the manifest would say of a file, after reading all of it."""
    ids: list[str] = []
    bounds: dict[str, tuple[float, float]] = {}
    payload_bytes = 0
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            previous_id = (file.metadata.metadata or {}).get(PREVIOUS_ID, b"").decode()
            for group in range(file.metadata.num_row_groups):
                table = file.read_row_group(group)
                messages = [r.message for r in records_of(table, message_type) if isinstance(r, Entry)]
                ids += table[ID].to_pylist()
                payload_bytes += _payload_bytes(table, messages)
                widen(bounds, messages)
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        raise _UnfitError(f"it cannot be read: {error}") from None
    orders = [id_order(entry_id) for entry_id in ids]
    if not ids or path.name != segment_name(ids[0], ids[-1]) or orders != sorted(set(orders)):
        raise _UnfitError("it does not hold the entries that its name says")
    return _described(path, ids, payload_bytes, previous_id, bounds)


def _described(path: Path, ids: list[str], payload_bytes: int, previous_id: str, bounds: Bounds) -> Segment:
    stat = path.stat()
    return Segment(
        file=path.name,
        first_id=ids[0],
        last_id=ids[-1],
        entries=len(ids),
        num_bytes=stat.st_size,
        payload_bytes=payload_bytes,
        checksum=file_checksum(path),
        archived_at=stat.st_mtime,
        previous_id=previous_id,
        bounds=bounds,
    )


def _payload_bytes(table: pa.Table, messages: list[Message]) -> int:
    """What the entries took on the wire, or near it where a row keeps its original."""
    originals = table[ORIGINAL].to_pylist()
    kept = sum(len(item["value"]) for fields in originals if fields is not None for item in fields)
    return kept + sum(len(codec.encode_payload(message)) for message in messages)

"""Takes files in that no manifest lists: a writer died before it could, or the manifest has lost its line.

Such a file may be the only copy of its entries, because Redis was trimmed. So it is read whole, with the
checksums of its pages; listed where its entries continue the others; and else kept under another name, where
readers of `*.parquet` do not find it, and said. Only what retention has removed already goes.
"""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import structlog

from common.archive.columns import ID, ORIGINAL, records_of, widen
from common.archive.manifest import PREVIOUS_ID, SUFFIX, Manifest, Segment, segment_name
from common.errors import ArchiveError
from common.files import file_checksum, write_atomically
from common.streams.entries import START, Entry, id_before, id_order
from common.wire import codec
from common.wire.messages import Message

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
            log.error("a file of the archive cannot be listed", kept_as=str(aside), problem=str(error))
            path.rename(aside)
            continue
        found.append(segment)
    if found or manifest.is_torn:
        files = [segment.file for segment in found]
        log.warning(
            "the archive's manifest was restored from files", folder=str(manifest.folder), files=files
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
    stat = path.stat()
    return Segment(
        path.name, ids[0], ids[-1], len(ids), stat.st_size, payload_bytes, file_checksum(path), stat.st_mtime,
        previous_id, bounds,
    )  # fmt: skip


def _payload_bytes(table: pa.Table, messages: list[Message]) -> int:
    """What the entries took on the wire, or near it where a row keeps its original."""
    originals = table[ORIGINAL].to_pylist()
    kept = sum(len(item["value"]) for fields in originals if fields is not None for item in fields)
    return kept + sum(len(codec.encode_payload(message)) for message in messages)


TRIMMED_FILE = "_trimmed"
"""Beside a manifest: the id below which the stream has no entries any more."""
CONSECUTIVE = ("prompts", "commits")
"""Streams whose entries have the ids 1-0, 2-0, 3-0, ... without a gap."""


def note_trim(folder: Path, first_id: str) -> None:
    """Remember durably that entries below `first_id` are about to leave Redis."""
    if id_order(first_id) > id_order(_trimmed_below(folder)):
        write_atomically(folder / TRIMMED_FILE, first_id + "\n")


def trimmed_up_to(folder: Path) -> str:
    """No entry up to this one is in Redis any more; `START` where none was trimmed."""
    return id_before(_trimmed_below(folder))


def gaps(manifest: Manifest) -> Iterator[str]:
    """What is missing, in words."""
    segments, start = manifest.segments, manifest.removed.last_id
    is_numbered = manifest.folder.name in CONSECUTIVE
    if segments and segments[0].previous_id not in ("", start):
        yield f"entries after {start} up to {segments[0].previous_id} are missing before {segments[0].file}"
    for before, after in pairwise(segments):
        if after.previous_id and after.previous_id != before.last_id:
            yield f"entries after {before.last_id} up to {after.previous_id} are missing before {after.file}"
        elif is_numbered and id_order(after.first_id)[0] > id_order(before.last_id)[0] + 1:
            yield f"entries between {before.last_id} and {after.first_id} are missing"
    for segment in segments if is_numbered else ():
        (first, _), (last, _) = id_order(segment.first_id), id_order(segment.last_id)
        if (missing := last - first + 1 - segment.entries) > 0:
            yield f"{missing} of the entries from {segment.first_id} to {segment.last_id} are missing"
    trimmed = trimmed_up_to(manifest.folder)
    # Read again, because the run may have archived and trimmed meanwhile.
    known = (manifest, Manifest.load(manifest.folder))
    if all(id_order(each.last_id) < id_order(trimmed) for each in known):
        yield f"entries after {manifest.last_id} up to {trimmed} were trimmed from Redis and are not here"


def _trimmed_below(folder: Path) -> str:
    try:
        text = (folder / TRIMMED_FILE).read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return START
    try:
        id_order(text)
    except ValueError:
        raise ArchiveError(f"{folder / TRIMMED_FILE} holds {text[:40]!r}, expected an entry id") from None
    return text

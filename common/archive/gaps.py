"""What an archive should have and has not: each segment knows the entry before it, and tickets are numbered.

The trainer notes how far it has trimmed a stream before it does, so that an archive that ends too early shows
too, also when Redis is gone.
"""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from common.archive.manifest import Manifest, Segment
from common.entries import START, id_before, id_order
from common.errors import ArchiveError
from common.files import write_atomically

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
    if segments and segments[0].previous_id not in ("", start):
        yield f"entries after {start} up to {segments[0].previous_id} are missing before {segments[0].file}"
    for before, after in pairwise(segments):
        if after.previous_id and after.previous_id != before.last_id:
            yield f"entries after {before.last_id} up to {after.previous_id} are missing before {after.file}"
        elif is_numbered(manifest) and id_order(after.first_id)[0] > id_order(before.last_id)[0] + 1:
            yield f"entries between {before.last_id} and {after.first_id} are missing"
    for segment in segments if is_numbered(manifest) else ():
        if (missing := _num_missing(segment)) > 0:
            yield f"{missing} of the entries from {segment.first_id} to {segment.last_id} are missing"
    trimmed = trimmed_up_to(manifest.folder)
    # Read again, because the run may have archived and trimmed meanwhile.
    if _is_before(manifest.last_id, trimmed) and _is_before(Manifest.load(manifest.folder).last_id, trimmed):
        yield f"entries after {manifest.last_id} up to {trimmed} were trimmed from Redis and are not here"


def is_numbered(manifest: Manifest) -> bool:
    """Whether the stream's entries have consecutive numbers."""
    return manifest.folder.name in CONSECUTIVE


def _num_missing(segment: Segment) -> int:
    return id_order(segment.last_id)[0] - id_order(segment.first_id)[0] + 1 - segment.entries


def _is_before(entry_id: str, other: str) -> bool:
    return id_order(entry_id) < id_order(other)


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

"""Which segments a stream's archive has, and what is missing.

A segment is a Parquet file that counts from the moment it has its name: it is complete and flushed before.
The name has first and last id, number of entries, and checksum of its bytes; the footer, what a search needs.
No entry is in two segments. A file notes how far retention has removed them, so they are not archived again.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Self

from tidemill.common.errors import ArchiveError
from tidemill.common.files import storage_errors, write_atomically
from tidemill.common.streams.entries import START, id_before, id_order
from tidemill.common.wire.keys import StreamName

SUFFIX = ".parquet"
DETAILS = b"tidemill.segment"
"""Key of a segment's `Details`, as JSON, in its footer."""
OLD_MANIFEST = "_manifest.jsonl"
"""File in archives of older releases, which are refused: never converted and never written to."""

_NAME = re.compile(r"(?P<first>\d{20}-\d+)_(?P<last>\d{20}-\d+)_(?P<entries>\d+)_(?P<checksum>[0-9a-f]{32})")


@dataclass(frozen=True, slots=True)
class Details:
    """Contents of a segment's footer. The defaults stand for one that cannot be read."""

    previous_id: str = ""
    """The stream's last entry before this file, archived or trimmed; empty where that is not known."""
    payload_bytes: int = 0
    """Size of the entries on the wire, before columns and compression."""
    archived_at: float = 0.0
    bounds: Mapping[str, Sequence[float]] | None = None
    """Least and greatest `ticket`, `step`, `version` and `time` of the entries, as far as they have them."""
    bare: Sequence[str] = ()
    """Pointers of payloads that entries claim, and that could not be had when they were archived: these files
    stay beside the archive, for as long as the segment does."""


@dataclass(frozen=True, slots=True)
class ArchiveSegment:
    """One file: all entries of its stream from `first_id` to `last_id`.

    Example: of the stream `prompts`, `first_id` "1-0", `last_id` "512-0", `entries` 512: tickets 0 to 511.
    """

    path: Path
    first_id: str
    last_id: str
    entries: int
    checksum: str
    """xxh3-128 of the file's bytes, 32 hexadecimal digits."""

    @classmethod
    def named(cls, path: Path) -> Self:
        """The segment that a file's name describes. Raises ArchiveError: it is no name of a segment."""
        match = _NAME.fullmatch(path.name.removesuffix(SUFFIX))
        if match is None:
            raise ArchiveError(f"{path} is not a file of this release's archives; move it away")
        first = "{}-{}".format(*id_order(match["first"]))
        last = "{}-{}".format(*id_order(match["last"]))
        return cls(path, first, last, int(match["entries"]), match["checksum"])

    @property
    def order(self) -> tuple[tuple[int, int], tuple[int, int]]:
        return id_order(self.first_id), id_order(self.last_id)

    @property
    def num_bytes(self) -> int:
        return self.path.stat().st_size

    @property
    def details(self) -> Details:
        return _details(self.path)


def segment_name(first_id: str, last_id: str, entries: int, checksum: str) -> str:
    """File name of a segment; names sort as the entries do."""
    first = "{:020d}-{}".format(*id_order(first_id))
    last = "{:020d}-{}".format(*id_order(last_id))
    return f"{first}_{last}_{entries}_{checksum}{SUFFIX}"


def _details(path: Path) -> Details:
    """What the footer of a segment says; nothing where it cannot be read now."""
    try:
        return _read_details(path)
    except ArchiveError:
        return Details()


@lru_cache(maxsize=4096)
def _read_details(path: Path) -> Details:
    """Raises ArchiveError: the footer cannot be read. That is not kept: it may be readable later."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # Cached by name: a segment's name has the checksum of its bytes, so it never stands for others.
        return Details(**json.loads((pq.read_metadata(path).metadata or {})[DETAILS]))
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        raise ArchiveError(f"the footer of {path} cannot be read: {error}") from None


REMOVED_FILE = "_removed.json"
TRIMMED_FILE = "_trimmed"
"""File with the id below which Redis has no entries any more."""
NEEDED_FILE = "_needed"
"""File with the first id that a restarted trainer replays. Retention keeps all from there on."""
NOTES = (TRIMMED_FILE, NEEDED_FILE)
"""Files that the trainer writes, also while another process archives."""
CONSECUTIVE = (StreamName.PROMPTS, StreamName.COMMITS)
"""Streams whose entries have the ids 1-0, 2-0, 3-0, ... without a gap."""


@dataclass(frozen=True, slots=True)
class Removed:
    """What retention has removed from the beginning of a stream's archive."""

    last_id: str = START
    entries: int = 0
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Manifest:
    """The segments of one stream's archive, in order.

    Example: two segments, "1-0" to "512-0" and "513-0" to "1024-0": `last_id` is "1024-0", `entries` 1,024.
    """

    folder: Path
    segments: tuple[ArchiveSegment, ...] = ()
    removed: Removed = Removed()

    @classmethod
    def load(cls, folder: Path) -> "Manifest":
        """The segments in the folder now; none where there is no folder.

        Raises:
            ArchiveError: it holds something else than an archive, or one of a release with another format.
        """
        if (folder / OLD_MANIFEST).exists():
            raise ArchiveError(
                f"{folder} has an archive of an older release of Tidemill, in another format. Read it with "
                f"that release, or move {folder.parent} away"
            )
        files = list(folder.glob(f"*{SUFFIX}"))
        try:  # after listing the files: a removal is noted first, so the note covers what the list lacks
            removed = Removed(**json.loads((folder / REMOVED_FILE).read_bytes()))
        except FileNotFoundError:
            removed = Removed()
        except (ValueError, TypeError) as error:
            raise ArchiveError(f"{folder / REMOVED_FILE} cannot be read: {error}") from None
        segments = sorted(map(ArchiveSegment.named, files), key=lambda segment: segment.order)
        by_first_id: dict[str, ArchiveSegment] = {}
        for segment in segments:
            # Of two with the same first entry, the shorter one is what `cut_back` has left of the other. It
            # comes first in this order.
            by_first_id.setdefault(segment.first_id, segment)
        there = [s for s in by_first_id.values() if id_order(s.last_id) > id_order(removed.last_id)]
        return cls(folder, tuple(there), removed)

    @property
    def last_id(self) -> str:
        """Everything up to this entry was archived; `START` where nothing was."""
        return self.segments[-1].last_id if self.segments else self.removed.last_id

    @property
    def num_bytes(self) -> int:
        return sum(segment.num_bytes for segment in self.segments)

    @property
    def entries(self) -> int:
        return sum(segment.entries for segment in self.segments)

    def bare_claims(self) -> set[str]:
        """Pointers of payloads that archived entries claim, and that the archive does not have.

        Raises:
            ArchiveError: a segment's footer cannot be read, so that they are not known.
        """
        return {pointer for segment in self.segments for pointer in _read_details(segment.path).bare}

    def remove_first(self, num_gone: int) -> None:
        """Remove the files of the first segments; this manifest stays as it is."""
        gone = self.segments[:num_gone]
        removed = Removed(
            gone[-1].last_id,
            self.removed.entries + sum(segment.entries for segment in gone),
            self.removed.num_bytes + sum(segment.num_bytes for segment in gone),
        )
        # Durable before the files go: those that a crash leaves are ignored by `load`, removed by `sweep`.
        write_atomically(self.folder / REMOVED_FILE, json.dumps(asdict(removed)))
        for segment in gone:
            segment.path.unlink(missing_ok=True)


def note_trim(folder: Path, first_id: str) -> None:
    """Remember durably that entries below `first_id` are about to leave Redis."""
    if id_order(first_id) > id_order(_noted(folder, TRIMMED_FILE)):
        write_atomically(folder / TRIMMED_FILE, first_id + "\n")


def take_back_trim(folder: Path, first_id: str) -> None:
    """Lower the note of `note_trim`: Redis has lost the trim of entries from `first_id` on, or these."""
    if id_order(first_id) < id_order(_noted(folder, TRIMMED_FILE)):
        write_atomically(folder / TRIMMED_FILE, first_id + "\n")


def note_needed(folder: Path, first_id: str) -> None:
    """Remember durably that a trainer that restarts replays entries from `first_id` on."""
    if not (folder / NEEDED_FILE).exists() or first_id != _noted(folder, NEEDED_FILE):
        with storage_errors("the archive", folder):
            folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / NEEDED_FILE, first_id + "\n")


def is_needed(folder: Path, segment: ArchiveSegment) -> bool:
    """Whether a restart may replay what is in the segment."""
    has_note = (folder / NEEDED_FILE).exists()
    return has_note and id_order(segment.last_id) >= id_order(_noted(folder, NEEDED_FILE))


def trimmed_up_to(folder: Path) -> str:
    """No entry up to this one is in Redis any more; `START` where none was trimmed."""
    return last_below(folder.name, _noted(folder, TRIMMED_FILE))


def last_below(stream: str, entry_id: str) -> str:
    """The largest id below `entry_id` that an entry of the stream can have."""
    before = id_before(entry_id)
    return f"{id_order(before)[0]}-0" if stream in CONSECUTIVE else before


def gaps(manifest: Manifest) -> Iterator[str]:
    """Describes each gap of a stream's archive, for people."""
    trimmed = trimmed_up_to(manifest.folder)
    # Read again, because the run may have archived and trimmed meanwhile.
    manifests = (manifest, Manifest.load(manifest.folder))
    is_lacking = all(id_order(each.last_id) < id_order(trimmed) for each in manifests)
    yield from missing_after(manifest, START, trimmed if is_lacking else START)
    if manifest.folder.name not in CONSECUTIVE:
        return
    for before, after in pairwise(manifest.segments):
        is_told = id_order(after.details.previous_id or START) > id_order(before.last_id)
        if not is_told and id_order(after.first_id)[0] > id_order(before.last_id)[0] + 1:
            yield f"entries between {before.last_id} and {after.first_id} are missing"
    for segment in manifest.segments:
        first, _ = id_order(segment.first_id)
        last, _ = id_order(segment.last_id)
        missing = last - first + 1 - segment.entries
        if missing > 0:
            yield f"{missing} of the entries from {segment.first_id} to {segment.last_id} are missing"


def missing_after(manifest: Manifest, position: str, trimmed: str) -> Iterator[str]:
    """Describes entries after `position` that no segment has; up to `trimmed`, Redis lacks them, too."""
    last = max(position, manifest.removed.last_id, key=id_order)
    for segment in manifest.segments:
        previous = segment.details.previous_id or START
        # A lower one, too: then the file before is not the one that preceded this one when it was written.
        if previous != last and id_order(previous) > id_order(position):
            yield f"entries after {last} up to {previous} are missing before {segment.path.name}"
        last = max(last, segment.last_id, key=id_order)
    if id_order(trimmed) > id_order(last):
        yield f"entries after {last} up to {trimmed} were trimmed from Redis and are not here"


def _noted(folder: Path, name: str) -> str:
    try:
        text = (folder / name).read_text(encoding="ascii", errors="replace").strip()
    except FileNotFoundError:
        return START
    try:
        id_order(text)
    except ValueError:
        raise ArchiveError(f"{folder / name} holds {text[:40]!r}, expected an entry id") from None
    return text

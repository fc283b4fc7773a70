"""Which segments a stream's archive has, and what is missing: the only truth about what is archived.

Guarantees: a segment is listed only after its file is complete, flushed and renamed into place, and no entry
is in two of them. The manifest is JSON lines, appended to; a line that was torn is ignored by readers, and
the next writer lists its file again. Removed segments leave behind how far they went: they are never written
again.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from tidemill.common.errors import ArchiveError
from tidemill.common.files import append_durably, write_atomically
from tidemill.common.streams.entries import START, id_before, id_order
from tidemill.common.wire.keys import StreamName

MANIFEST_FILE = "_manifest.jsonl"
"""The underscore keeps it out of what other programs take for the files of a table."""
SUFFIX = ".parquet"
PREVIOUS_ID = b"tidemill.previous_id"
"""Key of a segment's `previous_id` in its file, from where it is read when the manifest has lost its line."""

FORMAT = 2
"""Of segments. An archive of another format is refused, never converted and never written to."""

Bounds = Mapping[str, tuple[float, float]]
"""Least and greatest `ticket`, `step`, `version` and `time` of the entries, as far as they have them."""


@dataclass(frozen=True, slots=True)
class ArchiveSegment:
    """One file: the entries of its stream from `first_id` to `last_id`, all that there were."""

    file: str
    first_id: str
    last_id: str
    entries: int
    num_bytes: int
    payload_bytes: int
    """What the entries took on the wire, before columns and compression."""
    checksum: str
    """xxh3-128 of the file's bytes, 32 hexadecimal digits."""
    archived_at: float
    previous_id: str = ""
    """The stream's last entry before this file, archived or trimmed; empty where that is not known."""
    bounds: Bounds = field(default_factory=dict)
    format: int = FORMAT

    def may_hold(self, name: str, low: float | None, high: float | None) -> bool:
        """Whether an entry's `name` can lie in the range; what has no such bounds never does."""
        if name not in self.bounds:
            return False
        least, greatest = self.bounds[name]
        return (low is None or greatest >= low) and (high is None or least <= high)


@dataclass(frozen=True, slots=True)
class Removed:
    """What retention has removed from the beginning."""

    last_id: str = START
    entries: int = 0
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Manifest:
    """The segments of one stream that there are, in order."""

    folder: Path
    segments: tuple[ArchiveSegment, ...] = ()
    removed: Removed = Removed()
    is_torn: bool = False
    """A line is none, or half of one: a writer died in it."""

    @classmethod
    def load(cls, folder: Path, salvage: bool = False) -> "Manifest":
        """What the folder's manifest says now; an empty one where there is none. `salvage` skips bad lines.

        Raises:
            ArchiveError: it holds something else than a manifest, or is of a release with another format.
        """
        path = folder / MANIFEST_FILE
        try:
            text = path.read_bytes()
        except FileNotFoundError:
            return cls(folder)
        *lines, rest = text.split(b"\n")
        removed, segments = Removed(), []
        is_torn = bool(rest)
        for line in lines:
            try:
                tree = json.loads(line)
                if "removed" in tree:
                    removed = Removed(**tree["removed"])
                else:
                    segments.append(_segment(tree, path))
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                if not salvage:
                    raise ArchiveError(
                        f"{path} cannot be read ({error}). `tidemill archive` restores it from the files "
                        "beside it."
                    ) from None
                is_torn = True
        return cls(folder, tuple(segments), removed, is_torn=is_torn)

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

    def path(self, segment: ArchiveSegment) -> Path:
        """The file of a segment."""
        return self.folder / segment.file

    def appended(self, segment: ArchiveSegment) -> "Manifest":
        """List one more segment, durably.

        Raises:
            ArchiveError: the segment does not follow the last one.
        """
        if id_order(segment.first_id) <= id_order(self.last_id):
            raise ArchiveError(f"{segment.first_id} of {self.folder} is archived up to {self.last_id}")
        if self.is_torn or not self.segments:
            return self._rewritten((*self.segments, segment), self.removed)
        path = self.folder / MANIFEST_FILE
        append_durably(path, _line(asdict(segment)), "the archive's manifest")
        return replace(self, segments=(*self.segments, segment))

    def including(self, found: Iterable[ArchiveSegment]) -> "Manifest":
        """List these segments too, in their places, durably."""
        segments = sorted((*self.segments, *found), key=lambda segment: id_order(segment.first_id))
        return self._rewritten(segments, self.removed)

    def without(self, gone: Iterable[ArchiveSegment]) -> "Manifest":
        """Take the first segments off the list, durably; their files may go then."""
        files = {segment.file for segment in gone}
        leaving = [segment for segment in self.segments if segment.file in files]
        if not leaving:
            return self
        removed = Removed(
            leaving[-1].last_id,
            self.removed.entries + sum(segment.entries for segment in leaving),
            self.removed.num_bytes + sum(segment.num_bytes for segment in leaving),
        )
        return self._rewritten(self.segments[len(leaving) :], removed)

    def cut(self, kept: Sequence[ArchiveSegment]) -> "Manifest":
        """List these segments and no others, durably."""
        return self._rewritten(kept, self.removed)

    def _rewritten(self, segments: Sequence[ArchiveSegment], removed: Removed) -> "Manifest":
        lines = [_line({"removed": asdict(removed)})] if removed != Removed() else []
        lines += [_line(asdict(segment)) for segment in segments]
        write_atomically(self.folder / MANIFEST_FILE, b"".join(lines))
        return Manifest(self.folder, tuple(segments), removed)


def segment_name(first_id: str, last_id: str) -> str:
    """File name of a segment; names sort as the entries do."""
    (first_ms, first_seq), (last_ms, last_seq) = id_order(first_id), id_order(last_id)
    return f"{first_ms:020d}-{first_seq}_{last_ms:020d}-{last_seq}{SUFFIX}"


def _segment(tree: dict[str, Any], path: Path) -> ArchiveSegment:
    # Not a ValueError: `salvage` must not take a line of another release for a torn one and drop it.
    if tree["file"] and tree.get("format") != FORMAT:
        raise ArchiveError(
            f"{path} was written by another release of Tidemill (format {tree.get('format', 1)} instead of "
            f"{FORMAT}). Read or continue this run with that release, or move {path.parent.parent} away"
        )
    known = {name: tree[name] for name in ArchiveSegment.__dataclass_fields__ if name in tree}
    bounds = {name: (low, high) for name, (low, high) in known.pop("bounds", {}).items()}
    return ArchiveSegment(**known, bounds=bounds)


def _line(tree: dict[str, Any]) -> bytes:
    return json.dumps(tree, separators=(",", ":")).encode() + b"\n"


TRIMMED_FILE = "_trimmed"
"""Beside a manifest: the id below which the stream has no entries any more."""
NEEDED_FILE = "_needed"
"""Beside a manifest: the id from which on a restarted trainer replays. Retention leaves it alone."""
CONSECUTIVE = (StreamName.PROMPTS, StreamName.COMMITS)
"""Streams whose entries have the ids 1-0, 2-0, 3-0, ... without a gap."""


def note_trim(folder: Path, first_id: str) -> None:
    """Remember durably that entries below `first_id` are about to leave Redis."""
    if id_order(first_id) > id_order(_noted(folder, TRIMMED_FILE)):
        write_atomically(folder / TRIMMED_FILE, first_id + "\n")


def take_back_trim(folder: Path, first_id: str) -> None:
    """Entries from `first_id` on have not left Redis: it has lost the trim, or the entries themselves."""
    if id_order(first_id) < id_order(_noted(folder, TRIMMED_FILE)):
        write_atomically(folder / TRIMMED_FILE, first_id + "\n")


def note_needed(folder: Path, first_id: str) -> None:
    """Remember durably that a trainer that restarts replays entries from `first_id` on."""
    if not (folder / NEEDED_FILE).exists() or first_id != _noted(folder, NEEDED_FILE):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / NEEDED_FILE, first_id + "\n")


def is_needed(folder: Path, segment: ArchiveSegment) -> bool:
    """Whether a restart may replay what is in the segment."""
    has_note = (folder / NEEDED_FILE).exists()
    return has_note and id_order(segment.last_id) >= id_order(_noted(folder, NEEDED_FILE))


def trimmed_up_to(folder: Path) -> str:
    """No entry up to this one is in Redis any more; `START` where none was trimmed."""
    return id_before(_noted(folder, TRIMMED_FILE))


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


def _noted(folder: Path, name: str) -> str:
    try:
        text = (folder / name).read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return START
    try:
        id_order(text)
    except ValueError:
        raise ArchiveError(f"{folder / name} holds {text[:40]!r}, expected an entry id") from None
    return text

"""Archives a run's streams, and removes what is beyond the run's retention.

Safe to call at any time, from anywhere, as often as one likes: what is archived already is passed over.
"""

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import structlog

from tidemill.common.archive import archive_folder, stream_folder
from tidemill.common.archive.manifest import ArchiveSegment, Manifest, gaps, is_needed
from tidemill.common.archive.writer import archive_stream, kept_aside, num_claims, unlisted, writing
from tidemill.common.config import ArchiveConfig
from tidemill.common.errors import ArchiveError
from tidemill.common.files import LockedError, file_checksum
from tidemill.common.redis.broker import Broker
from tidemill.common.store import ClaimStore
from tidemill.common.streams.selection import StreamName
from tidemill.common.wire.keys import Keys

log = structlog.get_logger(__name__)

MIB, GIB = 1 << 20, 1 << 30
DAY_S = 86400.0
POLL_S = 0.2
UNLISTED = "no manifest lists it; `tidemill archive` takes it in"
KEPT_ASIDE = "it could not be taken into the manifest; the log of who archived last says why"


@dataclass(frozen=True, slots=True)
class Damage:
    """A file of the archive that is not what its manifest says."""

    path: Path
    reason: str


async def archive_run(
    broker: Broker,
    keys: Keys,
    run_dir: Path,
    config: ArchiveConfig,
    until: Mapping[StreamName, str] | None = None,
    *,
    is_last: bool = False,
    patience_s: float = 0.0,
) -> dict[StreamName, int]:
    """Archive streams up to ids, without `until` all of them; returns how many entries of each.

    `is_last` writes what does not fill a segment too. Then retention has its turn.

    Raises:
        LockedError: another process archives this run, for longer than `patience_s`.
    """
    # What the run refuses for being too large must not come whole out of its archive.
    broker.claims = broker.claims or ClaimStore(run_dir, max_bytes=broker.max_bytes)
    ends = dict.fromkeys(StreamName, "+") if until is None else until
    size, deadline = int(config.segment_mb * MIB), time.monotonic() + patience_s
    while True:
        try:
            with writing(run_dir):
                counts = {
                    stream: await archive_stream(
                        broker, keys, run_dir, stream, segment_bytes=size, until=end, is_last=is_last
                    )
                    for stream, end in ends.items()
                }
                retain(run_dir, config)
                return {stream: count for stream, count in counts.items() if count}
        except LockedError:
            if time.monotonic() >= deadline:
                raise
        await asyncio.sleep(POLL_S)


def retain(run_dir: Path, config: ArchiveConfig) -> int:
    """Remove the oldest segments beyond the run's limits, but none that a restart may replay; returns how
    many. Call within `writing`.

    A manifest forgets a file before the file goes: readers find whole segments only.
    """
    manifests = [Manifest.load(stream_folder(run_dir, stream)) for stream in StreamName]
    needed = [segment for m in manifests for segment in m.segments if is_needed(m.folder, segment)]
    leaving = [segment for segment in _too_much(manifests, config) if segment not in needed]
    num_gone = 0
    for manifest in manifests:
        # From the beginning only: where a clock was set back, a later file may look older.
        gone = list(takewhile(leaving.__contains__, manifest.segments))
        if gone:
            manifest.without(gone)
            for segment in gone:
                manifest.path(segment).unlink(missing_ok=True)
            num_gone += len(gone)
    if num_gone:
        log.info("removed from the archive", segments=num_gone)
    return num_gone


def _too_much(manifests: Sequence[Manifest], config: ArchiveConfig) -> Iterator[ArchiveSegment]:
    """What is beyond the limits, the oldest first. Commits and weights are small, and explain the rest."""
    kept = {str(StreamName.COMMITS), str(StreamName.WEIGHTS)}
    candidates = [segment for m in manifests if m.folder.name not in kept for segment in m.segments]
    oldest = time.time() - config.keep_days * DAY_S if config.keep_days is not None else float("-inf")
    room = config.keep_gb * GIB if config.keep_gb is not None else float("inf")
    total = sum(manifest.num_bytes for manifest in manifests)
    for segment in sorted(candidates, key=_newest):
        if _newest(segment) >= oldest and total <= room:
            return
        total -= segment.num_bytes
        yield segment


def _newest(segment: ArchiveSegment) -> float:
    """When the newest entry was made; where entries do not tell, when they were archived."""
    return segment.bounds.get("time", (0.0, segment.archived_at))[1]


def check(run_dir: Path) -> list[Damage]:
    """Files that are missing, damaged or not listed, and entries that no file has; reads all files."""
    damages = []
    for stream in StreamName:
        try:
            manifest = Manifest.load(stream_folder(run_dir, stream))
        except ArchiveError as error:
            damages.append(Damage(stream_folder(run_dir, stream), str(error)))
            continue
        for segment in manifest.segments:
            path = manifest.path(segment)
            if not path.is_file():
                damages.append(Damage(path, "it is not there"))
            elif file_checksum(path) != segment.checksum:
                damages.append(Damage(path, "its bytes are not those that were written"))
            elif num_bare := num_claims(path):
                damages.append(Damage(path, f"{num_bare} of its records had lost their payload before"))
        damages += [Damage(path, UNLISTED) for path in unlisted(manifest)]
        damages += [Damage(path, KEPT_ASIDE) for path in kept_aside(manifest.folder)]
        damages += [Damage(manifest.folder, gap) for gap in gaps(manifest)]
    return damages


def has_archive(run_dir: Path) -> bool:
    """Whether anything of the run was archived."""
    return any(archive_folder(run_dir).glob("*/*.jsonl"))

"""A run's streams as Parquet files, so that Redis stays small and the whole run stays readable.

`<runs>/<run_id>/archive/<stream>/` holds segments of one stream, each a contiguous range of its entries, and
a manifest that lists them. Nothing here imports pyarrow before it is needed: import the submodules you use.
"""

from contextlib import suppress
from pathlib import Path

ARCHIVE_FOLDER = "archive"
"""Name of the archive in a run's folder."""
LOCK_FILE = ".lock"
"""Locked by the process that writes the archive, one at a time."""
WHOLE_FILE = ".whole"
"""Exists while the run is over and its archive is complete: then its Redis need not be read."""


def archive_folder(run_dir: Path) -> Path:
    """Where the archive of a run is; it may not exist yet."""
    return run_dir / ARCHIVE_FOLDER


def stream_folder(run_dir: Path, stream: str) -> Path:
    """Where the segments of one stream are, such as `archive/scores-eval` of `scores:eval`."""
    return archive_folder(run_dir) / stream.replace(":", "-")


def is_whole(run_dir: Path) -> bool:
    return (archive_folder(run_dir) / WHOLE_FILE).exists()


def mark_whole(run_dir: Path, is_whole: bool) -> None:
    """Create `WHOLE_FILE` once a run that is over was archived, or remove it when the run goes on."""
    mark = archive_folder(run_dir) / WHOLE_FILE
    if is_whole:
        with suppress(OSError):  # without the file, readers also read Redis
            mark.touch()
    else:
        mark.unlink(missing_ok=True)

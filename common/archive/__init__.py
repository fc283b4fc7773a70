"""A run's streams as Parquet files, so that Redis stays small and the whole run stays readable.

`<runs>/<run_id>/archive/<stream>/` holds segments of one stream, each a contiguous range of its entries, and
a manifest that lists them. Nothing here imports pyarrow before it is needed: import the submodules you use.
"""

from pathlib import Path

ARCHIVE_FOLDER = "archive"
"""Below a run's folder."""
LOCK_FILE = ".lock"
"""Held by whoever writes: one process at a time."""


def archive_folder(run_dir: Path) -> Path:
    """Where the archive of a run is; it may not exist yet."""
    return run_dir / ARCHIVE_FOLDER


def stream_folder(run_dir: Path, stream: str) -> Path:
    """Where the segments of one stream are, such as `archive/scores-eval` of `scores:eval`."""
    return archive_folder(run_dir) / stream.replace(":", "-")

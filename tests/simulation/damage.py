"""What a dying machine does to files: they end in the middle, or are empty."""

import os
from pathlib import Path

from tidemill.common.archive.manifest import MANIFEST_FILE


def tear(run_dir: Path, what: str, share: float) -> bool:
    """Cut the newest file of its kind to a share of its bytes; False where there is none.

    `checkpoint` and `weights` are a file of the newest version, `manifest` the last line of the trajectories'
    archive, `metrics` all of metrics.jsonl.
    """
    if what == "metrics":
        return _cut(run_dir / "metrics.jsonl", 0.0)
    if what.startswith("manifest"):
        return _cut_last_line(
            run_dir / "archive" / (what.partition(":")[2] or "trajectories") / MANIFEST_FILE, share
        )
    versions = sorted((run_dir / {"checkpoint": "checkpoints", "weights": "weights"}[what]).glob("v*"))
    files = sorted(path for path in versions[-1].iterdir() if path.is_file()) if versions else []
    return _cut(files[int(share * 97) % len(files)], share) if files else False


def newest(run_dir: Path) -> str:
    """The newest checkpoint's folder, as long as nothing has replaced it; empty where there is none."""
    versions = sorted((run_dir / "checkpoints").glob("v*"))
    return f"{versions[-1].name} {versions[-1].stat().st_ino}" if versions else ""


def _cut(path: Path, share: float) -> bool:
    if not path.is_file():
        return False
    os.truncate(path, int(path.stat().st_size * share))
    return True


def _cut_last_line(path: Path, share: float) -> bool:
    """Leave a share of the last line."""
    if not path.is_file() or not (text := path.read_bytes()):
        return False
    start = text.rstrip(b"\n").rfind(b"\n") + 1
    os.truncate(path, start + int(share * (len(text) - start - 1)))
    return True

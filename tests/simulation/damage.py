"""What a dying machine does to files: they end in the middle, are empty, or have one bit changed."""

import os
from pathlib import Path


def tear(run_dir: Path, target: str, share: float) -> bool:
    """Cut the newest file of its kind to a share of its bytes, or change a bit there; False if there is none.

    `checkpoint` and `weights` are a file of the newest version, `metrics` all of metrics.jsonl.
    """
    if target == "metrics":
        return _cut(run_dir / "metrics.jsonl", 0.0)
    versions = sorted((run_dir / {"checkpoint": "checkpoints", "weights": "weights"}[target]).glob("v*"))
    files = sorted(path for path in versions[-1].iterdir() if path.is_file()) if versions else []
    if not files:
        return False
    damage = flip if int(share * 1000) % 3 == 0 else _cut
    return damage(files[int(share * 97) % len(files)], share)


def newest(run_dir: Path) -> str:
    """The newest checkpoint's folder, as long as nothing has replaced it; empty where there is none."""
    versions = sorted((run_dir / "checkpoints").glob("v*"))
    return f"{versions[-1].name} {versions[-1].stat().st_ino}" if versions else ""


def _cut(path: Path, share: float) -> bool:
    if not path.is_file():
        return False
    os.truncate(path, int(path.stat().st_size * share))
    return True


def flip(path: Path, share: float) -> bool:
    content = bytearray(path.read_bytes())
    if not content:
        return False
    content[int(len(content) * share)] ^= 1 << int(share * 7)
    path.write_bytes(content)
    return True

"""Reads the journal of commits in a run's folder, for steps that Redis has trimmed.

The trainer writes the file (`commits.jsonl`): a line for each step, consecutive, each with a checksum. Last
steps that are not in Redis were never committed: a reader takes none beyond what Redis has.
"""

import json
import os
import sys
from base64 import b64decode
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from tidemill.common.wire import codec
from tidemill.common.wire.messages import Commit

JOURNAL_FILE = "commits.jsonl"
"""Name of the journal in the run's folder."""


def document_of(line: bytes) -> dict[str, Any]:
    """A line, decoded. Raises ValueError, KeyError or TypeError where it is not whole."""
    document: dict[str, Any] = json.loads(line)
    if not line.endswith(b"\n") or document["checksum"] != xxhash.xxh3_128_hexdigest(
        document["commit"].encode()
    ):
        raise ValueError("a line does not match its checksum")
    return document


def commit_of(document: dict[str, Any]) -> Commit:
    return codec.decode_payload(b64decode(document["commit"]), Commit)


def read_journal(run_dir: Path, first: int, last: int) -> list[Commit]:
    """The commits of these steps that the folder has, in order; none where there is no journal to read."""
    commits: list[Commit] = []
    with suppress(OSError), open(run_dir / JOURNAL_FILE, "rb") as file:
        file.seek(_place_of(file, first)[0])
        for line in iter(file.readline, b""):
            step = _step_of(line)
            if step is None or step > last:
                break
            commits.append(commit_of(document_of(line)))
    return commits


def journal_steps(run_dir: Path) -> range:
    """The steps that the folder has; they are consecutive."""
    with suppress(OSError), open(run_dir / JOURNAL_FILE, "rb") as file:
        first = _step_of(file.readline())
        if first is not None:
            return range(first, _place_of(file, sys.maxsize)[1] + 1)
    return range(0)


def newest_below(run_dir: Path, step: int) -> int:
    """The newest step of the journal below this one; -1 where there is none."""
    with suppress(OSError), open(run_dir / JOURNAL_FILE, "rb") as file:
        return _place_of(file, step)[1]
    return -1


def _place_of(file: BinaryIO, step: int) -> tuple[int, int]:
    """Offset of the first line whose step is at least `step`, and the step of the line before it (-1: none).

    A binary search: steps ascend.
    """
    low = 0
    high = os.fstat(file.fileno()).st_size
    before = -1
    while low < high:
        middle = (low + high) // 2
        begin = _next_line(file, middle)
        line_step = _step_of(file.readline())
        if line_step is None or line_step >= step:
            high = middle
        else:
            # Any offset in this line: `_next_line` then finds the line after it.
            low = begin + 1
            before = line_step
    return _next_line(file, low), before


def _next_line(file: BinaryIO, offset: int) -> int:
    """Seek to the first line that begins at `offset` or later; returns its offset."""
    file.seek(max(0, offset - 1))
    if offset:
        file.readline()  # the rest of the line before; only its newline where a line begins at `offset`
    return file.tell()


def _step_of(line: bytes) -> int | None:
    """The line's step; None where the line is not whole, as one that the trainer is writing."""
    try:
        return int(document_of(line)["step"])
    except (ValueError, KeyError, TypeError):
        return None

"""Every commit of the run on the trainer's own disk, so that Redis can be given back whatever it has lost.

Redis may come back without its last second, a replica without its last steps, a backup without a day; the
stream takes no step below its last, so what is missing has to be there before the next commit is appended.
Invariant: the file holds consecutive steps, each whole (a checksum proves it); what a crash tore off its end
is cut away on opening. It is no second truth: above the newest checkpoint, history is what Redis holds.
"""

import json
import os
from base64 import b64decode, b64encode
from pathlib import Path
from typing import Any

import structlog
import xxhash

from common.files import storage_errors
from common.wire import codec
from common.wire.messages import Commit

log = structlog.get_logger(__name__)

JOURNAL_FILE = "commits.jsonl"
"""Below the run's folder: a line for each step."""


class CommitJournal:
    """Append a commit, read one, forget the newest. One trainer writes it."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / JOURNAL_FILE
        self._first = 0
        self._ends: list[int] = []
        """Where in the file the line of each step ends, from step `_first` on."""
        self._open()

    @property
    def first_step(self) -> int:
        """The oldest step it holds; meaningless while it is empty."""
        return self._first

    @property
    def next_step(self) -> int:
        """The step after the newest; `first_step` while it is empty."""
        return self._first + len(self._ends)

    @property
    def steps(self) -> range:
        """The steps it holds."""
        return range(self._first, self.next_step)

    def append(self, commit: Commit) -> None:
        """Make a commit durable; replaces one of the same step, and forgets all above it.

        Raises:
            StorageError: the disk is full or read-only. Nothing of it is there; call again.
        """
        if commit.step not in range(self._first, self.next_step + 1):
            self._cut_to(0)  # what lies before a gap could not be given back either
        elif commit.step < self.next_step:
            self.cut(commit.step)
        if not self._ends:
            self._first = commit.step
        end = self._ends[-1] if self._ends else 0
        line = _line_of(commit)
        with storage_errors("the journal of commits", self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "ab") as file:
                try:
                    file.write(line)
                    file.flush()
                    os.fsync(file.fileno())
                except OSError:
                    os.ftruncate(file.fileno(), end)
                    raise
        self._ends.append(end + len(line))

    def read(self, step: int) -> Commit:
        """The commit of a step in `steps`."""
        place = step - self._first
        start = self._ends[place - 1] if place else 0
        with open(self.path, "rb") as file:
            file.seek(start)
            return _commit_of(file.read(self._ends[place] - start))

    def cut(self, below: int) -> None:
        """Forget all steps from `below` on."""
        keep = min(max(0, below - self._first), len(self._ends))
        self._cut_to(keep)

    def _cut_to(self, keep: int) -> None:
        """Keep so many lines."""
        if keep == len(self._ends):
            return
        with storage_errors("the journal of commits", self.path):
            os.truncate(self.path, self._ends[keep - 1] if keep else 0)
        del self._ends[keep:]

    def _open(self) -> None:
        """Find the lines, and cut off what is not whole."""
        if not self.path.exists():
            return
        end, problem = 0, ""
        with open(self.path, "rb") as file:
            for line in file:
                try:
                    step = int(_document_of(line)["step"])
                    if self._ends and step != self.next_step:
                        raise ValueError(f"step {step} follows step {self.next_step - 1}")
                except (ValueError, KeyError, TypeError) as error:
                    problem = str(error)
                    break
                if not self._ends:
                    self._first = step
                end += len(line)
                self._ends.append(end)
        if problem:
            log.warning("the journal of commits is cut off where it is not whole", problem=problem, left=end)
            with storage_errors("the journal of commits", self.path):
                os.truncate(self.path, end)


def _line_of(commit: Commit) -> bytes:
    text = b64encode(codec.encode_payload(commit)).decode()
    document = {"step": commit.step, "commit": text, "checksum": xxhash.xxh3_128_hexdigest(text.encode())}
    return json.dumps(document).encode() + b"\n"


def _document_of(line: bytes) -> dict[str, Any]:
    """Raises ValueError, KeyError or TypeError where the line is not whole."""
    document: dict[str, Any] = json.loads(line)
    if not line.endswith(b"\n") or document["checksum"] != xxhash.xxh3_128_hexdigest(
        document["commit"].encode()
    ):
        raise ValueError("a line does not match its checksum")
    return document


def _commit_of(line: bytes) -> Commit:
    return codec.decode_payload(b64decode(_document_of(line)["commit"]), Commit)

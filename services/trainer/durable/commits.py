"""Commits: the write-ahead record of a step, in Redis and in a journal on the trainer's own disk.

These are parts 1 and 5 of a step's order (`trainer.py`). A commit's entry id is its step's, so it is appended
once only: a second trainer on the same run finds that id taken, and ends. Redis may restart without its last
second of writes, or from a backup of the day before. The stream takes no step below its last one, so commits
that are missing are appended from the journal before the next commit. The journal holds consecutive steps,
each whole (a checksum proves it). Above the newest checkpoint it decides nothing: there, history is what
Redis holds.
"""

import json
import os
from base64 import b64encode
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
import xxhash

from tidemill.common.errors import TidemillError
from tidemill.common.files import append_durably, storage_errors
from tidemill.common.redis.broker import Broker
from tidemill.common.run.journal import JOURNAL_FILE, commit_of, document_of
from tidemill.common.streams import (
    START,
    Entry,
    Garbled,
    Mark,
    append_after,
    append_missing,
    entry_id_of,
    id_order,
    last_id,
    read_range,
)
from tidemill.common.streams.log import KEPT_COMMITS
from tidemill.common.wire import codec
from tidemill.common.wire.keys import Keys, StreamName
from tidemill.common.wire.messages import Commit
from tidemill.services.trainer.batch.unexpected_entries import is_unexpected, remove_unexpected

if TYPE_CHECKING:
    from tidemill.common.history import History

log = structlog.get_logger(__name__)

CUT_OFF_FILE = "commits.cut-off.jsonl"
"""File beside the journal: what was not whole when a trainer started, and all behind it."""


class CommitJournal:
    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / JOURNAL_FILE
        self._first = 0
        self._ends: list[int] = []
        """Where in the file the line of each step ends, from step `_first` on."""
        self._open()

    @property
    def steps(self) -> range:
        """The steps that it holds."""
        return range(self._first, self._first + len(self._ends))

    def append(self, commit: Commit) -> None:
        """Make a commit durable; replaces one of the same step, and forgets all above it.

        Raises:
            StorageError: the disk is full or read-only. Nothing of the commit is there; call again.
        """
        if not self._first <= commit.step <= self.steps.stop:
            # Commits before a gap could not go back to Redis either; they are kept, perhaps the only copy.
            self._keep_cut_off(0)
            self.cut(0)
        # From here on it holds a history that Redis does not have, and that must never come back.
        self.cut(commit.step)
        if not self._ends:
            self._first = commit.step
        end = self._ends[-1] if self._ends else 0
        text = b64encode(codec.encode_payload(commit)).decode()
        document = {"step": commit.step, "commit": text, "checksum": xxhash.xxh3_128_hexdigest(text.encode())}
        line = json.dumps(document).encode() + b"\n"
        # At `end`, not at the end of the file: a write that failed may have left bytes there.
        append_durably(self.path, line, "the journal of commits", end)
        # Only now: a call that failed is made again, and needs `_ends` as it was.
        self._ends.append(end + len(line))

    def has(self, commit: Commit) -> bool:
        """Whether it holds this very commit, and not another one of the same step."""
        # Compared as bytes: a metric that is not a number differs from itself.
        ours = codec.encode_payload(commit)
        return commit.step in self.steps and codec.encode_payload(self.read(commit.step)) == ours

    def find(self, step: int) -> Commit | None:
        """The commit of a step; None where it holds none."""
        return self.read(step) if step in self.steps else None

    def read(self, step: int) -> Commit:
        """The commit of a step in `steps`."""
        number = step - self._first
        start = self._ends[number - 1] if number else 0
        with open(self.path, "rb") as file:
            file.seek(start)
            line = file.read(self._ends[number] - start)
        return commit_of(document_of(line))

    def cut(self, below: int) -> None:
        """Forget all steps from `below` on."""
        keep = max(0, below - self._first)
        if keep < len(self._ends):
            with storage_errors("the journal of commits", self.path):
                os.truncate(self.path, self._ends[keep - 1] if keep else 0)
            # After the truncation: where that fails, `_ends` still says what the file holds.
            del self._ends[keep:]

    def _open(self) -> None:
        """Find the lines, and cut off from the first one that is not whole. What is cut off is kept: it may
        have whole commits, which Redis may lose."""
        if not self.path.exists():
            return
        end = 0
        problem = ""
        with open(self.path, "rb") as file:
            for line in file:
                try:
                    step = int(document_of(line)["step"])
                    if self._ends and step != self.steps.stop:
                        raise ValueError(f"step {step} follows step {self.steps.stop - 1}")
                except (ValueError, KeyError, TypeError) as error:
                    problem = str(error)
                    break
                if not self._ends:
                    self._first = step
                end += len(line)
                self._ends.append(end)
        if problem:
            log.warning(
                "the journal of commits is cut off where it is not whole",
                problem=problem,
                left=end,
                kept=CUT_OFF_FILE,
            )
            # Copied before it is cut off: a crash between the two leaves two copies, and not none.
            self._keep_cut_off(end)
            with storage_errors("the journal of commits", self.path):
                os.truncate(self.path, end)

    def _keep_cut_off(self, start: int) -> None:
        """Copy what lies behind `start` to the file beside."""
        cut_off = self.path.read_bytes()[start:] if self.path.exists() else b""
        if cut_off:
            kept = self.path.with_name(CUT_OFF_FILE)
            append_durably(kept, cut_off, "what is cut off the journal of commits")


async def restore_commits(
    broker: Broker, keys: Keys, journal: CommitJournal, below: int | None = None, *, is_trimmed: bool = False
) -> None:
    """Append again what is missing at the end of the commits, of steps below `below`.

    Only for steps that a checkpoint covers: the records that others were trained on may be gone. Where the
    run trims commits (`is_trimmed`), an emptied Redis gets only the newest ones back.

    Raises:
        TidemillError: some are missing that the journal does not hold: history would have a hole.
    """
    # A hole has to be refused before anything is appended: behind a later step, the stream takes none of it.
    steps = journal.steps
    if below is not None:
        steps = range(steps.start, min(steps.stop, max(below, steps.start)))
    reaches_below = bool(steps) and (below is None or steps.stop == below)
    # Redis has to hold every step before this one: the journal can give back those from it on, or none.
    first = below or 0
    if reaches_below:
        first = steps.start
    last = id_order(await last_id(broker, keys.commits))
    if last < id_order(entry_id_of(first - 1)):
        raise TidemillError(
            f"Redis has lost the commits of steps {last[0]} to {first - 1} of run {keys.run_id}, and "
            f"{journal.path} does not hold them: going on would leave a hole in the run's history. "
            "Restore Redis or that file from a backup, or start a new run from the last version's weights."
        )
    if is_trimmed and last == id_order(START):
        steps = steps[-KEPT_COMMITS:]
    lost = await append_missing(broker, keys.commits, steps, journal.read)
    if lost:
        log.warning("appended commits again that Redis has lost", first=lost[0], count=len(lost))


class LostTailError(TidemillError):
    """The stream ends before the commit's predecessor: Redis has lost what was committed before."""


class SecondTrainerError(TidemillError):
    """Another trainer has committed this step."""


async def append_commit(broker: Broker, keys: Keys, commit: Commit, mark: Mark | None = None) -> None:
    """Append a commit under its step's id, right behind that of the step before, in one atomic unit.

    Raises:
        LostTailError: the commit before is not there: it has to come back first.
        MarkLostError: the `mark` is not there: what the step was trained on may be gone as well.
        SecondTrainerError: the step has a commit that is not this one.
    """
    entry_id = entry_id_of(commit.step)
    # Read again after each refusal: between reading the last id and the append, Redis may have restarted
    # without its tail, or another trainer may have committed.
    while id_order(last := await last_id(broker, keys.commits)) < id_order(entry_id):
        if commit.step and id_order(last) < id_order(entry_id_of(commit.step - 1)):
            raise LostTailError(f"the commits of run {keys.run_id} end before step {commit.step - 1}")
        if await append_after(broker, keys.commits, last, entry_id, commit, mark):
            return
    # The place is taken: by an entry that no trainer wrote, by this very commit (the connection broke after
    # the append), or by another trainer.
    if await remove_unexpected(broker, keys, keys.commits, Commit):
        return await append_commit(broker, keys, commit, mark)
    entries = await read_range(broker, keys.commits, Commit, entry_id, entry_id)
    for entry in entries:
        if isinstance(entry, Garbled):
            raise TidemillError(
                f"step {commit.step} of run {keys.run_id} cannot be committed: entry {entry.entry_id} of "
                f"{keys.commits} has its place, and cannot be read ({entry.error}). If a newer release "
                "wrote it, go on with that one; else remove it (XDEL, then XSETID to the commit before), and "
                "restart."
            )
    # Compared as bytes: a metric that is not a number differs from itself.
    ours = codec.encode_payload(commit)
    if not any(isinstance(entry, Entry) and codec.encode_payload(entry.message) == ours for entry in entries):
        raise SecondTrainerError(
            f"step {commit.step} of run {keys.run_id} was committed by another trainer. "
            "One run has one trainer: stop the other one, or give this one a run id of its own."
        )


async def read_commits(history: "History", first_step: int) -> list[Commit]:
    """Commits from `first_step` on, in order. Raises TidemillError: a commit cannot be decoded, or one is
    missing in between."""
    commits: list[Commit] = []
    async for entry in history.scan_from(StreamName.COMMITS, entry_id_of(first_step)):
        expected = first_step + len(commits)
        if is_unexpected(entry):  # with commits of ours behind it, so that it can stay
            log.error("an unexpected entry among the commits is skipped", entry=entry.entry_id)
            continue
        if isinstance(entry, Garbled):
            raise TidemillError(
                f"commit {entry.entry_id} of run {history.run_id} is unreadable: {entry.error}"
            )
        commit = entry.message
        assert isinstance(commit, Commit), "the stream of commits has no others"
        if commit.step != expected:
            raise TidemillError(
                f"run {history.run_id} has a commit of step {commit.step} where step {expected} is due; "
                "restore a checkpoint of a later version, or the stream from its backup"
            )
        commits.append(commit)
    return commits

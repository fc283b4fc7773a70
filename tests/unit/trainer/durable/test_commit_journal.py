"""The journal gives back every commit it was given, and nothing that a crash has torn."""

from pathlib import Path

import pytest

from tests.support.disks import largest_file
from tidemill.common.files import StorageError
from tidemill.common.wire.messages import Commit
from tidemill.services.trainer.durable.commits import CUT_OFF_FILE, JOURNAL_FILE, CommitJournal


def commit_of(step: int, digest: str = "0" * 32) -> Commit:
    keys = tuple((step, index) for index in range(3))
    return Commit(step=step, version=step + 1, mini_batches=((keys,),), groups=(step,), digest=digest)


def filled(folder: Path, *steps: int) -> CommitJournal:
    journal = CommitJournal(folder)
    for step in steps:
        journal.append(commit_of(step))
    return journal


def test_commits_come_back_equal_also_to_the_next_process(tmp_path):
    filled(tmp_path, 0, 1, 2)
    journal = CommitJournal(tmp_path)
    assert journal.steps == range(3)
    assert [journal.read(step) for step in journal.steps] == [commit_of(step) for step in range(3)]
    journal.append(commit_of(3))
    assert CommitJournal(tmp_path).read(3) == commit_of(3)


def test_it_may_begin_anywhere_but_has_no_gap(tmp_path):
    journal = filled(tmp_path, 5, 6)
    assert journal.steps == range(5, 7)
    journal.append(commit_of(9))
    assert journal.steps == CommitJournal(tmp_path).steps == range(9, 10)


def test_a_step_that_is_trained_again_replaces_what_came_of_it(tmp_path):
    journal = filled(tmp_path, 0, 1, 2)
    journal.append(commit_of(1, "f" * 32))
    assert journal.steps == range(2)
    assert CommitJournal(tmp_path).read(1).digest == "f" * 32


@pytest.mark.parametrize(("below", "num_left"), [(0, 0), (2, 2), (3, 3), (7, 3)])
def test_the_newest_are_forgotten(tmp_path, below, num_left):
    journal = filled(tmp_path, 0, 1, 2)
    journal.cut(below)
    assert journal.steps == CommitJournal(tmp_path).steps == range(num_left)


@pytest.mark.parametrize("num_cut", [1, 30, 150])
def test_what_a_crash_tore_off_is_cut_away(tmp_path, num_cut):
    filled(tmp_path, 0, 1, 2)
    path = tmp_path / JOURNAL_FILE
    path.write_bytes(path.read_bytes()[:-num_cut])
    journal = CommitJournal(tmp_path)
    assert journal.steps == range(2)
    journal.append(commit_of(2))
    assert CommitJournal(tmp_path).steps == range(3)


@pytest.mark.parametrize("num_sizes", [3, 3000], ids=["less than a buffer", "more than a buffer"])
@pytest.mark.parametrize("share", [0.01, 0.5, 0.99])
def test_a_disk_that_is_full_in_the_middle_of_a_line_leaves_none_of_it(tmp_path, num_sizes, share):
    sizes = {str(number): number for number in range(num_sizes)}
    commits = [commit_of(step).model_copy(update={"sizes": sizes}) for step in range(3)]
    journal = CommitJournal(tmp_path)
    path = tmp_path / JOURNAL_FILE
    journal.append(commits[0])
    before = path.read_bytes()
    with largest_file(int((1 + share) * len(before))), pytest.raises(StorageError):
        journal.append(commits[1])
    assert path.read_bytes() == before
    journal.append(commits[1])
    journal.append(commits[2])
    kept = CommitJournal(tmp_path)
    assert [kept.read(step) for step in kept.steps] == commits


def test_what_a_start_cuts_off_is_kept(tmp_path):
    filled(tmp_path, 0, 1, 2, 3)
    path = tmp_path / JOURNAL_FILE
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1][5:] + lines[2] + lines[3])
    assert CommitJournal(tmp_path).steps == range(1)
    assert (tmp_path / CUT_OFF_FILE).read_bytes() == lines[1][5:] + lines[2] + lines[3]
    path.write_bytes(lines[0] + b"half of one")
    assert CommitJournal(tmp_path).steps == range(1)
    assert (tmp_path / CUT_OFF_FILE).read_bytes().endswith(lines[3] + b"half of one")


def test_a_flipped_byte_ends_what_is_believed(tmp_path):
    filled(tmp_path, 0, 1, 2)
    path = tmp_path / JOURNAL_FILE
    lines = path.read_bytes().splitlines(keepends=True)
    lines[1] = lines[1].replace(b'"commit": "', b'"commit": "A', 1)
    path.write_bytes(b"".join(lines))
    assert CommitJournal(tmp_path).steps == range(1)

"""Commits that Redis has trimmed and that were never archived come from the journal in the run's folder."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.archives import archive, run_folder
from tests.support.numbered import append_numbered
from tidemill.common.history import ALL, History, Selection, StreamName
from tidemill.common.history import history as history_module
from tidemill.common.history.journal import JOURNAL_FILE, journal_steps, newest_below, read_journal
from tidemill.common.redis.broker import Broker
from tidemill.common.streams import entry_id_of, trim_before
from tidemill.common.wire.keys import Keys
from tidemill.common.wire.messages import Commit
from tidemill.services.trainer.durable.commits import CommitJournal

STEPS = 9


def commit_of(step: int) -> Commit:
    """Lines of the journal have different lengths."""
    group = (tuple((step, index) for index in range(1 + step * step)),)
    return Commit(step=step, version=step + 1, mini_batches=(group,), groups=(step,), digest="0" * 32)


@pytest.fixture
async def run_dir(broker: Broker, keys: Keys, tmp_path: Path) -> AsyncIterator[Path]:
    """All are in Redis; the journal has one more, which was never committed."""
    folder = run_folder(tmp_path, keys)
    folder.mkdir(exist_ok=True)
    journal = CommitJournal(folder)
    for step in range(STEPS + 1):
        journal.append(commit_of(step))
    await append_numbered(broker, keys.commits, [(step, commit_of(step)) for step in range(STEPS)])
    yield folder


SELECTIONS = {
    "all": ALL,
    "steps": Selection(steps=(2, 6)),
    "steps below": Selection(steps=(0, 3)),
    "a step": Selection(steps=(4, 4)),
    "a ticket": Selection(tickets=(1, 1)),
    "versions": Selection(versions=(3, 8)),
    "ids": Selection(first_id="3-1", last_id="7-0"),
    "ids from the start": Selection(first_id="0-0", last_id=entry_id_of(1)),
    "beyond the newest": Selection(steps=(STEPS, None)),
}


async def read(history: History, selection: Selection = ALL, newest_first: bool = False) -> list[Commit]:
    found = history.messages(StreamName.COMMITS, Commit, selection, newest_first)
    return [commit async for commit in found]


@pytest.mark.parametrize("num_trimmed", [1, 5, 8])
@pytest.mark.parametrize("num_archived", [0, 2])
async def test_every_selection_finds_the_same_before_and_after_the_trim(
    broker: Broker,
    keys: Keys,
    run_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_trimmed: int,
    num_archived: int,
) -> None:
    monkeypatch.setattr(history_module, "JOURNAL_STEPS", 2)
    whole = {name: await read(History(keys.run_id, None, broker), sel) for name, sel in SELECTIONS.items()}
    assert [len(commits) for commits in whole.values()] == [9, 5, 4, 1, 1, 6, 4, 2, 0]
    await trim_before(broker, keys.commits, entry_id_of(num_trimmed))
    if num_archived:  # of those that are left: archiving was turned on later
        until = entry_id_of(min(num_trimmed + num_archived, STEPS) - 1)
        await archive(broker, keys, run_dir, StreamName.COMMITS, until=until)
    history = History(keys.run_id, run_dir, broker)
    for name, selection in SELECTIONS.items():
        assert await read(history, selection) == whole[name], name
        assert await read(history, selection, newest_first=True) == whole[name][::-1], name
    assert await history.commit(0) == commit_of(0)
    assert await history.commit_of_ticket(0) == commit_of(0)
    assert await history.commit(STEPS) is None, "the journal alone has it: it was never committed"


async def test_what_is_trimmed_between_two_reads_is_not_passed_over(
    broker: Broker, keys: Keys, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_module, "READ_COUNT", 2)
    for newest_first in (False, True):
        history, seen = History(keys.run_id, run_dir, broker), []
        async for commit in history.messages(StreamName.COMMITS, Commit, newest_first=newest_first):
            seen.append(commit.step)
            await trim_before(broker, keys.commits, entry_id_of(min(STEPS - 1, commit.step + 4)))
        assert sorted(seen) == list(range(STEPS))


async def test_who_does_not_see_the_folder_is_told_how_many_are_missing(
    broker: Broker, keys: Keys, run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await trim_before(broker, keys.commits, entry_id_of(5))
    for folder in (None, run_dir.parent / "elsewhere"):
        history = History(keys.run_id, folder, broker)
        assert [commit.step for commit in await read(history)] == list(range(5, STEPS))
        assert await read(history, Selection(steps=(1, 2))) == []
    assert [record.args[0] for record in caplog.records if isinstance(record.args, tuple)] == [5, 5]
    caplog.clear()
    assert len(await read(History(keys.run_id, run_dir, broker))) == STEPS
    assert not caplog.records


async def test_an_emptied_redis_has_no_commits_whatever_the_journal_says(
    broker: Broker, keys: Keys, run_dir: Path
) -> None:
    await broker.execute("DEL", keys.commits)
    assert await read(History(keys.run_id, run_dir, broker)) == []
    assert await read(History(keys.run_id, run_dir, broker), newest_first=True) == []


@pytest.mark.parametrize("first", [0, 3])
def test_every_range_of_steps_is_found_in_the_journal(tmp_path: Path, first: int) -> None:
    journal = CommitJournal(tmp_path)
    for step in range(first, STEPS):
        journal.append(commit_of(step))
    assert journal_steps(tmp_path) == journal.steps
    for low in range(STEPS + 2):
        assert newest_below(tmp_path, low) == (min(low, STEPS) - 1 if low > first else -1)
        for high in range(low, STEPS + 2):
            expected = list(range(max(low, first), min(high, STEPS - 1) + 1))
            assert [commit.step for commit in read_journal(tmp_path, low, high)] == expected


def test_a_line_that_is_being_written_is_not_there_yet(tmp_path: Path) -> None:
    journal = CommitJournal(tmp_path)
    for step in range(3):
        journal.append(commit_of(step))
    path = tmp_path / JOURNAL_FILE
    path.write_bytes(path.read_bytes()[:-5])
    assert [commit.step for commit in read_journal(tmp_path, 0, 9)] == [0, 1]
    assert journal_steps(tmp_path) == range(2)
    path.write_bytes(b"")
    assert read_journal(tmp_path, 0, 9) == [] and not journal_steps(tmp_path)

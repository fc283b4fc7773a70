"""A run's history where archive or journal have a part of it: one stream, whoever holds which entry."""

import dataclasses
import math

import pytest

from tests.support.archives import STREAM, archive, fill, raw, run_folder, scanned
from tests.support.letters import make_ticket
from tests.support.numbered import append_numbered
from tests.support.trajectories import make_commit
from tidemill.common.archive.manifest import Manifest
from tidemill.common.history import ALL, History, Selection, StreamName
from tidemill.common.history import history as history_module
from tidemill.common.run.journal import JOURNAL_FILE, journal_steps, newest_below, read_journal
from tidemill.common.streams import append, entry_id_of, id_after, trim_before
from tidemill.common.wire.messages import Commit, Score, ScoreStatus
from tidemill.services.console.look.joins import read_group
from tidemill.services.trainer.durable.commits import CommitJournal

SELECTIONS = {
    "all": ALL,
    "a ticket": Selection(tickets=(7, 7)),
    "tickets and an index": Selection(tickets=(3, None), index=1),
    "steps": Selection(steps=(1, 2)),
    "times": Selection(times=(1003.5, 1011.0)),
    "versions": Selection(versions=(0, 0)),
    "no version": Selection(versions=(1, None)),
    "no such worker": Selection(worker="nobody"),
    "a reward, which trajectories have not": Selection(rewards=(0, 1)),
    "an endless range": Selection(tickets=(-math.inf, math.inf)),
}


@pytest.mark.parametrize("archived_share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("is_trimmed", [False, True])
async def test_every_selection_finds_the_same_wherever_the_entries_are(
    broker, keys, tmp_path, archived_share, is_trimmed
):
    key = keys.trajectories()
    run_dir = run_folder(tmp_path, keys)
    await fill(broker, key, range(14))
    entries = await raw(broker, key)
    alone = History(keys.run_id, None, broker)
    selections = SELECTIONS | {
        "ids": Selection(first_id=entries[5][0], last_id=entries[30][0]),
        "one id": Selection(first_id=entries[8][0], last_id=entries[8][0]),
        "ids and an index": Selection(first_id=entries[5][0], index=0),
    }
    expected = {name: await scanned(alone, STREAM, chosen) for name, chosen in selections.items()}
    assert len(expected["all"]) == len(entries) and len(expected["ids"]) == 26
    if archived_share:
        until = entries[int(archived_share * (len(entries) - 1))][0]
        await archive(broker, keys, run_dir, until=until, segment_bytes=900)
        if is_trimmed:
            await trim_before(broker, key, id_after(until))
    history = History(keys.run_id, run_dir, broker)
    for name, chosen in selections.items():
        assert await scanned(history, STREAM, chosen) == expected[name], name
        assert await scanned(history, STREAM, chosen, newest_first=True) == expected[name][::-1], name
    if archived_share == 1.0:
        assert await scanned(History(keys.run_id, run_dir, None)) == expected["all"]


async def test_a_scan_misses_nothing_that_is_archived_and_trimmed_while_it_reads(broker, keys, tmp_path):
    key = keys.trajectories()
    run_dir = run_folder(tmp_path, keys)
    await fill(broker, key, range(300), garbled=False)
    entries = await raw(broker, key)
    for newest_first in (False, True):
        history = History(keys.run_id, run_dir, broker)
        seen = []
        async for record in history.scan(STREAM, newest_first=newest_first):
            seen.append(record.entry_id)
            if len(seen) == 100:  # within the first batch that was read of Redis
                last = entries[450 if newest_first else 550][0]
                await archive(broker, keys, run_dir, until=last, segment_bytes=20_000)
                await trim_before(broker, key, last)
        expected = [entry_id for entry_id, _ in entries]
        assert seen == (expected[::-1] if newest_first else expected)


async def test_a_read_of_redis_that_comes_after_a_trim_is_made_good_by_the_archive(broker, keys, tmp_path):
    """Between the look into the manifest and the read of Redis, entries move from one to the other."""
    key = keys.trajectories()
    run_dir = run_folder(tmp_path, keys)
    await fill(broker, key, range(20))
    entries = await raw(broker, key)

    class Overtaken(History):
        async def _read(self, stream, selection):
            await archive(broker, keys, run_dir, until=entries[30][0])
            await trim_before(broker, key, entries[30][0])
            return await super()._read(stream, selection)

    records = await scanned(Overtaken(keys.run_id, run_dir, broker))
    assert [record.entry_id for record in records] == [entry_id for entry_id, _ in entries]


async def test_scores_are_selected_by_the_steps_of_their_tickets(broker, keys, tmp_path):
    run_dir = run_folder(tmp_path, keys)
    tickets = [make_ticket(t, step=t // 2, group_size=1) for t in range(8)]
    await append_numbered(broker, keys.prompts(), enumerate(tickets))
    scores = (Score(ticket=t, index=0, status=ScoreStatus.OK, value=t) for t in range(8))
    await append(broker, keys.scores(), *scores)
    commits = [make_commit(s, groups=(2 * s, 2 * s + 1)) for s in range(4)]
    await append_numbered(broker, keys.commits, enumerate(commits))
    for stream in StreamName:
        await archive(broker, keys, run_dir, stream, segment_bytes=300)
        assert Manifest.load(run_dir / "archive" / stream.replace(":", "-")).entries in (0, 4, 8)
    for history in (History(keys.run_id, run_dir, None), History(keys.run_id, None, broker)):
        for selection in (Selection(steps=(1, 2)), Selection(rewards=(2, 5))):
            records = await scanned(history, StreamName.SCORES, selection)
            assert [record.message.ticket for record in records] == [2, 3, 4, 5]
        assert await history.ticket(5) == tickets[5]
        assert await history.commit(2) == commits[2] == await history.commit_of_ticket(4)
        assert await history.commit_of_ticket(9) is None and await history.commit(7) is None
        assert [s.reward for s in (await read_group(history, 6)).samples] == [6.0]


async def test_a_summary_says_what_is_where(redis_server, broker, keys, tmp_path):
    key = keys.trajectories()
    run_dir = run_folder(tmp_path, keys)
    await fill(broker, key, range(10), garbled=False)
    entries = await raw(broker, key)
    await archive(broker, keys, run_dir, until=entries[11][0])
    await trim_before(broker, key, entries[6][0])
    (summary,) = await History(keys.run_id, run_dir, broker).summary([STREAM])
    assert (summary.redis_entries, summary.archived_entries, summary.entries) == (14, 12, 20)
    assert (summary.first_id, summary.last_id) == (entries[0][0], entries[-1][0])
    assert (summary.first_time, summary.last_time) == (1000.0, 1009.0)
    assert summary.redis_bytes > 0 and summary.archived_bytes > 0 and summary.segments > 0
    async with History.open(run_dir, redis_server.url) as opened:
        assert await opened.summary([STREAM]) == [summary]
    (alone,) = await History(keys.run_id, run_dir, None).summary([STREAM])
    assert (alone.entries, alone.last_id, alone.last_time) == (12, entries[11][0], 1005.0)
    empty = await History(keys.run_id, None, None).summary()
    assert [dataclasses.astuple(summary)[1:7] for summary in empty] == [(0,) * 6] * len(StreamName)


STEPS = 9


def commit_of(step: int) -> Commit:
    """Lines of the journal have different lengths."""
    group = (tuple((step, index) for index in range(1 + step * step)),)
    return Commit(step=step, version=step + 1, mini_batches=(group,), groups=(step,), digest="0" * 32)


@pytest.fixture
async def run_dir(broker, keys, tmp_path):
    """All are in Redis; the journal has one more, which was never committed."""
    folder = run_folder(tmp_path, keys)
    folder.mkdir(exist_ok=True)
    journal = CommitJournal(folder)
    for step in range(STEPS + 1):
        journal.append(commit_of(step))
    await append_numbered(broker, keys.commits, [(step, commit_of(step)) for step in range(STEPS)])
    yield folder


OF_COMMITS = {
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


async def commits_in(
    history: History, selection: Selection = ALL, newest_first: bool = False
) -> list[Commit]:
    commits = history.messages(StreamName.COMMITS, Commit, selection, newest_first)
    return [commit async for commit in commits]


@pytest.mark.parametrize("num_trimmed", [1, 5, 8])
@pytest.mark.parametrize("num_archived", [0, 2])
async def test_every_selection_finds_the_same_before_and_after_the_trim(
    broker, keys, run_dir, monkeypatch, num_trimmed, num_archived
):
    monkeypatch.setattr(history_module, "JOURNAL_STEPS", 2)
    whole = {
        name: await commits_in(History(keys.run_id, None, broker), sel) for name, sel in OF_COMMITS.items()
    }
    assert [len(commits) for commits in whole.values()] == [9, 5, 4, 1, 1, 6, 4, 2, 0]
    await trim_before(broker, keys.commits, entry_id_of(num_trimmed))
    if num_archived:  # of those that are left: archiving was turned on later
        until = entry_id_of(min(num_trimmed + num_archived, STEPS) - 1)
        await archive(broker, keys, run_dir, StreamName.COMMITS, until=until)
    history = History(keys.run_id, run_dir, broker)
    for name, selection in OF_COMMITS.items():
        assert await commits_in(history, selection) == whole[name], name
        assert await commits_in(history, selection, newest_first=True) == whole[name][::-1], name
    assert await history.commit(0) == commit_of(0)
    assert await history.commit_of_ticket(0) == commit_of(0)
    assert await history.commit(STEPS) is None, "the journal alone has it: it was never committed"


async def test_what_is_trimmed_between_two_reads_is_not_passed_over(broker, keys, run_dir, monkeypatch):
    monkeypatch.setattr(history_module, "READ_COUNT", 2)
    for newest_first in (False, True):
        history = History(keys.run_id, run_dir, broker)
        seen = []
        async for commit in history.messages(StreamName.COMMITS, Commit, newest_first=newest_first):
            seen.append(commit.step)
            await trim_before(broker, keys.commits, entry_id_of(min(STEPS - 1, commit.step + 4)))
        assert sorted(seen) == list(range(STEPS))


async def test_who_does_not_see_the_folder_is_told_how_many_are_missing(broker, keys, run_dir, history_log):
    await trim_before(broker, keys.commits, entry_id_of(5))
    for folder in (None, run_dir.parent / "elsewhere"):
        history = History(keys.run_id, folder, broker)
        assert [commit.step for commit in await commits_in(history)] == list(range(5, STEPS))
        assert await commits_in(history, Selection(steps=(1, 2))) == []
    assert [record.args[0] for record in history_log if isinstance(record.args, tuple)] == [5, 5]
    history_log.clear()
    assert len(await commits_in(History(keys.run_id, run_dir, broker))) == STEPS
    assert not history_log


async def test_an_emptied_redis_has_no_commits_whatever_the_journal_says(broker, keys, run_dir):
    await broker.execute("DEL", keys.commits)
    assert await commits_in(History(keys.run_id, run_dir, broker)) == []
    assert await commits_in(History(keys.run_id, run_dir, broker), newest_first=True) == []


@pytest.mark.parametrize("first", [0, 3])
def test_every_range_of_steps_is_found_in_the_journal(tmp_path, first):
    journal = CommitJournal(tmp_path)
    for step in range(first, STEPS):
        journal.append(commit_of(step))
    assert journal_steps(tmp_path) == journal.steps
    for low in range(STEPS + 2):
        assert newest_below(tmp_path, low) == (min(low, STEPS) - 1 if low > first else -1)
        for high in range(low, STEPS + 2):
            expected = list(range(max(low, first), min(high, STEPS - 1) + 1))
            assert [commit.step for commit in read_journal(tmp_path, low, high)] == expected


def test_a_line_that_is_being_written_is_not_there_yet(tmp_path):
    journal = CommitJournal(tmp_path)
    for step in range(3):
        journal.append(commit_of(step))
    path = tmp_path / JOURNAL_FILE
    path.write_bytes(path.read_bytes()[:-5])
    assert [commit.step for commit in read_journal(tmp_path, 0, 9)] == [0, 1]
    assert journal_steps(tmp_path) == range(2)
    path.write_bytes(b"")
    assert read_journal(tmp_path, 0, 9) == [] and not journal_steps(tmp_path)

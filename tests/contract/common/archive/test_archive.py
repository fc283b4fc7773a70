"""The archive of a stream: each entry once, in order, wherever its writer was killed; and damage."""

import asyncio
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.conftest import SERVERS
from tests.support.archives import STREAM, archive, fill, ids_listed, raw, run_folder, scanned
from tests.support.letters import make_ticket
from tests.support.numbered import append_numbered
from tests.support.preloaded import REPO
from tests.support.trajectories import make_commit, make_trajectory
from tidemill.common.archive import manifest, stream_folder
from tidemill.common.archive.archiver import check, cut_back, retain, sweep, writing
from tidemill.common.archive.manifest import NEEDED_FILE, TRIMMED_FILE, Manifest, note_needed, note_trim
from tidemill.common.archive.reader import select
from tidemill.common.archive.rows import records_of
from tidemill.common.config import ArchiveConfig
from tidemill.common.errors import ArchiveError
from tidemill.common.files import LockedError
from tidemill.common.history import History, Selection, StreamName
from tidemill.common.redis.broker import Broker
from tidemill.common.streams import Entry, Garbled, append, decoded, id_after, trim_before
from tidemill.services.console.look.joins import read_trajectories

DEATHS = {
    "in the middle of a file": "widen",
    "before the file has its name": "publish_file",
    "after the file has its name": "ArchiveSegment",
}


MORTAL = """
import os, runpy, signal, sys
from tidemill.common.archive import archiver
name, countdown = sys.argv.pop(1), 2
whole = getattr(archiver, name)

def mortal(*args, **options):
    global countdown
    countdown -= 1
    if countdown == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return whole(*args, **options)

setattr(archiver, name, mortal)
runpy.run_module("tests.support.archives", run_name="__main__")
"""


async def contents(run_dir: Path) -> list[Entry | Garbled]:
    """What the files hold, in order."""
    manifest = Manifest.load(stream_folder(run_dir, STREAM))
    entries: list[Entry | Garbled] = []
    for segment in manifest.segments:
        held = list(records_of(pq.read_table(segment.path), STREAM.message_type))
        ends = (held[0].entry_id, held[-1].entry_id, len(held))
        assert ends == (segment.first_id, segment.last_id, segment.entries)
        entries += held
    return entries


async def expected(broker: Broker, key: str) -> list[Entry | Garbled]:
    return [
        decoded(entry_id.encode(), fields, STREAM.message_type) for entry_id, fields in await raw(broker, key)
    ]


async def test_entries_are_archived_once_and_in_order(broker, keys, tmp_path):
    key = keys.trajectories()
    run_dir = run_folder(tmp_path, keys)
    await fill(broker, key, range(30))
    assert await archive(broker, keys, run_dir) == 90
    assert await contents(run_dir) == await expected(broker, key)
    assert len(Manifest.load(stream_folder(run_dir, STREAM)).segments) > 3
    assert await archive(broker, keys, run_dir) == 0
    await fill(broker, key, range(30, 32))
    assert await archive(broker, keys, run_dir) == 6
    assert await contents(run_dir) == await expected(broker, key)


async def test_what_fills_no_segment_waits_and_nothing_beyond_the_end_is_taken(broker, keys, tmp_path):
    key = keys.trajectories()
    run_dir = run_folder(tmp_path, keys)
    await fill(broker, key, range(10))
    entries = await raw(broker, key)
    assert await archive(broker, keys, run_dir, segment_bytes=1 << 20, is_last=False) == 0
    assert not list(stream_folder(run_dir, STREAM).glob("*"))
    assert await archive(broker, keys, run_dir, segment_bytes=1 << 20, until=entries[9][0]) == 10
    assert await contents(run_dir) == (await expected(broker, key))[:10]


@pytest.mark.parametrize("point", DEATHS.values(), ids=DEATHS.keys())
@pytest.mark.parametrize("redis_server", sorted(SERVERS)[:1], indirect=True)
async def test_a_killed_archiver_leaves_nothing_missing_and_nothing_twice(
    redis_server, broker, keys, tmp_path, point
):
    key = keys.trajectories()
    run_dir = run_folder(tmp_path, keys)
    await fill(broker, key, range(30))
    before = await expected(broker, key)
    command = [sys.executable, "-c", MORTAL, point, redis_server.url, keys.run_id, str(run_dir)]
    archiver = await asyncio.to_thread(subprocess.run, command, cwd=REPO, timeout=120)
    assert archiver.returncode < 0, "it was to be killed"
    listed = await contents(run_dir)  # what is listed is whole already
    assert listed == before[: len(listed)]
    # The run goes on, and trims what is archived.
    if listed:
        await trim_before(broker, key, listed[-1].entry_id)
    await archive(broker, keys, run_dir, segment_bytes=3000)  # files of other names than those it had begun
    assert await contents(run_dir) == before
    names = {path.name for path in stream_folder(run_dir, STREAM).iterdir()}
    manifest = Manifest.load(stream_folder(run_dir, STREAM))
    assert names == {segment.path.name for segment in manifest.segments}


async def test_one_process_writes_at_a_time(broker, keys, tmp_path):
    run_dir = run_folder(tmp_path, keys)
    await fill(broker, keys.trajectories(), range(3))
    with writing(run_dir), pytest.raises(LockedError, match="is being written"):
        await archive(broker, keys, run_dir)


async def test_a_lookup_opens_only_the_files_that_can_hold_it(broker, keys, tmp_path, monkeypatch):
    key = keys.trajectories()
    run_dir = run_folder(tmp_path, keys)
    await fill(broker, key, range(40), garbled=False)
    await archive(broker, keys, run_dir)
    manifest = Manifest.load(stream_folder(run_dir, STREAM))
    for segment in manifest.segments:  # any other file is not even looked at
        least, greatest = (segment.details.bounds or {})["ticket"]
        if not least <= 25 <= greatest:
            segment.path.write_bytes(b"")
    records = await read_trajectories(History(keys.run_id, run_dir, None), 25)
    assert [t.key for t in records] == [(25, 0), (25, 1)]
    with pytest.raises(ArchiveError, match="cannot be read"):
        await scanned(History(keys.run_id, run_dir, None))


class TestRetention:
    """What is beyond the run's limits goes, the oldest first, and is never archived again."""

    @pytest.fixture
    async def run_dir(self, broker, keys, tmp_path):
        run_dir = run_folder(tmp_path, keys)
        await fill(broker, keys.trajectories(), range(30))
        await archive(broker, keys, run_dir)
        return run_dir

    async def test_by_size(self, broker, keys, run_dir):
        before = Manifest.load(stream_folder(run_dir, STREAM))
        limit = sum(segment.num_bytes for segment in before.segments[2:])
        gone = before.segments[:2]
        with writing(run_dir):
            small = ArchiveConfig().model_copy(update={"keep_gb": limit / 2**30})  # below what a user may say
            assert retain(run_dir, small) == 2
        after = Manifest.load(stream_folder(run_dir, STREAM))
        assert after.segments == before.segments[2:] and after.last_id == before.last_id
        assert after.removed.entries == sum(segment.entries for segment in gone)
        assert len(list(after.folder.glob("*.parquet"))) == len(after.segments)
        assert await archive(broker, keys, run_dir) == 0, "what Redis still has is not archived again"
        history = History(keys.run_id, run_dir, None)
        assert (await scanned(history))[0].entry_id == after.segments[0].first_id
        (summary,) = await history.summary([STREAM])
        assert summary.removed_entries == after.removed.entries

    async def test_by_age(self, broker, keys, run_dir):
        folder = stream_folder(run_dir, STREAM)
        with writing(run_dir):
            assert retain(run_dir, ArchiveConfig(keep_days=1e5)) == 0
            # Completions of these trajectories were finished in 1970.
            assert retain(run_dir, ArchiveConfig(keep_days=1.0)) > 0
        assert not Manifest.load(folder).segments
        await fill(broker, keys.trajectories(), range(30, 32))
        assert await archive(broker, keys, run_dir) == 6
        assert Manifest.load(folder).segments[0].details.bounds["ticket"] == [30, 31]

    async def test_commits_and_weights_stay(self, broker, keys, tmp_path):
        run_dir = run_folder(tmp_path, keys)
        commit = make_commit(0, finished_at=1.0)
        await append_numbered(broker, keys.commits, [(0, commit)])
        await archive(broker, keys, run_dir, StreamName.COMMITS)
        with writing(run_dir):
            assert retain(run_dir, ArchiveConfig(keep_days=1.0, keep_gb=0.001)) == 0


async def test_a_check_finds_what_is_missing_or_damaged(broker, keys, tmp_path):
    run_dir = run_folder(tmp_path, keys)
    await fill(broker, keys.trajectories(), range(30))
    await archive(broker, keys, run_dir)
    assert check(run_dir) == []
    segments = Manifest.load(stream_folder(run_dir, STREAM)).segments
    missing = segments[0].path
    damaged = segments[2].path
    missing.unlink()
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"!")
    reasons = {damage.path: damage.reason for damage in check(run_dir)}
    assert reasons.keys() == {missing.parent, damaged}
    assert "are missing before" in reasons[missing.parent] and "bytes" in reasons[damaged]


Records = list[Entry | Garbled]


@pytest.fixture
async def run_dir(broker, keys, tmp_path):
    """An archive of several files, whose entries have left Redis."""
    run_dir = run_folder(tmp_path, keys)
    await fill(broker, keys.trajectories(), range(30))
    await archive(broker, keys, run_dir)
    folder = stream_folder(run_dir, STREAM)
    end = id_after(Manifest.load(folder).last_id)
    note_trim(folder, end)
    await trim_before(broker, keys.trajectories(), end)
    assert len(Manifest.load(folder).segments) > 4
    return run_dir


@pytest.fixture
async def before(keys, run_dir):
    return await scanned(History(keys.run_id, run_dir, None))


def reasons(run_dir: Path) -> str:
    return "; ".join(damage.reason for damage in check(run_dir))


async def test_an_archive_that_was_cut_while_its_writer_died_is_whole_again_at_the_next(
    keys, run_dir, before, monkeypatch
):
    """Between a file and the shorter one that takes its place: both are there."""
    folder = stream_folder(run_dir, STREAM)
    segments = Manifest.load(folder).segments
    last_id = before[len(before) - segments[-1].entries - 2].entry_id  # within the last file but one
    kept = segments[-2].path
    with monkeypatch.context() as dying:
        dying.setattr(
            Path, "unlink", lambda path, **_: None if path == segments[-2].path else os.unlink(path)
        )
        assert cut_back(folder, STREAM.message_type, last_id) == segments[-1].entries + 1
    assert kept.exists()
    after = Manifest.load(folder)
    assert (after.last_id, len(after.segments)) == (last_id, len(segments) - 1)
    assert await scanned(History(keys.run_id, run_dir, None)) == before[: -segments[-1].entries - 1]
    assert sweep(folder) == after and not kept.exists()


async def test_a_cut_that_died_after_any_file_leaves_no_gap(run_dir, before, monkeypatch):
    folder = stream_folder(run_dir, STREAM)
    last_id = before[1].entry_id
    note_trim(folder, before[-1].entry_id)

    class Died(Exception):
        pass

    def die(path: Path, **_: object) -> None:
        os.unlink(path)
        raise Died

    num_segments = len(Manifest.load(folder).segments)
    assert num_segments > 2
    for _ in range(num_segments - 1):
        with monkeypatch.context() as dying, pytest.raises(Died):
            dying.setattr(Path, "unlink", die)
            cut_back(folder, STREAM.message_type, last_id)
        assert check(run_dir) == []
    cut_back(folder, STREAM.message_type, last_id)
    assert Manifest.load(folder).last_id == last_id
    assert check(run_dir) == []


async def test_entries_that_nobody_archived_before_they_were_trimmed_are_found(
    broker, keys, run_dir, history_log
):
    """Here a file is gone."""
    folder = stream_folder(run_dir, STREAM)
    Manifest.load(folder).segments[-1].path.unlink()
    assert "were trimmed from Redis and are not here" in reasons(run_dir)
    await fill(broker, keys.trajectories(), range(30, 34))
    await archive(broker, keys, run_dir)
    assert "are missing before" in reasons(run_dir)
    await scanned(History(keys.run_id, run_dir, None))
    assert any("has a gap: entries after" in record.getMessage() for record in history_log)
    assert ids_listed(Manifest.load(folder)), "and what came after it is archived"


async def test_a_file_that_is_cut_while_it_is_read_is_an_error_and_ends_no_process(
    broker, keys, tmp_path, monkeypatch
):
    monkeypatch.setattr("tidemill.common.archive.archiver.ROW_GROUP_ROWS", 2)
    run_dir = run_folder(tmp_path, keys)
    # Larger than a page of memory, compressed.
    trajectories = [make_trajectory(ticket, text=os.urandom(2000).hex()) for ticket in range(20)]
    await append(broker, keys.trajectories(), *trajectories)
    await archive(broker, keys, run_dir, segment_bytes=1 << 20)
    manifest = Manifest.load(stream_folder(run_dir, STREAM))
    records = select(manifest, STREAM, Selection())
    assert next(records)
    os.truncate(manifest.segments[0].path, 1000)
    with pytest.raises(ArchiveError, match="cannot be read"):
        list(records)


async def test_files_that_retention_removes_during_a_read_are_left_out_and_others_are_missed(run_dir, before):
    manifest = Manifest.load(stream_folder(run_dir, STREAM))
    counts = [segment.entries for segment in manifest.segments]
    batches = select(manifest, STREAM, Selection())
    records = next(batches)
    manifest.remove_first(3)
    for batch in batches:
        records += batch
    assert records == before[: counts[0]] + before[sum(counts[:3]) :]

    batches = select(Manifest.load(manifest.folder), STREAM, Selection())
    assert next(batches)
    manifest.segments[4].path.unlink()
    with pytest.raises(ArchiveError, match="cannot be read"):
        list(batches)


async def test_a_footer_that_could_not_be_read_for_a_moment_is_read_again(run_dir):
    segment = Manifest.load(stream_folder(run_dir, STREAM)).segments[0]
    aside = segment.path.with_name("away")
    segment.path.rename(aside)
    assert segment.details.bounds is None
    aside.rename(segment.path)
    assert segment.details.bounds["ticket"][0] == 0


async def test_a_lookup_misses_no_file_whose_footer_is_damaged(keys, run_dir):
    """It may hold what is looked for: without its bounds that is not known."""
    segment = Manifest.load(stream_folder(run_dir, STREAM)).segments[1]
    segment.path.write_bytes(segment.path.read_bytes()[:-1] + b"?")
    with pytest.raises(ArchiveError, match="cannot be read") as caught:
        await read_trajectories(History(keys.run_id, run_dir, None), 25)
    assert str(segment.path) in str(caught.value)


async def test_a_file_that_cannot_be_read_is_a_damage_and_hides_no_other(keys, run_dir, monkeypatch):
    folder = stream_folder(run_dir, STREAM)
    segments = Manifest.load(folder).segments
    path = segments[0].path
    second = segments[1].path
    path.unlink()
    path.mkdir()
    second.write_bytes(second.read_bytes()[:-1] + b"?")
    (folder / TRIMMED_FILE).write_bytes(b"\xff")
    assert [damage.path for damage in check(run_dir)] == [path, second, folder]
    (folder / TRIMMED_FILE).unlink()

    def records_of(*_):
        b"\xff".decode()  # as of an id whose bytes were damaged

    monkeypatch.setattr("tidemill.common.archive.reader.records_of", records_of)
    last = Manifest.load(folder).segments[-1]
    with pytest.raises(ArchiveError, match=r"cannot be read.*--check"):
        await scanned(History(keys.run_id, run_dir, None), selection=Selection(last.first_id))


async def test_a_gap_between_numbered_entries_is_found_without_a_chain(broker, keys, tmp_path):
    run_dir = run_folder(tmp_path, keys)
    tickets = [(number, make_ticket(number)) for number in range(12) if number != 5]
    await append_numbered(broker, keys.prompts(), tickets)
    await archive(broker, keys, run_dir, StreamName.PROMPTS, segment_bytes=1 << 20)
    assert reasons(run_dir) == "1 of the entries from 1-0 to 12-0 are missing"


async def test_numbered_entries_are_trimmed_up_to_the_last_one_that_was_archived(broker, keys, tmp_path):
    """There is none between it and the next number."""
    run_dir = run_folder(tmp_path, keys)
    await append_numbered(broker, keys.prompts(), [(number, make_ticket(number)) for number in range(12)])
    await archive(broker, keys, run_dir, StreamName.PROMPTS, until="6-0")
    note_trim(stream_folder(run_dir, StreamName.PROMPTS), "7-0")
    assert check(run_dir) == []
    await archive(broker, keys, run_dir, StreamName.PROMPTS)
    assert check(run_dir) == []


async def test_retention_of_files_with_a_clock_that_was_set_back_removes_the_first_ones_only(
    keys, run_dir, monkeypatch
):
    """Or the archive would have a gap."""
    folder = stream_folder(run_dir, STREAM)
    times = [4e9] * 30
    details = {path: manifest._details(path) for path in folder.glob("*.parquet")}

    def of_then(path):
        time = times[sorted(details).index(path)]
        return replace(details[path], bounds={"time": [time, time]})

    monkeypatch.setattr(manifest, "_details", of_then)
    with writing(run_dir):
        times[2] = 1.0
        assert retain(run_dir, ArchiveConfig(keep_days=1.0)) == 0
        times[0] = 1.0
        assert retain(run_dir, ArchiveConfig(keep_days=1.0)) == 1
    listed = Manifest.load(folder).segments
    assert {segment.path for segment in listed} == set(folder.glob("*.parquet")) == {*sorted(details)[1:]}


def test_a_note_that_a_trainer_is_writing_is_not_what_a_killed_archiver_left(tmp_path, monkeypatch):
    rename = os.replace

    def rename_later(aside, target):
        sweep(tmp_path)
        rename(aside, target)

    monkeypatch.setattr(os, "replace", rename_later)
    note_needed(tmp_path, "7-0")
    assert (tmp_path / NEEDED_FILE).read_text() == "7-0\n"

"""The disk damages an archive whose entries Redis has no more: nothing goes, and what is missing is said."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.archives import STREAM, archive, fill, ids_listed, run_folder, scanned
from tests.support.letters import make_ticket
from tests.support.numbered import append_numbered
from tests.support.trajectories import make_trajectory
from tidemill.common.archive import manifest, stream_folder
from tidemill.common.archive.archiver import check, cut_back, retain, sweep, writing
from tidemill.common.archive.manifest import NEEDED_FILE, TRIMMED_FILE, Manifest, note_needed, note_trim
from tidemill.common.archive.reader import select
from tidemill.common.config import ArchiveConfig
from tidemill.common.errors import ArchiveError
from tidemill.common.history import History, Selection, StreamName
from tidemill.common.streams import Entry, Garbled, append, id_after, trim_before

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


async def test_entries_that_nobody_archived_before_they_were_trimmed_are_found(broker, keys, run_dir, caplog):
    """Here a file is gone."""
    folder = stream_folder(run_dir, STREAM)
    Manifest.load(folder).segments[-1].path.unlink()
    assert "were trimmed from Redis and are not here" in reasons(run_dir)
    await fill(broker, keys.trajectories(), range(30, 34))
    await archive(broker, keys, run_dir)
    assert "are missing before" in reasons(run_dir)
    await scanned(History(keys.run_id, run_dir, None))
    assert "has a gap: entries after" in caplog.text
    assert ids_listed(Manifest.load(folder)), "and what came after it is archived"


async def test_a_file_that_is_cut_while_it_is_read_is_an_error_and_ends_no_process(
    broker, keys, tmp_path, monkeypatch
):
    monkeypatch.setattr("tidemill.common.archive.archiver.ROW_GROUP_ROWS", 2)
    run_dir = run_folder(tmp_path, keys)
    # Larger than a page of memory, compressed.
    made = [make_trajectory(ticket, text=os.urandom(2000).hex()) for ticket in range(20)]
    await append(broker, keys.trajectories(), *made)
    await archive(broker, keys, run_dir, segment_bytes=1 << 20)
    found = Manifest.load(stream_folder(run_dir, STREAM))
    records = select(found, STREAM, Selection())
    assert next(records)
    os.truncate(found.segments[0].path, 1000)
    with pytest.raises(ArchiveError, match="cannot be read"):
        list(records)


async def test_a_file_that_cannot_be_read_is_a_damage_and_hides_no_other(keys, run_dir, monkeypatch):
    folder = stream_folder(run_dir, STREAM)
    path, other = (segment.path for segment in Manifest.load(folder).segments[:2])
    path.unlink()
    path.mkdir()
    other.write_bytes(other.read_bytes()[:-1] + b"?")
    (folder / TRIMMED_FILE).write_bytes(b"\xff")
    assert [damage.path for damage in check(run_dir)] == [path, other, folder]
    (folder / TRIMMED_FILE).unlink()

    def records_of(*_: object) -> None:
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
    folder, times = stream_folder(run_dir, STREAM), [4e9] * 30
    details = {path: manifest._details(path) for path in folder.glob("*.parquet")}

    def of_then(path: Path) -> manifest.Details:
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


def test_a_note_that_a_trainer_is_writing_is_not_what_a_killed_archiver_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = os.replace

    def rename_later(aside: Path, target: Path) -> None:
        sweep(tmp_path)
        rename(aside, target)

    monkeypatch.setattr(os, "replace", rename_later)
    note_needed(tmp_path, "7-0")
    assert (tmp_path / NEEDED_FILE).read_text() == "7-0\n"

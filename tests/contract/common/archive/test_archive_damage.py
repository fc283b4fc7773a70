"""The disk damages an archive whose entries Redis has no more: nothing goes, and what is missing is said."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.support.archives import STREAM, archive, fill, ids_listed, run_folder, scanned
from tests.support.letters import make_ticket
from tidemill.common.archive import stream_folder
from tidemill.common.archive.archiver import check, retain
from tidemill.common.archive.manifest import MANIFEST_FILE, Manifest, note_trim
from tidemill.common.archive.writer import KEPT_SUFFIX, writing
from tidemill.common.config import ArchiveConfig
from tidemill.common.errors import ArchiveError
from tidemill.common.history import History, StreamName
from tidemill.common.redis.broker import Broker
from tidemill.common.streams import Entry, Garbled, append_numbered, id_after, trim_before
from tidemill.common.wire.keys import Keys

Records = list[Entry | Garbled]


@pytest.fixture
async def run_dir(broker: Broker, keys: Keys, tmp_path: Path) -> Path:
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
async def before(keys: Keys, run_dir: Path) -> Records:
    return await scanned(History(keys.run_id, run_dir, None))


def lines_of(run_dir: Path) -> list[bytes]:
    return (stream_folder(run_dir, STREAM) / MANIFEST_FILE).read_bytes().splitlines(keepends=True)


def write_lines(run_dir: Path, lines: list[bytes]) -> None:
    (stream_folder(run_dir, STREAM) / MANIFEST_FILE).write_bytes(b"".join(lines))


def reasons(run_dir: Path) -> str:
    return "; ".join(damage.reason for damage in check(run_dir))


@pytest.mark.parametrize("cut", [1, 30, 0], ids=["its newline", "half of it", "all of it"])
async def test_a_manifest_whose_last_line_is_cut_loses_no_entry(
    broker: Broker, keys: Keys, run_dir: Path, before: Records, cut: int
) -> None:
    *lines, last = lines_of(run_dir)
    write_lines(run_dir, [*lines, last[:-cut] if cut else b""])
    assert "no manifest lists it" in reasons(run_dir)
    assert "were trimmed from Redis" in reasons(run_dir)
    await fill(broker, keys.trajectories(), range(30, 34))
    await archive(broker, keys, run_dir)
    after = await scanned(History(keys.run_id, run_dir, None))
    assert after[: len(before)] == before
    assert len(after) == len(before) + 12
    assert check(run_dir) == []


@pytest.mark.parametrize("damage", ["a line is none", "a line is missing", "it is gone"])
async def test_a_damaged_manifest_is_restored_from_the_files(
    broker: Broker, keys: Keys, run_dir: Path, before: Records, damage: str
) -> None:
    listed = ids_listed(Manifest.load(stream_folder(run_dir, STREAM)))
    lines = lines_of(run_dir)
    changed = {
        "a line is none": [*lines[:1], b"\x00\xff{\n", *lines[2:]],
        "a line is missing": [*lines[:2], *lines[3:]],
        "it is gone": [],
    }
    write_lines(run_dir, changed[damage])
    if damage == "it is gone":
        (stream_folder(run_dir, STREAM) / MANIFEST_FILE).unlink()
    assert check(run_dir)
    await archive(broker, keys, run_dir)
    assert ids_listed(Manifest.load(stream_folder(run_dir, STREAM))) == listed
    assert await scanned(History(keys.run_id, run_dir, None)) == before
    assert check(run_dir) == []


async def test_a_file_that_is_damaged_as_well_is_kept_and_its_gap_is_found(
    broker: Broker, keys: Keys, run_dir: Path
) -> None:
    *lines, last = lines_of(run_dir)
    write_lines(run_dir, lines)
    path = stream_folder(run_dir, STREAM) / json.loads(last)["file"]
    content = bytearray(path.read_bytes())
    first = pq.ParquetFile(path).metadata.row_group(0).column(0)
    # The last byte of its data: headers of pages hold numbers that nobody reads or checks.
    content[(first.dictionary_page_offset or first.data_page_offset) + first.total_compressed_size - 1] ^= (
        0xFF
    )
    path.write_bytes(content)
    await fill(broker, keys.trajectories(), range(30, 34))
    await archive(broker, keys, run_dir)
    aside = path.with_name(path.name + KEPT_SUFFIX)
    assert aside.read_bytes() == bytes(content)
    found = check(run_dir)
    assert [damage.path for damage in found] == [aside, path.parent]
    assert "are missing before" in found[1].reason, "also when later files follow"


async def test_entries_that_nobody_archived_before_they_were_trimmed_are_found(
    broker: Broker, keys: Keys, run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever trimmed them: here a manifest that was restored from an old backup, without its files."""
    folder = stream_folder(run_dir, STREAM)
    *lines, last = lines_of(run_dir)
    write_lines(run_dir, lines)
    (folder / json.loads(last)["file"]).unlink()
    assert "were trimmed from Redis and are not here" in reasons(run_dir)
    await fill(broker, keys.trajectories(), range(30, 34))
    await archive(broker, keys, run_dir)
    assert "are missing before" in reasons(run_dir)
    await scanned(History(keys.run_id, run_dir, None))
    assert "has a gap: entries after" in caplog.text
    assert ids_listed(Manifest.load(folder)), "and what came after it is archived"


async def test_a_gap_between_numbered_entries_is_found_without_a_chain(
    broker: Broker, keys: Keys, tmp_path: Path
) -> None:
    """Archives of releases before know no previous entry."""
    run_dir = run_folder(tmp_path, keys)
    tickets = [(number, make_ticket(number)) for number in range(12) if number != 5]
    await append_numbered(broker, keys.prompts(), tickets)
    await archive(broker, keys, run_dir, StreamName.PROMPTS, segment_bytes=1 << 20)
    assert reasons(run_dir) == "1 of the entries from 1-0 to 12-0 are missing"


async def test_retention_of_files_with_a_clock_that_was_set_back_removes_the_first_ones_only(
    keys: Keys, run_dir: Path
) -> None:
    """Or the list would lose others than those whose files go."""
    folder = stream_folder(run_dir, STREAM)
    lines = [json.loads(line) for line in lines_of(run_dir)]
    for line in lines:
        line["bounds"]["time"] = [4e9, 4e9]
    lines[2]["bounds"]["time"] = [1.0, 1.0]
    write_lines(run_dir, [json.dumps(line).encode() + b"\n" for line in lines])
    with writing(run_dir):
        assert retain(run_dir, ArchiveConfig(keep_days=1.0)) == 0
    lines[0]["bounds"]["time"] = [1.0, 1.0]
    write_lines(run_dir, [json.dumps(line).encode() + b"\n" for line in lines])
    with writing(run_dir):
        assert retain(run_dir, ArchiveConfig(keep_days=1.0)) == 1
    manifest = Manifest.load(folder)
    assert {segment.file for segment in manifest.segments} == {path.name for path in folder.glob("*.parquet")}


async def test_a_reader_says_what_to_do_about_a_manifest_that_it_cannot_read(
    keys: Keys, run_dir: Path
) -> None:
    write_lines(run_dir, [b"?\n", *lines_of(run_dir)])
    with pytest.raises(ArchiveError, match="tidemill archive` restores it"):
        await scanned(History(keys.run_id, run_dir, None))

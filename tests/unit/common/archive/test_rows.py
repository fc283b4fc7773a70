"""Messages as rows of a file: what is read back is what was written, byte for byte; sessions too."""

import math
from pathlib import Path
from typing import Any

import msgpack
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.histories import trajectories
from tests.support.message_strategies import messages, plain
from tests.support.recorded_sessions import as_session
from tests.support.trajectories import make_trajectory
from tidemill.common.archive import stream_folder
from tidemill.common.archive.archiver import SegmentFile
from tidemill.common.archive.manifest import OLD_MANIFEST, Manifest
from tidemill.common.archive.reader import select
from tidemill.common.archive.rows import INDEX, INT64_MAX, raw_entries_of, records_of, table_of, widen
from tidemill.common.errors import ArchiveError
from tidemill.common.files import aside_file
from tidemill.common.streams import decoded
from tidemill.common.streams.entries import START, Entry
from tidemill.common.streams.selection import ALL, Selection, StreamName
from tidemill.common.wire import codec
from tidemill.common.wire.messages import Commit, Message, Score, Trajectory


def through_parquet(table: pa.Table) -> pa.Table:
    file = pa.BufferOutputStream()
    pq.write_table(table, file, compression="zstd")
    return pq.read_table(pa.BufferReader(file.getvalue()))


def written(message: Message, **fields: Any) -> bytes:
    """The payload with some fields set as they never come from this release."""
    return bytes(msgpack.packb(msgpack.unpackb(codec.encode_payload(message)) | fields))


def index_of(message: Message) -> dict[str, Any]:
    """The index columns that a message has a value for."""
    (row,) = table_of([("5-2", codec.encode(message))], type(message)).to_pylist()
    return {name: row[name] for name in INDEX if row[name] is not None}


@given(messages)
@settings(max_examples=60, deadline=None)
def test_every_message_survives_the_archive(message):
    raw = [(f"{2**63}-1", codec.encode(message))]
    table = through_parquet(table_of(raw, type(message)))
    assert list(raw_entries_of(table)) == raw
    (record,) = records_of(table, type(message))
    assert record == decoded(b"9223372036854775808-1", raw[0][1], type(message))


ODD = {
    "an unknown newer field": {b"v": b"1.7", b"p": written(make_trajectory(), colour="blue")},
    "bytes where JSON has none": codec.encode(make_trajectory(extra={"raw": b"\xff"})),
    "a number that is not one": codec.encode(make_trajectory(ground_truth=math.nan)),
    "logprobs that are none": codec.encode(make_trajectory(logprobs=[-0.0, math.nan, -math.inf])),
    "a ticket beyond 64 bits": codec.encode(make_trajectory(ticket=2**63 + 5)),
    "a version beyond 64 bits": codec.encode(make_trajectory(spans=((2**63 + 5, 0),))),
    "a float sent as an integer": {b"v": b"1.0", b"p": written(make_trajectory(), finished_at=3)},
    "a default that was sent": {b"v": b"1.0", b"p": written(make_trajectory(), worker="")},
    "a field beside the payload": {**codec.encode(make_trajectory()), b"x": b"y"},
    "a session": codec.encode(as_session(make_trajectory())),
    "a newer major schema": {**codec.encode(make_trajectory()), b"v": b"2.0"},
    "no message at all": {b"v": b"1.0", b"p": b"\xc1"},
    "no payload": {b"whatever": b"\x00\xff"},
}


@pytest.mark.parametrize("fields", ODD.values(), ids=ODD.keys())
def test_whatever_an_entry_holds_keeps_its_bytes(fields):
    plain_entry = codec.encode(make_trajectory(7))
    raw = [("5-0", plain_entry), ("6-0", fields), ("7-1", plain_entry)]
    table = through_parquet(table_of(raw, Trajectory))
    assert list(raw_entries_of(table)) == raw
    assert [entry_id for entry_id, _ in raw_entries_of(table, [2, 0])] == ["7-1", "5-0"]
    assert [record.entry_id for record in records_of(table, Trajectory)] == ["5-0", "6-0", "7-1"]


@given(tree=st.dictionaries(st.sampled_from([*sorted(Score.model_fields), "new"]), plain))
@settings(max_examples=40, deadline=None)
def test_no_payload_whatever_stops_the_archive(tree):
    fields = {b"v": b"1.0", b"p": msgpack.packb(tree)}
    table = through_parquet(table_of([("1-0", fields)], Score))
    assert list(raw_entries_of(table)) == [("1-0", fields)]


def test_rows_are_found_by_what_their_messages_have():
    sample = make_trajectory(3, 1, worker="w", finished_at=7.0)
    of_sample = {"ticket": 3, "last_ticket": 3, "index": 1, "step": 0, "time": 7.0, "worker": "w"}
    assert index_of(sample) == of_sample | {"version": 0, "last_version": 0}
    # Version 3 made the fork.
    assert index_of(as_session(sample)) == of_sample | {"version": 0, "last_version": 3}
    assert index_of(make_trajectory(ticket=2**63 + 5))["ticket"] == INT64_MAX
    commit = Commit(step=2, version=3, mini_batches=(), groups=(5, 4), dropped=((9, -1, "equal"),))
    of_commit = {"ticket": 4, "last_ticket": 9, "step": 2, "version": 3, "last_version": 3}
    assert index_of(commit) == of_commit
    bounds: dict[str, tuple[float, float]] = {"ticket": (6, 7)}
    widen(bounds, table_of([("1-0", codec.encode(commit)), ("2-0", {b"odd": b""})], Commit))
    assert bounds == {"ticket": (4, 9), "step": (2, 2), "version": (3, 3)}


@pytest.mark.parametrize("name", [OLD_MANIFEST, "00000000000000000001-0_00000000000000000002-0.parquet"])
def test_an_archive_of_another_release_is_refused_and_left_as_it_is(tmp_path, name):
    (tmp_path / name).write_bytes(b"{}")
    with pytest.raises(ArchiveError, match="release"):
        Manifest.load(tmp_path)
    assert (tmp_path / name).read_bytes() == b"{}"


STREAM = StreamName.TRAJECTORIES


def found(folder: Path, selection: Selection = ALL) -> list[Message]:
    parts = select(Manifest.load(folder), STREAM, selection)
    return [record.message for records in parts for record in records if isinstance(record, Entry)]


@pytest.fixture
def mixed(tmp_path):
    """An archive in which ticket 3 was played as sessions."""
    folder = stream_folder(tmp_path, STREAM)
    segment = SegmentFile(STREAM.message_type, START)
    with aside_file(folder / "segment") as aside:
        for number, trajectory in enumerate(trajectories(), 1):
            segment.add(
                (
                    f"{number}-0",
                    codec.encode(as_session(trajectory) if trajectory.ticket == 3 else trajectory),
                ),
                aside,
            )
        segment.publish(aside, folder)
    return folder


def test_sessions_beside_single_turns_come_back_entry_by_entry(mixed):
    back = found(mixed)
    assert back == [
        as_session(trajectory) if trajectory.ticket == 3 else trajectory for trajectory in trajectories()
    ]
    assert [codec.encode(trajectory) for trajectory in back[6:8]] == [
        codec.encode(as_session(m)) for m in trajectories()[6:8]
    ]


def test_a_version_that_made_only_a_fork_is_found(mixed):
    assert [trajectory.key for trajectory in found(mixed, Selection(versions=(3, 3)))] == [(3, 0), (3, 1)]

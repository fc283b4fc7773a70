"""Archives that hold sessions beside single turns."""

from pathlib import Path

import pytest

from tests.support.histories import trajectories
from tests.support.recorded_sessions import as_session
from tidemill.common.archive import stream_folder
from tidemill.common.archive.archiver import SegmentFile
from tidemill.common.archive.manifest import Manifest
from tidemill.common.archive.reader import select
from tidemill.common.files import aside_file
from tidemill.common.streams.entries import START, Entry
from tidemill.common.streams.selection import ALL, Selection, StreamName
from tidemill.common.wire import codec
from tidemill.common.wire.messages import Message

STREAM = StreamName.TRAJECTORIES


def found(folder: Path, selection: Selection = ALL) -> list[Message]:
    parts = select(Manifest.load(folder), STREAM, selection)
    return [record.message for part in parts for record in part if isinstance(record, Entry)]


@pytest.fixture
def mixed(tmp_path):
    """An archive in which ticket 3 was played as sessions."""
    folder = stream_folder(tmp_path, STREAM)
    segment = SegmentFile(STREAM.message_type, START)
    with aside_file(folder / "segment") as aside:
        for number, one in enumerate(trajectories(), 1):
            segment.add((f"{number}-0", codec.encode(as_session(one) if one.ticket == 3 else one)), aside)
        segment.publish(aside, folder)
    return folder


def test_sessions_beside_single_turns_come_back_entry_by_entry(mixed):
    back = found(mixed)
    assert back == [as_session(one) if one.ticket == 3 else one for one in trajectories()]
    assert [codec.encode(made) for made in back[6:8]] == [
        codec.encode(as_session(m)) for m in trajectories()[6:8]
    ]


def test_a_version_that_made_only_a_fork_is_found(mixed):
    assert [made.key for made in found(mixed, Selection(versions=(3, 3)))] == [(3, 0), (3, 1)]

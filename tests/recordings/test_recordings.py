"""The steps of runs that an earlier commit recorded come out of the present code, bit by bit."""

import pytest

from tests.recordings.record import RecordingError, Recordings, full_hash
from tests.recordings.runs import RECORDINGS


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", [recording.name for recording in RECORDINGS])
def test_a_recorded_run_is_trained_to_the_same_weights(name: str) -> None:
    """Where this machine has no recording of it yet, the code of that commit makes one first."""
    recordings = Recordings()
    (recording,) = (recording for recording in RECORDINGS if recording.name == name)
    recorded = recordings.make(recording)
    replay = recordings.replay(recording)
    assert not replay.differences, "\n".join(replay.differences)
    assert replay.digests == recorded.digests


def test_a_clone_without_the_commit_is_said_to_be_one() -> None:
    with pytest.raises(RecordingError, match="does not have commit 0123456789abcdef"):
        full_hash("0123456789abcdef")

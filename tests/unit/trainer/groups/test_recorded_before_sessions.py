"""An archive that was written before there were sessions: `tests/data/before_sessions` stays as it is."""

from pathlib import Path

import numpy as np

from tidemill.common.history import History, StreamName
from tidemill.common.wire import codec
from tidemill.common.wire.messages import Lane, Trajectory
from tidemill.services.reward.sample import RewardSample
from tidemill.services.trainer.groups.samples import make_sample, token_versions

PAYLOAD_BYTES = 1072
"""Of the four records, as its manifest says."""
FOLDER = Path(__file__).parents[3] / "data" / "before_sessions"


async def test_an_archive_of_before_is_read_scored_and_trained_as_single_turns() -> None:
    history = History("before-sessions", FOLDER, None)
    found = [made async for made in history.messages(StreamName.TRAJECTORIES, Trajectory)]
    assert [made.key for made in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for made in found:
        (segment,) = made.segments
        assert made.session is None and segment.turns == ()
        assert np.array_equal(segment.completion_ids, made.completion_ids)
        sample = make_sample(made)
        assert (sample.forked, sample.turns, sample.num_trained, sample.num_tokens) == ((), (), 3, 7)
        assert token_versions(made)[make_sample(made).mask].tolist() == [0, 0, 1]
        assert RewardSample.from_trajectory(made, Lane.TRAIN).session is None
        assert codec.decode(codec.encode(made), Trajectory) == made
    assert sum(len(codec.encode_payload(made)) for made in found) == PAYLOAD_BYTES, "a single turn has grown"

"""Payloads that were written before there were sessions, base64 line by line: the file stays as it is."""

import base64
from pathlib import Path

import numpy as np

from tidemill.common.wire import codec
from tidemill.common.wire.messages import Lane, Trajectory
from tidemill.services.reward.sample import RewardSample
from tidemill.services.trainer.groups.samples import make_sample

PAYLOADS = Path(__file__).parents[3] / "data" / "payloads_before_sessions.txt"


def test_payloads_of_before_are_read_scored_and_trained_as_single_turns() -> None:
    payloads = [base64.b64decode(line) for line in PAYLOADS.read_text().splitlines()]
    found = [codec.decode_payload(payload, Trajectory) for payload in payloads]
    assert [made.key for made in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for made in found:
        (segment,) = made.segments
        assert made.session is None and segment.turns == ()
        assert np.array_equal(segment.completion_ids, made.completion_ids)
        sample = make_sample(made)
        assert (sample.forked, sample.turns, sample.num_trained, sample.num_tokens) == ((), (), 3, 7)
        assert made.token_versions()[make_sample(made).mask].tolist() == [0, 0, 1]
        assert "num_turns" not in RewardSample(made, Lane.TRAIN).fields()["extra_info"]
    assert [codec.encode_payload(made) for made in found] == payloads, "a single turn has grown"

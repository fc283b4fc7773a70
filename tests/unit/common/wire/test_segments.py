"""Sessions on the wire: turns, forks, and what does not fit."""

import base64

import numpy as np
import pytest
from pydantic import ValidationError

from tidemill.common.process.programs import ROOT
from tidemill.common.wire import codec
from tidemill.common.wire.choices import Rows
from tidemill.common.wire.codec import decode, encode
from tidemill.common.wire.messages import Lane, Trajectory
from tidemill.common.wire.segments import Segment, Session, Turn
from tidemill.services.reward.sample import RewardSample
from tidemill.services.rollout.engines.engine import Generation
from tidemill.services.rollout.sessions.recorder import SegmentRecorder, choices_of
from tidemill.services.trainer.groups.sample import make_sample


def recorded() -> SegmentRecorder:
    """Two turns, [4, 5] by version 0 and [9] by version 1, with [7, 8] of the environment between them."""
    recorder = SegmentRecorder([1, 2, 3])
    recorder.add_turn(Generation([4, 5], [-1.0, -2.0], ((0, 0),), "stop"))
    recorder.add_context([7, 8])
    recorder.add_turn(Generation([9], [-0.5], ((1, 0),), "stop"))
    return recorder


def test_masks_of_turns_are_joined_with_nothing_between_them_and_cut_with_their_tokens():
    recorder = SegmentRecorder([1, 2, 3])
    second_recorder = SegmentRecorder([1])
    first = Generation(
        [4, 5], [-1.0, -2.0], ((0, 0),), "stop", choices={"kept": Rows.of_lists([[4], [5, 6]])}
    )
    recorder.add_turn(first)
    recorder.add_context([7, 8])
    recorder.add_turn(Generation([9], [-0.5], ((1, 0),), "stop", choices={"kept": Rows.of_lists([[9, 3]])}))
    second_recorder.add_turn(first.cut(1))
    assert choices_of([recorder])["kept"] == Rows.of_lists([[4], [5, 6], [], [], [9, 3]])
    both = choices_of([recorder, second_recorder])["kept"]
    assert both == Rows.of_lists([[4], [5, 6], [], [], [9, 3], [4]])
    recorder.rewind(4)
    assert choices_of([recorder])["kept"] == Rows.of_lists([[4], [5, 6], [], []])
    assert choices_of([recorded()]) == {}, "nothing was filtered"


def trajectory(segment: Segment, *forks: Segment) -> Trajectory:
    session = Session(environment="tools", turns=segment.turns, forks=forks, messages=({"role": "user"},))
    fields = {name: getattr(segment, name) for name in ("prompt_ids", "completion_ids", "logprobs", "spans")}
    return Trajectory(
        **fields, loss_mask=segment.loss_mask, ticket=1, index=0, step=1, group_size=2, session=session
    )


def test_a_recorded_segment_has_the_engines_tokens_with_mask_1_and_the_environments_with_mask_0():
    segment = recorded().segment()
    assert segment.completion_ids.tolist() == [4, 5, 7, 8, 9]
    assert segment.mask.tolist() == [True, True, False, False, True]
    assert segment.logprobs.tolist() == [-1.0, -2.0, 0.0, 0.0, -0.5]
    assert segment.spans == ((0, 0), (1, 4))
    assert [(turn.first, turn.end, turn.num_prompt_tokens) for turn in segment.turns] == [
        (0, 2, 3),
        (4, 5, 7),
    ]


def test_a_rewound_turn_keeps_the_tokens_before_the_break_and_nothing_after_it():
    recorder = recorded()
    recorder.add_turn(Generation([10, 11, 12], [-1.0] * 3, ((1, 0), (2, 1)), "stop"))
    recorder.rewind(6)
    recorder.add_context([20])
    segment = recorder.segment()
    assert segment.completion_ids.tolist() == [4, 5, 7, 8, 9, 10, 20]
    assert segment.mask.tolist() == [True, True, False, False, True, True, False]
    assert segment.spans == ((0, 0), (1, 4))
    assert segment.turns[-1].end == 6
    with pytest.raises(ValueError, match="segment of its own"):
        recorder.rewind(3)


def test_a_session_survives_the_wire_with_its_forks_and_counts_their_versions():
    fork = SegmentRecorder([1, 2, 3, 4])
    fork.add_turn(Generation([6], [-0.25], ((3, 0),), "length"))
    sent = trajectory(recorded().segment(), fork.segment())
    received = decode(encode(sent), Trajectory)
    assert received == sent
    assert [segment.completion_ids.tolist() for segment in received.segments] == [[4, 5, 7, 8, 9], [6]]
    assert (received.min_version, received.max_version) == (0, 3)
    first_of_one_version = trajectory(fork.segment(), recorded().segment())
    assert (first_of_one_version.min_version, first_of_one_version.max_version) == (0, 3)


def test_turns_that_do_not_fit_their_segment_are_refused():
    segment = recorded().segment()
    for turns in ((Turn(first=4, num_tokens=2),), (Turn(first=0, num_tokens=3), Turn(first=2, num_tokens=1))):
        with pytest.raises(ValidationError, match="does not fit"):
            segment.model_validate(dict(segment) | {"turns": turns})
    with pytest.raises(ValidationError, match="3 completion ids but 1 logprobs"):
        Segment(prompt_ids=[1], completion_ids=[1, 2, 3], logprobs=np.zeros(1), spans=((0, 0),))


def test_payloads_from_before_there_were_sessions_are_read_scored_and_trained_as_single_turns():
    """Base64 line by line; the file stays as it is."""
    lines = (ROOT / "tests" / "data" / "payloads_before_sessions.txt").read_text().splitlines()
    payloads = [base64.b64decode(line) for line in lines]
    decoded = [codec.decode_payload(payload, Trajectory) for payload in payloads]
    assert [trajectory.key for trajectory in decoded] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for trajectory in decoded:
        (segment,) = trajectory.segments
        assert trajectory.session is None and segment.turns == ()
        assert np.array_equal(segment.completion_ids, trajectory.completion_ids)
        sample = make_sample(trajectory)
        assert (len(sample.segments), sample.turns, sample.num_trained, sample.num_tokens) == (1, (), 3, 7)
        assert trajectory.token_versions()[sample.mask].tolist() == [0, 0, 1]
        assert "num_turns" not in RewardSample(trajectory, Lane.TRAIN).fields()["extra_info"]
    assert [codec.encode_payload(trajectory) for trajectory in decoded] == payloads, "a single turn has grown"

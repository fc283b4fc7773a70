"""What the messages of a run refuse, and what they answer about themselves."""

import math

import numpy as np
import pytest
from pydantic import ValidationError

from tests.support.trajectories import make_trajectory
from tidemill.common.wire.messages import Commit, Score, ScoreStatus, WeightFile, WeightManifest


def test_the_oldest_version_is_found_wherever_it_stands_and_an_absent_mask_trains_every_token():
    assert make_trajectory(spans=((5, 0), (4, 1))).min_version == 4
    assert make_trajectory().mask.tolist() == [True, True, True]
    masked = make_trajectory(loss_mask=np.array([True, False, True]))
    assert masked.mask.tolist() == [True, False, True]
    empty = make_trajectory(completion_ids=np.zeros(0, np.int32), logprobs=np.zeros(0, np.float32))
    assert (empty.num_tokens, empty.min_version) == (0, 0), "an empty completion has one span"


def test_a_message_cannot_be_changed():
    with pytest.raises(ValidationError, match="frozen"):
        make_trajectory().ticket = 7  # type: ignore[misc]


@pytest.mark.parametrize(
    ("status", "right", "wrong", "words"),
    [
        (ScoreStatus.FAILED, None, 0.0, "cannot have value"),
        (ScoreStatus.TIMEOUT, None, 0.0, "cannot have value"),
        (ScoreStatus.OK, 0.0, None, "cannot have value"),
        *((ScoreStatus.OK, 1.0, value, "finite") for value in (math.nan, math.inf, -math.inf)),
    ],
)
def test_a_success_has_a_finite_value_and_a_failure_has_none(status, right, wrong, words):
    assert Score(ticket=0, index=0, status=status, value=right).value == right
    with pytest.raises(ValidationError, match=words):
        Score(ticket=0, index=0, status=status, value=wrong)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "a/b", ".hidden", "", "x" * 201])
def test_a_weight_file_stays_inside_its_folder(name):
    with pytest.raises(ValidationError):
        WeightFile(name=name, num_bytes=1, checksum="0" * 32)


@pytest.mark.parametrize("folder", ["../v00000001", "v1", "v00000001/..", "v00000001\n"])
def test_a_version_stays_inside_the_weights_folder(folder):
    with pytest.raises(ValidationError):
        WeightManifest(version=1, folder=folder, files=(), digest="0" * 32)


def test_a_commit_lists_what_it_trained_once_for_each_update():
    commit = Commit(
        step=0, version=1, groups=(4, 5), mini_batches=((((4, 0), (4, 1)), ((5, 0),)), (((4, 0),),))
    )
    assert commit.trained_keys == [(4, 0), (4, 1), (5, 0), (4, 0)]

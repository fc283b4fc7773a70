"""What the messages of a run refuse, and what they answer about themselves."""

import math

import numpy as np
import pytest
from pydantic import ValidationError

from tests.support.trajectories import make_trajectory
from tidemill.common.wire.messages import Commit, Score, ScoreStatus, WeightFile, WeightManifest


def test_each_token_knows_the_version_that_produced_it() -> None:
    trajectory = make_trajectory(
        completion_ids=np.arange(6), logprobs=np.zeros(6, dtype=np.float32), spans=((3, 0), (4, 2), (7, 5))
    )
    assert trajectory.min_version == 3


def test_the_oldest_version_is_found_wherever_it_stands() -> None:
    assert make_trajectory(spans=((5, 0), (4, 1))).min_version == 4


def test_an_absent_loss_mask_trains_every_token() -> None:
    assert make_trajectory().mask.tolist() == [True, True, True]
    masked = make_trajectory(loss_mask=np.array([True, False, True]))
    assert masked.mask.tolist() == [True, False, True]


def test_an_empty_completion_has_one_span_and_no_tokens() -> None:
    empty = make_trajectory(completion_ids=np.zeros(0, np.int32), logprobs=np.zeros(0, np.float32))
    assert empty.num_tokens == 0


def test_a_message_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        make_trajectory().ticket = 7  # type: ignore[misc]


@pytest.mark.parametrize("status", [ScoreStatus.FAILED, ScoreStatus.TIMEOUT])
def test_a_failure_has_no_value(status: ScoreStatus) -> None:
    assert Score(ticket=0, index=0, status=status).value is None
    with pytest.raises(ValidationError, match="cannot have value"):
        Score(ticket=0, index=0, status=status, value=0.0)


def test_a_success_has_a_value() -> None:
    assert Score(ticket=0, index=0, status=ScoreStatus.OK, value=0.0).value == 0.0
    with pytest.raises(ValidationError, match="cannot have value"):
        Score(ticket=0, index=0, status=ScoreStatus.OK)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_score_is_finite(value: float) -> None:
    with pytest.raises(ValidationError, match="finite"):
        Score(ticket=0, index=0, status=ScoreStatus.OK, value=value)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "a/b", ".hidden", "", "x" * 201])
def test_a_weight_file_stays_inside_its_folder(name: str) -> None:
    with pytest.raises(ValidationError):
        WeightFile(name=name, num_bytes=1, checksum="0" * 32)


@pytest.mark.parametrize("folder", ["../v00000001", "v1", "v00000001/..", "v00000001\n"])
def test_a_version_stays_inside_the_weights_folder(folder: str) -> None:
    with pytest.raises(ValidationError):
        WeightManifest(version=1, folder=folder, files=(), digest="0" * 32)


def test_a_commit_lists_what_it_trained_once_for_each_update() -> None:
    commit = Commit(
        step=0, version=1, groups=(4, 5), mini_batches=((((4, 0), (4, 1)), ((5, 0),)), (((4, 0),),))
    )
    assert commit.trained_keys == [(4, 0), (4, 1), (5, 0), (4, 0)]

"""What is wrong with a sample's pictures is found as it is read; tries tell pictures apart."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.small_vision_models import make_vision_model
from tests.support.picture_samples import PictureMaker
from tests.support.trajectories import make_trajectory
from tests.support.vision import png_of
from tidemill.common.store import ClaimStore, claims, resolved
from tidemill.common.wire.images import PICTURES_FAULT, Image
from tidemill.common.wire.messages import Trajectory
from tidemill.services.trainer.groups.pictures import PictureCheck
from tidemill.services.trainer.groups.sample import make_sample
from tidemill.services.trainer.groups.trie import common_lengths, with_pictures


@pytest.fixture(scope="module")
def maker(tmp_path_factory: pytest.TempPathFactory) -> PictureMaker:
    run_dir = tmp_path_factory.mktemp("run")
    return PictureMaker(make_vision_model(run_dir / "model", "qwen2_5_vl"), run_dir)


def trajectory_of(maker: PictureMaker, **fields: Any) -> Trajectory:
    sample = maker.sample((0, 0), [png_of(0), png_of(1)])
    return make_trajectory(prompt_ids=sample.prompt_ids, images=sample.images, **fields)


def fault_of(maker: PictureMaker, trajectory: Trajectory) -> str:
    return PictureCheck(maker.store, maker.processor).fault_of(trajectory)


def test_a_sample_whose_pictures_are_there_has_no_fault(maker: PictureMaker) -> None:
    assert fault_of(maker, trajectory_of(maker)) == ""
    assert fault_of(maker, make_trajectory()) == ""


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"digest": "f" * 32}, "is missing"),
        ({"num_bytes": 3}, "does not match its digest"),
        ({"width": 560}, "the processor here makes"),
    ],
)
def test_a_picture_that_cannot_be_had_is_a_fault(
    maker: PictureMaker, changes: dict[str, Any], problem: str
) -> None:
    trajectory = trajectory_of(maker)
    broken = trajectory.images[0].model_copy(update=changes)
    trajectory = trajectory.model_copy(update={"images": (broken, trajectory.images[1])})
    fault = fault_of(maker, trajectory)
    assert fault.startswith("its pictures: ") and problem in fault
    with pytest.raises(ValueError, match=problem):
        make_sample(trajectory.model_copy(update={"fault": fault}))


def test_a_damaged_file_is_a_fault_of_its_samples(maker: PictureMaker, tmp_path: Path) -> None:
    trajectory = trajectory_of(maker)
    path = maker.store.folder / f"{trajectory.images[1].digest}.png"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + b"?")
    try:
        assert "does not match its digest" in fault_of(maker, trajectory)
    finally:
        path.write_bytes(whole)


async def test_a_picture_that_alone_cannot_be_read_fails_its_samples_and_says_so(
    maker: PictureMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(claims, "LAST_PAUSE_S", 0.02)
    reader = ClaimStore(tmp_path)
    reader.check_pictures = PictureCheck(maker.store, maker.processor).fault_of
    trajectory = trajectory_of(maker)
    path = maker.store.folder / f"{trajectory.images[1].digest}.png"
    aside = path.rename(path.with_suffix(".aside"))
    path.mkdir()
    try:
        async with asyncio.timeout(60):
            failed = await resolved(reader, trajectory)
    finally:
        path.rmdir()
        aside.rename(path)
    assert failed.fault.startswith(PICTURES_FAULT) and str(path) in failed.fault
    assert (await resolved(reader, trajectory)).fault == ""


def test_placeholders_that_no_picture_has_are_a_fault(maker: PictureMaker) -> None:
    placeholder = maker.processor.placeholder_id
    for banned in maker.processor.banned_ids:
        sampled = trajectory_of(maker, completion_ids=np.array([4, banned, 5], np.int32))
        assert "token 1 of a completion" in fault_of(maker, sampled)
    text = make_trajectory(prompt_ids=np.array([4, placeholder, 5], np.int32))
    assert fault_of(maker, text).startswith("its placeholders: 1 tokens of the prompt")


def test_a_trie_tells_pictures_apart_and_shares_what_is_before_them() -> None:
    ids = np.array([5, 9, 9, 9, 9, 9, 6, 7], np.int32)
    common = {"num_bytes": 1, "width": 1, "height": 1, "first": 1, "num_tokens": 5}
    first = with_pictures(ids, [Image(digest="a" * 32, **common)])
    second = with_pictures(ids, [Image(digest="b" * 32, **common)])
    assert (first[1:6] < 0).all() and (second[1:6] < 0).all()
    np.testing.assert_array_equal(first[[0, 6, 7]], ids[[0, 6, 7]])
    assert common_lengths([first, first, second, ids]) == [0, 8, 1, 1]

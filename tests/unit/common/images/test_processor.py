"""Expansion and pixels are those of the family's own processor."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlavaProcessor
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from examples.small_vision_models import SMALL_FAMILIES, vision_tokenizer
from tests.support.vision import file_of, noise
from tests.support.vision_models import copy_vision_model
from tidemill.common.config.images import ImagesConfig
from tidemill.common.errors import ConfigError
from tidemill.common.images.pictures import MAX_ASPECT, make_picture
from tidemill.common.images.processor import PictureProcessor, load_processor
from tidemill.common.wire.images import Image, check_images, collapse

SIZES = [(56, 56), (100, 61), (300, 40), (33, 200)]
BOUNDS = ImagesConfig(min_pixels=3136, max_pixels=10_000)


def stored(width: int, height: int, seed: int = 0) -> bytes:
    return make_picture(file_of(noise(width, height, seed)), 1 << 20).png


@pytest.fixture(params=SMALL_FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def processor(family: str, tmp_path: Any) -> PictureProcessor:
    return load_processor(copy_vision_model(tmp_path, family), BOUNDS)


def expand_by_library(
    family: str, processor: PictureProcessor, text: str, inputs: dict[str, Any]
) -> list[int]:
    """What the family's own processor does with a text whose pictures were processed to `inputs`."""
    tokenizer = vision_tokenizer(family)
    classes: dict[str, Any] = {"qwen2_5_vl": Qwen2_5_VLProcessor, "qwen3_vl": Qwen3VLProcessor}
    if family == "llava":
        theirs: Any = LlavaProcessor(
            processor.image_processor,
            tokenizer,
            14,
            "default",
            image_token="<image>",
            num_additional_image_tokens=1,
        )
    else:
        # Without its video processor, which needs torchvision.
        theirs = object.__new__(classes[family])
        theirs.image_processor = processor.image_processor
        theirs.image_token = "<|image_pad|>"
    number = 0
    while "HERE" in text:
        text = text.replace("HERE", theirs.replace_image_token(inputs, number), 1)
        number += 1
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def test_placeholders_become_what_the_familys_own_processor_writes(family, processor):
    pictures = [stored(*size) for size in SIZES]
    placeholder = "<image>" if family == "llava" else "<|image_pad|>"
    text = "w1 HERE w2 HERE w3 HERE . HERE w4"
    plain = vision_tokenizer(family)(text.replace("HERE", placeholder), add_special_tokens=False)["input_ids"]
    expanded, spans = processor.expand(plain, pictures)
    inputs = processor.pixels(pictures)
    assert expanded.dtype == np.int32
    assert expanded.tolist() == expand_by_library(family, processor, text, inputs)
    for first, count in spans:
        assert set(expanded[first : first + count].tolist()) == {processor.placeholder_id}
    images = [
        Image(digest="0" * 32, num_bytes=1, width=1, height=1, first=first, num_tokens=count)
        for first, count in spans
    ]
    check_images(images, [len(expanded)])
    assert collapse(expanded, images, processor.placeholder_id).tolist() == plain
    assert processor.num_tokens(pictures) == [count for _, count in spans]


def test_the_pixels_are_those_of_the_librarys_processor_with_both_bounds(family, processor):
    pictures = [noise(*size) for size in SIZES]
    kwargs = {} if family == "llava" else {"size": {"shortest_edge": 3136, "longest_edge": 10_000}}
    expected = processor.image_processor(images=pictures, return_tensors="pt", **kwargs)
    pixels = processor.pixels([file_of(picture) for picture in pictures])
    assert set(pixels) == set(expected)
    assert all(torch.equal(pixels[name], expected[name]) for name in pixels)
    assert processor.call_kwargs == kwargs


@pytest.mark.parametrize("bounds", [BOUNDS, ImagesConfig(max_pixels=65_536), ImagesConfig(max_pixels=50_000)])
def test_no_picture_has_more_tokens_than_the_bound(family, tmp_path, bounds):
    processor = load_processor(copy_vision_model(tmp_path, family), bounds)
    most = processor.most_tokens()
    counts = []
    for aspect in (1, 1.25, 2, 3, 7.5, 12, 38, 48, 170, MAX_ASPECT):
        for share in (1.0, 0.3, 0.001):
            short = max(1, int((share * bounds.max_pixels / aspect) ** 0.5))
            long = min(int(short * aspect), bounds.max_pixels // short)
            counts += [processor.num_tokens_of(long, short), processor.num_tokens_of(short, long)]
    assert max(counts) <= most <= 1.3 * max(counts)
    assert (family == "llava") == (set(counts) == {most})


def test_a_row_with_more_or_fewer_places_than_pictures_is_refused(processor):
    picture = stored(56, 56)
    mark = processor.placeholder_id
    for ids, pictures in (([mark], [picture, picture]), ([1, mark, 2, mark], [picture]), ([1], [picture])):
        with pytest.raises(ValueError, match="placeholders"):
            processor.expand(ids, pictures)
    with pytest.raises(ValueError, match="no text between"):
        processor.expand([1, mark, mark], [picture, picture])
    expanded, spans = processor.expand([1, 2], [])
    assert (expanded.tolist(), spans) == ([1, 2], [])


def test_ids_that_stand_for_pixels_are_banned(family, processor):
    expected = {"<image>"} if family == "llava" else {"<|image_pad|>", "<|video_pad|>"}
    tokenizer = vision_tokenizer(family)
    assert set(processor.banned_ids) == {tokenizer.convert_tokens_to_ids(name) for name in expected}
    assert processor.reserved_ids[0] == processor.placeholder_id


def test_name_and_digest_follow_what_decides_the_pixels(tmp_path):
    folder = copy_vision_model(tmp_path, "qwen2_5_vl")
    processor = load_processor(folder, BOUNDS)
    assert processor.name == "Qwen2VLImageProcessorPil"
    assert load_processor(folder, BOUNDS).digest == processor.digest
    assert load_processor(folder, BOUNDS.model_copy(update={"max_pixels": 20_000})).digest != processor.digest
    assert load_processor(folder, BOUNDS.model_copy(update={"broken": "error"})).digest == processor.digest
    settings = folder / "preprocessor_config.json"
    settings.write_text(settings.read_text().replace('"merge_size": 2', '"merge_size": 4'))
    assert load_processor(folder, BOUNDS).digest != processor.digest


def test_without_min_pixels_the_models_own_bound_holds(tmp_path):
    folder = copy_vision_model(tmp_path, "qwen2_5_vl")
    processor = load_processor(folder, ImagesConfig(max_pixels=50_000))
    assert processor.call_kwargs == {"size": {"shortest_edge": 3136, "longest_edge": 50_000}}
    assert load_processor(folder, ImagesConfig(max_pixels=1000)).call_kwargs["size"]["shortest_edge"] == 1000


def test_other_families_and_folders_without_a_processor_are_refused_by_name(tmp_path):
    folder = copy_vision_model(tmp_path / "a", "qwen2_5_vl")
    config = folder / "config.json"
    text = config.read_text()
    config.write_text(text.replace('"model_type": "qwen2_5_vl"', '"model_type": "gemma3"'))
    with pytest.raises(ConfigError, match="gemma3"):
        load_processor(folder, BOUNDS)
    config.write_text(text)
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(ConfigError, match="preprocessor_config"):
        load_processor(folder, BOUNDS)


def test_spans_are_checked():
    def image(first: int, count: int) -> Image:
        return Image(digest="0" * 32, num_bytes=1, width=1, height=1, first=first, num_tokens=count)

    check_images([image(0, 2), image(2, 3)], [5])
    for images, length in (
        ([image(0, 3), image(2, 1)], 9),
        ([image(3, 1), image(0, 1)], 9),
        ([image(4, 2)], 5),
    ):
        with pytest.raises(ValueError, match="token"):
            check_images(images, [length])

"""Prompts with pictures: all tokens of each, broken rows left out, the same pictures on resume."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from examples.small_vision_models import SMALL_FAMILIES, make_vision_model, vision_tokenizer
from tests.support.vision import file_of, noise
from tidemill.common.config.data import DataConfig
from tidemill.common.config.images import ImagesConfig
from tidemill.common.data.dataset import Row
from tidemill.common.errors import BrokenImageError, ConfigError
from tidemill.common.images import door as door_module
from tidemill.common.images.door import ImageDoor
from tidemill.common.images.fetching import Fetched
from tidemill.common.images.processor import load_processor
from tidemill.common.images.sources import ImageSource
from tidemill.common.images.store import ImageStore
from tidemill.common.wire.images import collapse
from tidemill.services.trainer.batch.prompts import Prompt, PromptSource, encode_rows
from tidemill.services.trainer.batch.row_pictures import RowPictures
from tidemill.services.trainer.batch.streamed_prompts import StreamedPrompts

FAMILY = "qwen2_5_vl"
WORDS = ("w1", "w2", "user", "assistant")


def make_tokenizer() -> Any:
    return vision_tokenizer(FAMILY, WORDS)


def id_of(token: str) -> int:
    return int(make_tokenizer().convert_tokens_to_ids(token))


PLACE = id_of("<|image_pad|>")
QUESTION = "<image>w1 w2"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_vision_model(tmp_path / "model", FAMILY, words=WORDS)


def pictures_of(folder: Path, **fields: Any) -> RowPictures:
    config = ImagesConfig(min_pixels=3136, max_pixels=10_000, **fields)
    run = folder.parent / "run"
    run.mkdir(exist_ok=True)
    store = ImageStore(run)
    door = ImageDoor(config, store, store.folder)
    return RowPictures(config, door, load_processor(folder, config), make_tokenizer())


def section(**fields: Any) -> DataConfig:
    data = DataConfig.model_validate({"train": "unused.jsonl", **fields})
    data.with_images()
    return data


def row(number: int, *sizes: tuple[int, int], prompt: Any = QUESTION, content: bytes = b"") -> Row:
    images = [ImageSource(content=content or file_of(noise(*size, seed=number))) for size in sizes]
    return Row(prompt, "test", "2", {}, number, f"a.jsonl line {number + 1}", images=tuple(images))


def encode(folder: Path, *rows: Row, data: DataConfig | None = None, **fields: Any) -> list[Prompt]:
    pictures = pictures_of(folder, **fields)
    return encode_rows(list(rows), make_tokenizer(), data or section(), pictures)


def test_a_prompt_has_all_tokens_of_its_pictures_and_says_where_they_are(folder):
    two = row(0, (56, 56), (112, 60), prompt=[{"role": "user", "content": "<image> w1 <image>"}])
    (prompt,) = encode(folder, two)
    assert [(image.width, image.height, image.num_tokens) for image in prompt.images] == [
        (56, 56, 4),
        (112, 60, 8),
    ]
    for image in prompt.images:
        assert set(prompt.ids[image.first : image.end].tolist()) == {PLACE}
        assert prompt.ids[image.first - 1] == id_of("<|vision_start|>")
        assert prompt.ids[image.end] == id_of("<|vision_end|>")
        png = ImageStore(folder.parent / "run").read(image)
        assert np.array_equal(len(png), image.num_bytes)
    assert (prompt.ids == PLACE).sum() == 12
    plain = make_tokenizer()(prompt.text, add_special_tokens=False)["input_ids"]
    assert collapse(prompt.ids, prompt.images, PLACE).tolist() == plain
    assert prompt.ticket_fields()["images"] == prompt.images
    (simple,) = encode(folder, row(0, (56, 56)))
    assert simple.own_text == QUESTION


def test_a_row_without_pictures_is_as_it_was(folder):
    (prompt,) = encode(folder, row(0, prompt="w1 w2"))
    assert prompt.images == () and not (prompt.ids == PLACE).any()


@pytest.mark.parametrize(
    "broken, words",
    [
        (row(1, (4, 4), content=b"<html>"), "none of PNG"),
        (row(1, (4, 4), (4, 4)), "2 pictures and 1 places"),
        (row(1, prompt="<|image_pad|> w1"), "stands for a picture"),
        (row(1, (4, 4), prompt="<image> <|video_pad|>"), "stands for a picture"),
        (row(1, (4, 4), prompt="<image> <|vision_end|>"), "stands for a picture"),
        (row(1, *[(4, 4)] * 3, prompt="<image> <image> <image>"), "images.max_per_prompt"),
    ],
)
def test_a_row_that_cannot_be_had_is_left_out_alone_with_its_reason(folder, broken, words):
    with capture_logs() as logs:
        prompts = encode(folder, row(0, (4, 4)), broken, row(2, (4, 4)), max_per_prompt=2)
    assert [prompt.row for prompt in prompts] == [0, 2]
    (warning,) = [log for log in logs if "pictures" in log["event"]]
    assert warning["num_rows"] == 1
    assert warning["first"][0].startswith("a.jsonl line 2: ") and words in warning["first"][0]
    with pytest.raises(ConfigError, match=r"a\.jsonl line 2: "):
        encode(folder, row(0, (4, 4)), broken, max_per_prompt=2, broken="error")


def test_a_url_that_failed_is_asked_again_until_a_run_goes_on_without_it(folder, monkeypatch):
    fetched = []

    def fetch(url: str, _: ImagesConfig) -> Fetched:
        fetched.append(url)
        raise BrokenImageError("status 404")

    monkeypatch.setattr(door_module, "fetch", fetch)
    images = (ImageSource(url="http://a.example/gone"),)
    gone = Row(QUESTION, "", "2", {}, 1, "line 2", images=images)
    for _ in range(2):
        with pytest.raises(ConfigError, match="status 404"):
            encode(folder, row(0, (4, 4)), gone, broken="error")
    assert len(fetched) == 2
    for _ in range(2):
        assert [prompt.row for prompt in encode(folder, row(0, (4, 4)), gone)] == [0]
    assert len(fetched) == 3


def test_where_no_row_is_left_the_first_reason_is_the_error(folder):
    with pytest.raises(ConfigError, match=r"line 2: .*none of PNG.* No row is left"):
        encode(folder, row(1, (4, 4), content=b"<html>"))


def test_two_pictures_without_text_between_are_refused(folder):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace(
        SMALL_FAMILIES[FAMILY].picture_text, "<|image_pad|>"
    )
    rows = [row(0, (4, 4)), row(1, (4, 4), (4, 4), prompt="<image><image>")]
    prompts = encode_rows(rows, tokenizer, section(), pictures_of(folder))
    assert [prompt.row for prompt in prompts] == [0]


def test_a_template_that_writes_no_placeholder_is_refused(folder):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }} : {{ m.content }}{% endfor %}"
    with pytest.raises(ConfigError, match=r"writes no placeholder \(<\|image_pad\|>\)"):
        encode_rows([row(0, (4, 4))], tokenizer, section(), pictures_of(folder))
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="chat template"):
        encode_rows([row(0, (4, 4))], tokenizer, section(), pictures_of(folder))


@pytest.mark.parametrize("side", ["left", "right", "middle", "drop"])
def test_a_prompt_that_is_too_long_is_never_cut_through_a_picture(folder, side):
    data = section(max_prompt_tokens=19, overlong_prompts=side)
    long_text = row(1, prompt=" ".join(["w1"] * 40))
    prompts = encode(folder, row(0, (56, 56)), row(2, (100, 100)), long_text, data=data)
    assert prompts[0].row == 0 and (prompts[0].ids == PLACE).sum() == 4
    assert [prompt.row for prompt in prompts[1:]] == ([] if side == "drop" else [1])
    with pytest.raises(ConfigError, match="max_prompt_tokens is 19"):
        encode(folder, row(0, (100, 100)), data=section(max_prompt_tokens=19))


def test_other_pixels_or_another_bound_are_another_fingerprint(folder):
    def fingerprint(seed: int, **fields: Any) -> str:
        content = file_of(noise(60, 60, seed))
        prompts = encode(folder, row(0, (60, 60), content=content), **fields)
        return PromptSource(prompts, 0, True).fingerprint

    assert fingerprint(0) == fingerprint(0)
    assert fingerprint(0) != fingerprint(1)


def test_streamed_rows_give_the_same_prompts_also_after_their_files_are_gone(folder, tmp_path):
    pictures = pictures_of(folder)
    tokenizer = make_tokenizer()
    paths = [tmp_path / f"{number}.png" for number in range(3)]
    rows = []
    for number, path in enumerate(paths):
        path.write_bytes(file_of(noise(30, 30, number)) if number != 1 else b"broken")
        images = (ImageSource(path=str(path)),)
        rows.append(Row(QUESTION, "", "2", {}, number, f"line {number}", images=images))

    def read(of_rows: Any) -> Any:
        return iter(encode_rows(of_rows, tokenizer, section(), pictures))

    held = list(read(rows))
    streamed = StreamedPrompts(rows, read)
    assert streamed.rows.tolist() == [prompt.row for prompt in held] == [0, 2]
    for path in paths:
        path.unlink()
    for index, prompt in enumerate(held):
        assert streamed[index].images == prompt.images
        assert np.array_equal(streamed[index].ids, prompt.ids)
    assert PromptSource(held, 0, True).fingerprint == PromptSource(streamed, 0, True).fingerprint

"""What `tidemill check` says of the section `images`, of the rows' pictures, and of the model's folder."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.vision import file_of, noise
from tidemill.common.config.run import RunConfig
from tidemill.common.data.dataset import Row
from tidemill.common.errors import ConfigError
from tidemill.common.images import door
from tidemill.common.images.sources import ImageSource
from tidemill.services.console.check import pictures as pictures_module
from tidemill.services.console.check.model_folder import ModelFacts
from tidemill.services.console.check.pictures import bound_tokens, check_pictures

PNG = ImageSource(content=file_of(noise(8, 8)))
BROKEN = ImageSource(content=b"<html>")


def config_of(images: Any = None) -> RunConfig:
    tree = {"model": {"path": "m"}, "data": {"train": "a.jsonl"}, "images": images}
    return RunConfig.model_validate(tree)


def row(number: int, *images: ImageSource, prompt: str = "How many?") -> Row:
    return Row(prompt, "", "2", {}, number, f"a.jsonl line {number + 1}", images=images)


def folder_of(path: Path, model_type: str = "qwen2_5_vl", has_processor: bool = True) -> ModelFacts:
    path.mkdir()
    if has_processor:
        (path / "preprocessor_config.json").write_text(json.dumps({}))
    return ModelFacts(path, model_type=model_type)


def test_rows_with_pictures_that_can_be_used_are_worth_no_note(tmp_path: Path) -> None:
    rows = {"train": [row(0, PNG), row(1), row(2, PNG, PNG)]}
    assert check_pictures(config_of({}), folder_of(tmp_path / "m"), rows) == []


def test_a_run_of_text_has_nothing_to_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", None)
    assert check_pictures(config_of(), None, {"train": [row(0, BROKEN)]}) == []


def test_a_section_without_any_pictures_is_a_note_that_says_where_they_are_looked_for() -> None:
    (note,) = check_pictures(config_of({}), None, {"train": [row(0)], "eval": [row(1)]})
    assert "none of the first rows has pictures" in note and "data.columns" in note


def test_a_model_that_does_not_see_or_has_no_processor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="llama"):
        check_pictures(config_of({}), folder_of(tmp_path / "a", "llama"), {})
    with pytest.raises(ConfigError, match="no image processor"):
        check_pictures(config_of({}), folder_of(tmp_path / "b", has_processor=False), {})
    of_hub = ModelFacts(Path("Qwen/Qwen2.5-VL-3B-Instruct"), is_remote=True)
    assert check_pictures(config_of({}), of_hub, {}) == []


def test_without_pillow_the_section_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install pillow"):
        check_pictures(config_of({}), None, {})


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (row(1, BROKEN), "none of PNG"),
        (row(1, PNG, PNG, PNG), "images.max_per_prompt"),
        (row(1, PNG, prompt="<image> and <image>"), "2 places"),
        (row(1, ImageSource(path="/nowhere/a.png")), "/nowhere/a.png"),
    ],
)
def test_a_row_that_cannot_be_used_is_named_and_refused_where_it_has_to_be(broken: Row, reason: str) -> None:
    bounds = {"max_per_prompt": 2}
    (note,) = check_pictures(config_of(bounds), None, {"train": [row(0, PNG), broken]})
    assert note.startswith("train: 1 of the first 2 rows") and f"{broken.origin}: " in note and reason in note
    with pytest.raises(ConfigError, match=reason):
        check_pictures(config_of(bounds | {"broken": "error"}), None, {"train": [row(0, PNG), broken]})
    with pytest.raises(ConfigError, match="1 of the first 1 rows of train"):
        check_pictures(config_of(bounds), None, {"train": [broken], "eval": [row(0, PNG)]})


def test_urls_are_counted_and_not_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "fetch", None)
    urls = [ImageSource(url=f"http://a.example/{number}.png") for number in range(3)]
    (note,) = check_pictures(config_of({}), None, {"train": [row(0, *urls), row(1, PNG)]})
    assert note.startswith("train: ") and "(3 in 2 rows)" in note


def test_the_tokens_of_pictures_are_bounded_for_a_prompt_a_pass_and_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tree = {
        "model": {"path": "m", "max_model_len": 4096},
        "data": {"train": "a.jsonl", "max_prompt_tokens": 2600},
        "images": {"max_per_prompt": 8},
        "trainer": {"groups_per_step": 4, "group_size": 8, "micro_batch_tokens": 1000},
    }
    model = ModelFacts(Path("m"), model_type="qwen2_5_vl")
    monkeypatch.setattr(pictures_module, "most_picture_tokens", lambda _: 1280)
    line, notes = bound_tokens(RunConfig.model_validate(tree), model)
    # Of 8 x 1,280 tokens a prompt takes 2,600; a pass has a whole sample; a step has 4 x 8 of them.
    for words in (
        "1,280 tokens each",
        "2,600 in a prompt",
        "2 of the largest fit",
        "2,600 in a pass",
        "83,200 in a step",
    ):
        assert words in line
    assert not notes
    tree["data"]["max_prompt_tokens"] = 640
    line, notes = bound_tokens(RunConfig.model_validate(tree), model)
    assert "0 of the largest fit" in line and "1,000 in a pass" in line
    # Half of 1,280 tokens: half of the pixels.
    assert "below 501,760" in notes[0] and "data.max_prompt_tokens is 640" in notes[0]
    assert bound_tokens(config_of(), model) == bound_tokens(config_of({}), None) == ("", [])

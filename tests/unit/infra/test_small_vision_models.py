"""The small models that see: their folders are as on the hub, and a picture is one placeholder of theirs."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForImageTextToText, AutoTokenizer
from transformers.core_model_loading import revert_weight_conversion

from examples.small_vision_models import SMALL_FAMILIES, make_vision_model
from tidemill.common.config.images import ImagesConfig
from tidemill.common.images.families import FAMILIES
from tidemill.common.images.processor import load_processor


def test_each_proven_family_has_a_small_model() -> None:
    assert set(SMALL_FAMILIES) == set(FAMILIES)


@pytest.mark.parametrize("family", SMALL_FAMILIES)
def test_a_small_model_is_saved_under_the_names_that_it_is_loaded_from(tmp_path: Path, family: str) -> None:
    make_vision_model(tmp_path, family)
    model, info = AutoModelForImageTextToText.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        in_files = set(file.keys())
    tied = set(model.all_tied_weights_keys)
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    assert set(revert_weight_conversion(model, state)) == in_files


@pytest.mark.parametrize("family", SMALL_FAMILIES)
def test_its_chat_template_writes_a_picture_as_one_placeholder(tmp_path: Path, family: str) -> None:
    make_vision_model(tmp_path, family)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    processor = load_processor(tmp_path, ImagesConfig.model_validate({}))
    parts = [{"type": "image"}, {"type": "text", "text": "how many?"}]
    message = {"role": "user", "content": parts}
    ids = tokenizer.apply_chat_template([message], add_generation_prompt=True, return_dict=True)["input_ids"]
    assert ids.count(processor.placeholder_id) == 1
    assert torch.tensor(ids).max() < len(tokenizer)
    text = tokenizer.decode(ids)
    assert SMALL_FAMILIES[family].picture_text + "how many?" in text

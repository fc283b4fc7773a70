"""A model folder that cannot be used is a ConfigError that says what is wrong, never a traceback."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.models import tiny_model
from tidemill.common.config.run import ModelConfig
from tidemill.common.errors import ConfigError
from tidemill.services.rollout.engines.model import load_model, open_model


def model_config(path: Path | str, **changes: Any) -> ModelConfig:
    return ModelConfig.model_validate({"path": str(path), "max_model_len": 64} | changes)


def test_a_usable_folder_gives_tokenizer_end_tokens_and_limits(tmp_path: Path) -> None:
    folder = open_model(model_config(tiny_model(tmp_path, eos_token_id=[1, 5])))
    assert (folder.eos_ids, folder.vocab_size, folder.max_model_len) == ((1, 5), 32, 64)
    assert folder.decode([3, 4, 1]) == "w0 w1"


def test_end_tokens_of_generation_config_and_tokenizer_are_joined(tmp_path: Path) -> None:
    tiny_model(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert open_model(model_config(tmp_path)).eos_ids == (1, 7, 9)


@pytest.mark.parametrize("path", ["/no/such/folder", "./nowhere", "a/b/c"])
def test_a_missing_folder(path: str) -> None:
    with pytest.raises(ConfigError, match=r"is not a folder; give the folder"):
        open_model(model_config(path))


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        open_model(model_config(tmp_path))


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    tiny_model(tmp_path)
    for file in tmp_path.glob("token*"):
        file.unlink()
    with pytest.raises(ConfigError, match="no usable tokenizer"):
        open_model(model_config(tmp_path))


def test_a_broken_configuration(tmp_path: Path) -> None:
    tiny_model(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(ConfigError, match="its configuration cannot be read"):
        open_model(model_config(tmp_path))


def test_a_context_that_is_too_short(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_model_len is 129, but .* context of 128"):
        open_model(model_config(tiny_model(tmp_path), max_model_len=129))


def test_a_model_that_could_never_stop(tmp_path: Path) -> None:
    tiny_model(tmp_path, eos_token_id=None)
    tokenizer_config = tmp_path / "tokenizer_config.json"
    fields = json.loads(tokenizer_config.read_text())
    del fields["eos_token"]
    tokenizer_config.write_text(json.dumps(fields))
    with pytest.raises(ConfigError, match="names no end-of-sequence token"):
        open_model(model_config(tmp_path))


def test_a_folder_whose_weights_are_torn_or_gone(tmp_path: Path) -> None:
    tiny_model(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_model(model_config(tmp_path), "cpu")
    weights.unlink()
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_model(model_config(tmp_path), "cpu")


def test_weights_of_another_model(tmp_path: Path) -> None:
    tiny_model(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_hidden_layers": 3}))
    with pytest.raises(ConfigError, match="lacks 9 of the model's weights"):
        load_model(model_config(tmp_path), "cpu")


def test_a_device_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="on device cuda:99"):
        load_model(model_config(tiny_model(tmp_path)), "cuda:99")

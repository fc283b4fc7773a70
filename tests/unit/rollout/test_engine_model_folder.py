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


def test_a_usable_folder_gives_tokenizer_limits_and_the_end_tokens_of_both_configs(tmp_path: Path) -> None:
    folder = open_model(model_config(tiny_model(tmp_path, eos_token_id=[1, 5])))
    assert (folder.eos_ids, folder.vocab_size, folder.max_model_len) == ((1, 5), 32, 64)
    assert folder.reader.text_of([3, 4, 1]) == "w0 w1"
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert open_model(model_config(tmp_path)).eos_ids == (1, 7, 9)


def nothing(folder: Path) -> None:
    """A folder without a model."""


def no_tokenizer(folder: Path) -> None:
    tiny_model(folder)
    for file in folder.glob("token*"):
        file.unlink()


def unknown_model(folder: Path) -> None:
    tiny_model(folder)
    (folder / "config.json").write_text('{"model_type": "no-such-model"}')


def never_stops(folder: Path) -> None:
    tiny_model(folder, eos_token_id=None)
    tokenizer_config = folder / "tokenizer_config.json"
    fields = json.loads(tokenizer_config.read_text())
    del fields["eos_token"]
    tokenizer_config.write_text(json.dumps(fields))


@pytest.mark.parametrize(
    ("make", "changes", "said"),
    [
        (nothing, {"path": "/no/such/folder"}, "is not a folder"),
        (nothing, {"path": "a/b/c"}, "is not a folder"),
        (nothing, {}, "config.json"),
        (no_tokenizer, {}, "tokenizer"),
        (unknown_model, {}, "configuration"),
        (tiny_model, {"max_model_len": 129}, "model.max_model_len"),
        (never_stops, {}, "eos_token_id"),
    ],
)
def test_a_folder_that_cannot_be_used_is_refused_with_its_cause(make, changes, said, tmp_path):
    make(tmp_path)
    with pytest.raises(ConfigError, match=said):
        open_model(model_config(**{"path": tmp_path} | changes))


def torn(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])


def gone(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def of_another_model(folder: Path) -> None:
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_hidden_layers": 3}))


@pytest.mark.parametrize(
    ("fault", "said"),
    [(torn, "cannot be loaded"), (gone, "cannot be loaded"), (of_another_model, "lacks 9 of")],
)
def test_weights_that_cannot_be_loaded_are_refused_with_their_cause(fault, said, tmp_path):
    tiny_model(tmp_path)
    fault(tmp_path)
    with pytest.raises(ConfigError, match=said):
        load_model(model_config(tmp_path))

"""Fields of a model's config.json that a run replaces, and rotary positions, which are decided once."""

import json
import shutil
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tidemill.common.config import ModelConfig
from tidemill.common.errors import ConfigError
from tidemill.common.process.programs import ROOT
from tidemill.common.run.model_config import for_vllm, freeze_rope, overridden, with_overrides
from tidemill.services.console.check.model_folder import inspect_model
from tidemill.services.rollout.engines.model import load_model as load_for_engine
from tidemill.services.rollout.engines.model import open_model
from tidemill.services.trainer.policy.model_loading import load_model

MODEL = ROOT / "examples" / "arith" / "model"


LONGER: dict[str, Any] = {
    "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    "max_position_embeddings": 512,
}


IDS = torch.arange(3, 40)[None]


def model(**fields: Any) -> ModelConfig:
    return ModelConfig(**({"path": str(MODEL)} | fields))


@pytest.mark.parametrize(
    ("tree", "overrides", "expected"),
    [
        ({"a": 1, "b": 2}, {"a": 3}, {"a": 3, "b": 2}),
        ({"part": {"a": 1, "b": 2}}, {"part": {"b": 3}}, {"part": {"a": 1, "b": 3}}),
        ({"rope_theta": 1e6, "rope_scaling": None}, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
         {"rope_theta": 1e6, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
        ({"rope_parameters": {"rope_theta": 5.0, "rope_type": "yarn", "factor": 9.0}},
         {"rope_scaling": {"rope_type": "linear"}},
         {"rope_parameters": {"rope_theta": 5.0, "rope_type": "linear"}}),
        ({"rope_parameters": {"rope_theta": 5.0, "rope_type": "yarn"}}, {"rope_scaling": None},
         {"rope_parameters": {"rope_theta": 5.0, "rope_type": "default"}}),
    ],
)  # fmt: skip
def test_fields_are_replaced_one_by_one(tree, overrides, expected):
    assert overridden(tree, overrides) == expected


def test_trainer_and_engine_have_the_model_of_an_edited_config(tmp_path):
    """The reference is the same folder with a config.json that was edited by hand."""
    shutil.copytree(MODEL, tmp_path / "edited")
    file = tmp_path / "edited" / "config.json"
    tree = json.loads(file.read_text())
    tree["rope_parameters"] |= {"rope_type": "linear", "factor": 4.0}
    file.write_text(json.dumps(tree | {"max_position_embeddings": 512}))
    edited = model(path=str(tmp_path / "edited"), max_model_len=512)
    changed = model(overrides=LONGER, max_model_len=512)
    with torch.inference_mode():
        expected = load_model(edited, torch.device("cpu"))(IDS).logits
        trained = load_model(changed, torch.device("cpu"))(IDS).logits
        sampled = load_for_engine(changed)(IDS).logits
        plain = load_model(model(max_model_len=64), torch.device("cpu"))(IDS).logits
    assert torch.equal(trained, expected)
    assert torch.allclose(sampled, expected, atol=1e-5)
    assert not torch.allclose(plain, expected, atol=1e-2)


def test_the_context_is_that_of_the_overrides():
    assert open_model(model(overrides=LONGER, max_model_len=512)).max_model_len == 512
    assert inspect_model(model(overrides=LONGER, max_model_len=512)).context == 512
    for look in (open_model, inspect_model):
        with pytest.raises(ConfigError, match="context of 128"):
            look(model(max_model_len=512))


def test_a_field_that_the_model_lacks_is_refused():
    with pytest.raises(ConfigError, match=r"model.overrides: rope_scalling is no field"):
        load_model(model(overrides={"rope_scalling": {}}, max_model_len=64), torch.device("cpu"))
    with pytest.raises(ConfigError, match="is no field"):
        open_model(model(overrides={"max_positions": 1}, max_model_len=64))


@pytest.mark.parametrize("name", ["dtype", "model_type"])
def test_what_makes_it_another_model_is_refused(name):
    with pytest.raises(ValueError, match=f"{name} cannot be overridden"):
        model(overrides={name: "x"})


def test_vllm_gets_whole_values():
    from transformers import AutoConfig

    changed = with_overrides(AutoConfig.from_pretrained(MODEL), model(overrides=LONGER))
    assert for_vllm(changed, LONGER) == {
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_theta": 100.0, "rope_type": "linear", "factor": 4.0},
    }


LONGROPE = {
    "rope_type": "longrope", "short_factor": [1.0, 1.1], "long_factor": [2.0, 4.0], "short_mscale": 1.1,
    "long_mscale": 1.3, "original_max_position_embeddings": 32,
}  # fmt: skip


class Config(SimpleNamespace):
    """As transformers has them; of a model of text alone."""

    def get_text_config(self) -> "Config":
        return self


def config_of(parameters: Any, context: int = 128) -> Config:
    return Config(rope_parameters=parameters, max_position_embeddings=context)


@pytest.mark.parametrize(("max_model_len", "chosen"), [(32, "short"), (33, "long")])
def test_one_set_of_factors_serves_short_and_long_sequences(max_model_len, chosen):
    config = config_of(dict(LONGROPE))
    frozen = freeze_rope(config, max_model_len).rope_parameters
    for name in ("factor", "mscale"):
        assert frozen[f"short_{name}"] == frozen[f"long_{name}"] == LONGROPE[f"{chosen}_{name}"]
    assert config.rope_parameters == LONGROPE, "what is published keeps both"


def test_each_kind_of_layer_has_its_own():
    parameters = {"full_attention": dict(LONGROPE), "sliding_attention": {"rope_type": "default"}}
    frozen = freeze_rope(config_of(parameters), 64).rope_parameters
    assert frozen["full_attention"]["short_factor"] == LONGROPE["long_factor"]
    assert frozen["sliding_attention"] == {"rope_type": "default"}


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 32},
        {"rope_type": "dynamic", "factor": 2.0, "max_trained_positions": 32},
    ],
)
def test_dynamic_scaling_is_refused_beyond_the_original_context(parameters):
    config = config_of(parameters)
    assert freeze_rope(config, 32).rope_parameters == parameters
    with pytest.raises(ConfigError):
        freeze_rope(config, 33)


@pytest.mark.parametrize(
    "parameters", [None, {}, {"rope_type": "default"}, {"rope_type": "linear", "factor": 2.0}]
)
def test_others_stay_as_they_are(parameters):
    assert freeze_rope(config_of(parameters), 128).rope_parameters == parameters

"""Rotary positions are decided once, by the longest sequence that a run may have."""

from types import SimpleNamespace
from typing import Any

import pytest

from tidemill.common.errors import ConfigError
from tidemill.common.run.model_config import freeze_rope

LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1],
    "long_factor": [2.0, 4.0],
    "short_mscale": 1.1,
    "long_mscale": 1.3,
    "original_max_position_embeddings": 32,
}


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

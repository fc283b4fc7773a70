"""Models whose numbers are not finite: which weight it is, and what to do."""

import math

import pytest
import torch

from tests.support.architectures import make_model
from tests.support.models import make_policy
from tidemill.common.errors import ConfigError
from tidemill.services.trainer.policy.finite import find_broken_weights


@pytest.mark.parametrize("kind", ["Llama", "Mixtral"])
@pytest.mark.parametrize(
    ("number", "counts"), [(math.nan, "2 NaN"), (math.inf, "2 infinite"), (-math.inf, "2 infinite")]
)
def test_a_broken_weight_of_one_layer_is_named(kind, number, counts):
    model = make_model(kind)
    name, weight = next(pair for pair in model.named_parameters() if "layers.1." in pair[0])
    weight.data.view(-1)[1:3] = number
    with pytest.raises(ConfigError) as caught:
        make_policy(model=model, replays_routes=kind == "Mixtral")
    message = str(caught.value)
    assert f"{name} ({counts} of {weight.numel():,})" in message
    assert message.startswith("model.path: ") and "max_model_len" not in message


def test_a_model_of_nan_is_named_by_its_first_weights_and_their_number():
    model = make_model("Llama")
    for weight in model.parameters():
        weight.data.fill_(math.nan)
    count = len(list(model.parameters()))
    with pytest.raises(ConfigError, match=f"and {count - 3} more. Logprobs would be NaN"):
        make_policy(model=model)


def test_a_head_that_no_hidden_state_shows_is_looked_at_too():
    model = make_model("Llama", tie_word_embeddings=False)
    model.lm_head.weight.data[0, 0] = math.nan
    with pytest.raises(ConfigError, match=r"lm_head\.weight"):
        make_policy(model=model)


def test_finite_weights_that_lead_to_numbers_that_are_not_are_told_apart():
    model = make_model("Llama")
    model.model.norm.weight.data.fill_(3e38)
    with pytest.raises(
        ConfigError, match=r"weights of the model are finite, and its .* model\.dtype: float32"
    ):
        make_policy(model=model)


def test_whole_numbers_and_empty_weights_are_no_problem():
    weights = [
        ("a", torch.ones(2, dtype=torch.int64)),
        ("b", torch.zeros(0)),
        ("c", torch.tensor([1.0, math.inf])),
    ]
    assert find_broken_weights(weights) == ["c (1 infinite of 2)"]
    assert find_broken_weights([]) == []

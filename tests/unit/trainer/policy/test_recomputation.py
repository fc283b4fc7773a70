"""Gradient checkpointing saves memory and changes no number, whatever a model does at random in training."""

import pytest
import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from tests.support.architectures import make_model
from tests.support.models import (
    accumulate_all,
    assert_all_close,
    gradients_of,
    logprobs_of,
    make_policy,
    make_samples,
    one_batch,
)
from tidemill.common.errors import ConfigError
from tidemill.services.trainer.policy.model_loading import recompute_layers

AT_RANDOM = {
    "Llama": {"attention_dropout": 0.5},
    "Mixtral": {"router_jitter_noise": 0.3},
    "Phimoe": {"router_jitter_noise": 0.3, "input_jitter_noise": 0.3},
    "OPT": {"layerdrop": 0.5, "dropout": 0.5, "num_hidden_layers": 4},
    "Gemma3": {},  # in training it asks for the types of its tokens
    "Gemma4": {},  # its layers share keys and values with later ones
    "GptOss": {"attention_dropout": 0.5},
}


@pytest.mark.parametrize("family", AT_RANDOM)
def test_logprobs_and_gradients_are_those_without_it_in_every_pass(family):
    samples = make_samples(8)
    plain = make_policy(model=make_model(family, **AT_RANDOM[family]))
    recomputed = make_policy(model=make_model(family, **AT_RANDOM[family]), gradient_checkpointing=True)
    expected = logprobs_of(plain, samples)
    for _ in range(2):
        assert_all_close(logprobs_of(recomputed, samples), expected, 0.0)
    gradients = []
    for policy in (plain, recomputed, recomputed):
        policy.zero()
        metrics = accumulate_all(policy, [one_batch(samples)])
        gradients.append((gradients_of(policy).clone(), metrics))
    for gradient, metrics in gradients[1:]:
        assert torch.equal(gradient, gradients[0][0])
        assert metrics == gradients[0][1]
    assert not recomputed._model.training


@pytest.mark.parametrize("family", ["Llama", "Gemma4"])
def test_each_layer_is_run_again_for_its_gradient_and_only_then(family):
    calls: list[str] = []
    model = make_model(family)
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            inner = next(module for module in layer.children() if isinstance(module, nn.Module))
            inner.register_forward_hook(lambda *_: calls.append("layer"))
    policy = make_policy(model=model, gradient_checkpointing=True)
    num_layers = model.config.get_text_config().num_hidden_layers
    calls.clear()
    logprobs_of(policy, make_samples(1))
    assert len(calls) == num_layers
    calls.clear()
    policy.accumulate(one_batch(make_samples(1)))
    assert len(calls) == 2 * num_layers


def test_a_model_without_layers_to_recompute_is_told_so():
    model = make_model("Llama")
    model.model.layers = nn.ModuleList()
    with pytest.raises(ConfigError, match=r"trainer\.gradient_checkpointing: .* LlamaForCausalLM"):
        recompute_layers(model)

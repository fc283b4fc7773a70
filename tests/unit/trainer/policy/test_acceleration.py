"""What spares memory or time changes no number; what cannot be had is said, and never half applied."""

from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import MagicMock

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
from tidemill.common.config.trainer import TrainerConfig
from tidemill.common.errors import ConfigError
from tidemill.services.trainer.policy.liger import wants_liger
from tidemill.services.trainer.policy.model_loading import recompute_layers, use_device
from tidemill.services.trainer.policy.offload import _Lanes

CPU = torch.device("cpu")
CUDA = torch.device("cuda")


def test_liger_is_left_out_where_it_cannot_run_and_refused_where_it_was_demanded(monkeypatch):
    automatic = TrainerConfig()
    wanted = TrainerConfig(liger="on")
    monkeypatch.setattr("importlib.util.find_spec", lambda _: "found")
    assert wants_liger(automatic, CUDA)
    assert not wants_liger(automatic, CPU)
    assert not wants_liger(TrainerConfig(liger="off"), CUDA)
    assert not wants_liger(TrainerConfig(compile=True), CUDA)
    with pytest.raises(ConfigError, match=r"CUDA GPUs, and the model is on cpu.*auto or off"):
        wants_liger(wanted, CPU)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert not wants_liger(automatic, CUDA)
    with pytest.raises(ConfigError, match=r"pip install 'tidemill\[liger\]'"):
        wants_liger(wanted, CUDA)


@pytest.mark.parametrize(("name", "expected"), [("cuda:1", 1), ("cuda", None), ("cpu", None)])
def test_a_device_that_is_named_is_the_threads_own(monkeypatch, name, expected):
    """Torch's stager of checkpoints waits for that one, whatever device a tensor is on."""
    used: list[int | None] = [None]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: used.append(device.index))
    assert use_device(name) == torch.device(name)
    assert used[-1] == expected


def test_moments_pass_by_the_stream_of_their_own_device(monkeypatch):
    """Not by that of the thread's device: the update would be another one's."""
    asked: list[torch.device] = []
    device = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: MagicMock())
    monkeypatch.setattr(torch.cuda, "Event", MagicMock)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: asked.append(device) or MagicMock())
    like = SimpleNamespace(is_cuda=True, device=device, new_empty=torch.empty)
    with _Lanes(like, 4).passing([torch.ones(3), torch.ones(3)]) as moments:
        assert [moment.tolist() for moment in moments] == [[1.0] * 3] * 2
    assert asked == [device] * 3


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

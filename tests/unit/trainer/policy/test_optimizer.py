"""Learning rate, clipping and division of gradients, weight decay on matrices only, state without pickle."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.architectures import FAMILIES, make_model
from tidemill.common.config.trainer import OptimizerConfig
from tidemill.common.errors import ConfigError
from tidemill.services.trainer.policy.offload import OffloadedAdamW
from tidemill.services.trainer.policy.optimizer import (
    build_optimizer,
    finish_gradients,
    is_matrix,
    learning_rate,
    load_optimizer,
)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [0.8, 0.8, 0.8]),
        # (n + 1) / (3 + 1) of 0.8, then the peak
        ({"warmup_steps": 3}, [0.2, 0.4, 0.6, 0.8, 0.8]),
        # 1 / 2 of 0.8; then x = 0, 1/4, 2/4, 3/4
        ({"warmup_steps": 1, "schedule": "linear"}, [0.4, 0.8, 0.6, 0.4, 0.2]),
        # x = 0, 1/4, 1/2, 3/4: 0.4 * (1 + cos(pi x))
        ({"schedule": "cosine"}, [0.8, 0.4 * (1 + math.sqrt(0.5)), 0.4, 0.4 * (1 - math.sqrt(0.5))]),
    ],
)
def test_the_rate_warms_up_and_decays_as_its_schedule_says(fields, expected):
    config = OptimizerConfig(lr=0.8, **fields)
    num_updates = len(expected)
    rates = [learning_rate(config, update, num_updates) for update in range(num_updates)]
    assert rates == pytest.approx(expected)
    last = 0.0 if config.schedule != "constant" else 0.8
    assert learning_rate(config, num_updates + 5, num_updates) == pytest.approx(last)


def named(*gradients: list[float]) -> list[tuple[str, nn.Parameter]]:
    parameters = []
    for i, gradient in enumerate(gradients):
        parameter = nn.Parameter(torch.zeros(len(gradient)))
        parameter.grad = torch.tensor(gradient)
        parameters.append((f"p{i}", parameter))
    return parameters


def test_gradients_are_divided_and_clipped_over_all_parameters():
    # norm of (6, 8, 0) is 10; divided by 2 it is 5; clipped to 1 the gradients are (0.6, 0.8, 0)
    parameters = named([6.0], [8.0, 0.0])
    assert finish_gradients(parameters, denominator=2.0, max_norm=1.0) == pytest.approx(5.0)
    assert parameters[0][1].grad.tolist() == pytest.approx([0.6])
    assert parameters[1][1].grad.tolist() == pytest.approx([0.8, 0.0])
    below = named([6.0], [8.0])
    assert finish_gradients(below, denominator=20.0, max_norm=1.0) == pytest.approx(0.5)
    assert below[0][1].grad.tolist() == pytest.approx([0.3]), "divided alone"


def test_no_gradient_and_zero_gradients_have_norm_zero():
    assert finish_gradients([("p", nn.Parameter(torch.zeros(2)))], 1.0, 1.0) == 0.0
    parameters = named([0.0, 0.0])
    assert finish_gradients(parameters, 2.0, 1.0) == 0.0
    assert parameters[0][1].grad.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_reported_and_left_alone(bad):
    parameters = named([1.0], [bad])
    assert not math.isfinite(finish_gradients(parameters, 2.0, 1.0))
    assert parameters[0][1].grad.tolist() == [1.0]


def held(tensors: dict[str, torch.Tensor]) -> Any:
    """Tensors in memory, in place of those of a folder."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return SimpleNamespace(shapes=shapes, read=lambda name: tensors[name])


class Pinned(TorchDispatchMode):
    """Notes the shapes of what is made in page-locked memory."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if (kwargs or {}).get("pin_memory"):
            self.shapes.append(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))


def test_moments_beside_a_gpu_are_page_locked_after_a_resume_too():
    with FakeTensorMode():  # tensors without data, which may be on a GPU that is not there
        parameters = [("p", nn.Parameter(torch.zeros(3, 2, device="cuda")))]
        optimizer = build_optimizer(parameters, OptimizerConfig(), kind=OffloadedAdamW)
        moments = {f"optimizer.p.{name}": torch.zeros(3, 2) for name in ("exp_avg", "exp_avg_sq")}
        with Pinned() as pinned:
            load_optimizer(optimizer, parameters, held(moments))
    assert pinned.shapes == [(3, 2), (3, 2)]
    assert {moment.device.type for moment in optimizer.state[parameters[0][1]].values()} == {"cpu"}


@pytest.mark.parametrize("key", ["other.exp_avg", "p.exp_avg"])
def test_state_of_another_model_is_refused(key):
    parameters = [("p", nn.Parameter(torch.zeros(2)))]
    optimizer = build_optimizer(parameters, OptimizerConfig())
    with pytest.raises(ConfigError, match=key):
        load_optimizer(optimizer, parameters, held({f"optimizer.{key}": torch.zeros(3)}))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_decays_is_decided_by_what_a_parameter_is(family):
    """Held against the kind of module that owns it: transformers' own names, looked up by hand."""
    model = make_model(family)
    owners = dict(model.named_modules())
    (decayed, *others) = build_optimizer(
        list(model.named_parameters()), OptimizerConfig(weight_decay=0.1)
    ).param_groups
    assert decayed["weight_decay"] == 0.1 and [group["weight_decay"] for group in others] == [0.0]
    ids = {id(parameter) for parameter in decayed["params"]}
    for name, parameter in model.named_parameters():
        path, _, last = name.rpartition(".")
        kind = type(owners[path]).__name__
        is_small = parameter.ndim < 2 or "Norm" in kind or last.endswith("bias") or last == "A_log"
        assert (id(parameter) in ids) is not is_small, (name, kind)


@pytest.mark.parametrize(
    ("name", "shape", "decays"),
    [
        ("model.layers.0.mlp.experts.gate_up_proj_bias", (4, 96), False),  # gpt-oss
        ("model.layers.0.temporal_block.rg_lru.input_gate_bias", (4, 8), False),  # RecurrentGemma
        ("model.layers.0.temporal_block.rg_lru.input_gate_weight", (4, 8, 8), True),
        ("model.layers.0.self_attn.q_norm.weight", (4, 8), False),  # Cohere: a row for each head
        ("transformer.h.0.ln_1.weight", (4, 8), False),
        ("model.layers.0.mixer.A_log", (48, 4), False),  # Mamba
        ("rwkv.blocks.0.attention.time_mix_key", (1, 1, 32), False),
        ("model.layers.0.mlp.experts.down_proj", (4, 48, 32), True),
        ("model.layers.0.mlp.norm_free.linear.weight", (4, 8), True),
        ("model.layers.0.self_attn.q_proj.lora_A.default.weight", (8, 32), True),
        ("value_head.weight", (1, 32), True),
        ("model.norm.weight", (32,), False),
    ],
)
def test_matrices_by_their_names(name, shape, decays):
    assert is_matrix(name, torch.zeros(shape)) is decays

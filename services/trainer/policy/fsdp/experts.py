"""Experts of a layer on several ranks: each keeps some of them, and tokens go where their experts are.

transformers sends each token to the ranks of its experts, and their outputs back (all to all). So no rank
gathers all experts of a layer, but only its own, which may be sharded over the ranks that keep the same ones.
Their gradients are sums over the tokens of all ranks, like those of all weights. Guarantee: a rank's part of
a tensor of experts is consecutive rows (`weights/shadow.held_rows`).
"""

from collections.abc import Callable
from math import gcd
from typing import Any

import torch
from torch import nn
from torch.distributed import get_world_size
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

try:
    # Since transformers 5.21: the function wants a mesh in place of None, and names in place of wildcards.
    from transformers.distributed.expert_parallel import apply_expert_parallelism
    from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard

    TAKES_FULL_NAMES = True
except ImportError:
    from transformers.distributed.tensor_parallel import (
        apply_expert_parallelism,
        replace_layer_number_by_wildcard,
    )

    TAKES_FULL_NAMES = False

from tidemill.common.errors import ConfigError

SENDS = "ep_dispatch_experts"
SPLIT = "grouped_gemm"
"""In transformers' plans: a module that sends tokens to their experts, and a tensor with a row for each."""


def expert_weights(model: PreTrainedModel) -> list[nn.Parameter]:
    """The tensors with a row for each expert, where transformers can send tokens to them; else none."""
    plan = model.ep_plan
    if SENDS not in plan.values() or not set(plan.values()) <= {SENDS, SPLIT}:
        return []
    named = model.named_parameters()
    return [weight for name, weight in named if plan.get(replace_layer_number_by_wildcard(name)) == SPLIT]


def split_experts(model: PreTrainedModel, mesh: DeviceMesh) -> Callable[[nn.Parameter], Any]:
    """Give each rank along the mesh's last axis its experts, in place, before all else is sharded. Returns
    what `fully_shard` asks of each parameter: ranks along the other axes share the same experts.

    Raises:
        ConfigError: there are no experts to which transformers sends tokens, or no even parts of them.
    """
    # `fully_shard` documents the first, and torch exports neither.
    from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult
    from torch.distributed.fsdp._fully_shard._fsdp_init import _get_mesh_info

    dimensions = mesh.mesh_dim_names or ()
    *others, last = dimensions
    _check_experts(model, mesh[last].size())
    if TAKES_FULL_NAMES:
        apply_expert_parallelism(model, mesh[last], _mesh_of_one(mesh.device_type), _named_plan(model))
    else:
        # Its type leaves out that there may be no tensor parallelism.
        apply_expert_parallelism(model, mesh[last], None, model.ep_plan)
    for module in model.modules():
        if any(isinstance(weight, DTensor) for weight in module.parameters(recurse=False)):
            # How many tokens come is known in each pass only.
            module.forward = torch.compiler.disable(module.forward)
    info: Any = _get_mesh_info(mesh[tuple(others)])
    # One object for all of them: `fully_shard` gathers parameters together that have the same one.
    shared = ShardPlacementResult(None, info)
    return lambda weight: shared if isinstance(weight, DTensor) else None


def _named_plan(model: PreTrainedModel) -> dict[str, str]:
    """The model's plan for its experts, with the name of each module and parameter.

    A model's own plan names layers by a wildcard: `model.layers.*.mlp.experts` becomes
    `model.layers.0.mlp.experts` and so on.
    """
    # Tensors come first: a module that sends tokens reads how many experts are left on this rank.
    names = [name for name, _ in model.named_parameters()]
    names += [name for name, _ in model.named_modules()]
    styles = {name: model.ep_plan.get(replace_layer_number_by_wildcard(name)) for name in names}
    return {name: style for name, style in styles.items() if style is not None}


def _mesh_of_one(device_type: str) -> DeviceMesh:
    """This rank alone: the ranks that hold the same tokens. Every rank must call it."""
    return init_device_mesh(device_type, (get_world_size(), 1), mesh_dim_names=("rank", "alone"))["alone"]


def _check_experts(model: PreTrainedModel, size: int) -> None:
    counts = {len(weight) for weight in expert_weights(model)}
    if not counts:
        raise ConfigError(
            f"trainer.expert_ranks is {size}, and transformers sends no tokens to experts in a "
            f"{model.config.model_type}; set it to 1"
        )
    if any(count % size for count in counts):
        raise ConfigError(
            f"trainer.expert_ranks is {size}, which does not divide the experts of the model's layers "
            f"({', '.join(map(str, sorted(counts)))}); take {gcd(size, *counts)}"
        )

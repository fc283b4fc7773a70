"""Where a forward pass in half precision rounds: in the same places on one rank and on several.

Guarantee, under autocast: every weight is read in the dtype of the products, as engines have it and as ranks
gather it; what layers pass on to each other, and the head's input, is float32. If that were rounded too,
logprobs would be farther from the engine's, and gradients half as far again from their true ones.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

ADDED_IN_PLACE = ("DbrxExpertGLU",)
"""Modules whose output their model adds to the float32 of the layer in place, which takes no other dtype."""


class RoundsWeights(nn.Module):
    """A module whose parameters are read in autocast's dtype, where it is on; gradients go to its own.

    Autocast itself casts what it knows as a matrix product: neither norms and embeddings, nor the grouped
    products of experts.
    """

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        # No computation uses a shard; FSDP reads it to see whether it is still the parameter that it knows.
        if not isinstance(value, nn.Parameter) or isinstance(value, DTensor):
            return value
        dtype = autocast_dtype(value)
        if dtype is None:
            return value
        rounded = value.to(dtype)
        # Kernels of norms want vectors in the dtype of their input.
        return rounded if rounded.ndim > 1 else rounded.float()


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """Autocast's dtype where it is on for the tensor's device; None elsewhere and on the meta device."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else None


@cache
def _rounding(kind: Any) -> Any:
    return kind if issubclass(kind, RoundsWeights) else type(kind.__name__, (RoundsWeights, kind), {})


def round_alike(model: PreTrainedModel) -> None:
    """Have the model, which may be sharded, round as this module says."""
    for module in model.modules():
        kind: Any = type(module)
        if module._parameters and kind is not nn.Linear:
            module.__class__ = _rounding(kind)
    added = [module for module in model.modules() if type(module).__name__ in ADDED_IN_PLACE]
    for wide in (model.get_input_embeddings(), *added):
        if _widen not in wide._forward_hooks.values():
            wide.register_forward_hook(_widen)


def _widen(_: nn.Module, __: Any, output: Tensor) -> Tensor:
    return output if autocast_dtype(output) is None else output.float()

"""Experts of mixture models in the compute dtype.

Autocast does not reach grouped matrix products: with float32 master weights they would run in float32, at an
eighth of the speed.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward


class CastWeights:
    """A module of experts, whose parameters are read in another dtype; gradients go to its own."""

    def __init__(self, experts: nn.Module, dtype: torch.dtype) -> None:
        self._experts, self._dtype = experts, dtype

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._experts, name)
        return value.to(self._dtype) if isinstance(value, nn.Parameter) else value


def experts_forward(experts: nn.Module, hidden_NH: Tensor, *routing: Tensor) -> Tensor:
    """The experts' weighted outputs. Shape [N, H], in the dtype of the hidden states."""
    kind = hidden_NH.device.type
    if torch.is_autocast_enabled(kind):
        experts = CastWeights(experts, torch.get_autocast_dtype(kind))  # type: ignore[assignment]
    output_NH: Tensor = grouped_mm_experts_forward(experts, hidden_NH, *routing)
    return output_NH


def follow_autocast() -> None:
    """Have transformers' grouped experts use weights in autocast's dtype, where it is on."""
    ExpertsInterface.register("grouped_mm", experts_forward)

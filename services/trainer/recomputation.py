"""Gradient checkpointing: a layer's activations are computed again in the backward pass, not kept.

Guarantee: it changes memory and time, never a number. Transformers checkpoints in training mode only, which
also turns on whatever else a model does at random there (router jitter, dropped layers, dropout), under as
many names as there are models. So the model stays in eval mode, as the engine's is, and its layers are
wrapped here.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from common.errors import ConfigError


def recompute_layers(model: PreTrainedModel) -> None:
    """Wrap the layers that transformers would checkpoint, in place.

    Raises:
        ConfigError: the model has no such layers.
    """
    layers = _outermost(model)
    if not layers:
        raise ConfigError(
            f"trainer.gradient_checkpointing: transformers marks no layers of {type(model).__name__} for it; "
            "leave it out, and lower trainer.micro_batch_tokens if memory is short"
        )
    for layer in layers:
        # On the instance, inside the hooks of `__call__`: a sharded layer is gathered once for both passes.
        layer.forward = _recomputed(layer.forward)


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # Nothing is random in eval mode, so there is no state of a generator to bring back.
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return recomputed


def _outermost(module: nn.Module) -> list[nn.Module]:
    """Layers made for it that are in no other such layer."""
    if isinstance(module, GradientCheckpointingLayer):
        return [module]
    return [layer for child in module.children() for layer in _outermost(child)]

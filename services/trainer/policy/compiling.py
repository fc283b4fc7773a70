"""torch.compile for the layers of a model, tried before anything is trained with it.

A compiler that fails leaves the model as it was. What is tried is a layer of this model, with its kernels and
in the dtype of training: a compiler that takes simpler code may still fail at that.
"""

from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from typing import Any

import structlog
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import PreTrainedModel

from tidemill.services.trainer.policy.layers import body_of, layers_of, tower_of
from tidemill.services.trainer.policy.options import OptionSettings, PolicyOption
from tidemill.services.trainer.policy.precision import round_alike

log = structlog.get_logger(__name__)

Backend = str | Callable[..., Any]


class Compiler(PolicyOption):
    """`trainer.compile`."""

    def __init__(self, settings: OptionSettings) -> None:
        self._settings = settings

    def change_model(self, model: PreTrainedModel) -> None:
        compile_model(model, self._settings.dtype, device=self._settings.device)


def compile_model(
    model: PreTrainedModel,
    dtype: torch.dtype = torch.float32,
    backend: Backend = "inductor",
    device: torch.device | None = None,
) -> bool:
    """Compile the model's layers that read text, for any shape, or its body where it names none; the head
    works by chunks and stays as it is, and so does a tower, whose layers loop over pictures.

    A small forward and backward pass is tried at once: where the compiler fails, for want of a C++ compiler
    for instance, the model stays as it was, a warning says why, and the result is False. For a model whose
    weights will be on `device`, and are not yet, a copy of one layer is tried there.
    """
    device = device or model.device
    # All layers have the same code, so that it is compiled once; and ranks shard them one by one.
    of_tower = {layer for section in tower_of(model) for layer in section.modules()}
    parts = [layer for layer in layers_of(model) if layer not in of_tower] or [body_of(model)]
    is_cast = dtype not in (torch.float32, torch.float64)
    if is_cast:
        round_alike(model)
    try:
        with torch.autocast(device.type, dtype=dtype if is_cast else None, enabled=is_cast):
            if model.device.type == "meta":
                _try_copy(model, parts[0], device, backend)
            for layer_part in parts:
                layer_part.compile(backend=backend, dynamic=True)
            if model.device.type != "meta":
                _output_of(model, device).sum().backward()
    except Exception as error:  # a defect of the compiler has any type, AssertionError for one
        for layer_part in parts:
            # torch has no call that undoes `compile`; its own `__call__` looks here.
            layer_part._compiled_call_impl = None
        reason = " ".join(str(error).split())[:300]
        log.warning("torch.compile does not work here, training without it", reason=reason)
        return False
    finally:
        model.zero_grad(set_to_none=True)
    return True


def _output_of(model: PreTrainedModel, device: torch.device, **named: Any) -> Tensor:
    """The last hidden states of two short rows."""
    ids_BT = torch.arange(1, 9, device=device)[None].expand(2, -1) % model.config.get_text_config().vocab_size
    hidden: Tensor = body_of(model)(input_ids=ids_BT, use_cache=False, **named).last_hidden_state
    return hidden


def _try_copy(model: PreTrainedModel, layer: nn.Module, device: torch.device, backend: Backend) -> None:
    """Compile and run a copy of the layer, with zeros for weights, called as the model calls it."""
    args, named = _arguments_of(model, layer)
    copy = deepcopy(layer).to_empty(device=device)
    with torch.no_grad():
        for tensor in (*copy.parameters(), *copy.buffers()):
            tensor.zero_()
    copy.compile(backend=backend, dynamic=True)
    output = copy(*_zeros(args, device), **_zeros(named, device))
    next(leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)).sum().backward()


def _zeros(tree: Any, device: torch.device) -> Any:
    return tree_map_only(Tensor, lambda tensor: torch.zeros_like(tensor, device=device), tree)


class _Reached(Exception):
    """The layer has been called."""


def _arguments_of(model: PreTrainedModel, layer: nn.Module) -> tuple[Any, Any]:
    """The arguments with which the model calls the layer, found on the meta device. Raises RuntimeError: they
    cannot be found out."""
    arguments: list[Any] = []

    def stop(_: nn.Module, args: Any, named: Any) -> None:
        arguments.extend((args, named))
        raise _Reached

    meta = torch.device("meta")
    # Where a kernel takes dense masks, transformers reads values to make one: it gets a finished one.
    mask_B1TT = torch.ones((2, 1, 8, 8), dtype=torch.bool, device=meta)
    hook = layer.register_forward_pre_hook(stop, with_kwargs=True)
    reason = "it is not among those that are called"
    try:
        for named in ({}, {"attention_mask": mask_B1TT}):
            with suppress(RuntimeError), torch.no_grad():
                _output_of(model, meta, **named)
    except _Reached:
        return arguments[0], arguments[1]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        reason = str(error)
    finally:
        hook.remove()
    raise RuntimeError(f"a {type(layer).__name__} cannot be tried alone: {reason}")

"""Faster code for the same model: torch.compile, and Liger's fused kernels.

Guarantee: what cannot be had here is said. An option that was asked for and is missing ends the start with
the reason; `auto`, and a compiler that fails, leave the model as it was.
"""

import importlib.util
from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np
import structlog
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from common.config.trainer import TrainerConfig
from common.errors import ConfigError
from services.trainer.policy.forward import TokenScorer
from services.trainer.policy.packing import Layout, Row, choose_layout, make_tiles

log = structlog.get_logger(__name__)


def accelerate_model(model: PreTrainedModel, config: TrainerConfig) -> None:
    """Apply `trainer.liger` and `trainer.compile` to a loaded model, in place.

    Raises:
        ConfigError: `liger: on` where Liger cannot run.
    """
    if wants_liger(config.liger, model.device):
        _apply_liger(model)
    if config.compile:
        compile_model(model)


def wants_liger(choice: str, device: torch.device) -> bool:
    """Whether to use Liger's kernels: `auto` where they are installed and the model is on a GPU.

    Raises:
        ConfigError: `on`, and one of the two is missing.
    """
    if choice == "off":
        return False
    missing = ""
    if device.type != "cuda":
        missing = f"its kernels run on CUDA GPUs, and the model is on {device.type}"
    elif importlib.util.find_spec("liger_kernel") is None:
        missing = "the package liger-kernel is not installed: pip install 'tidemill[liger]'"
    if missing and choice == "on":
        raise ConfigError(
            f"trainer.liger: on is not possible, {missing}. Or set trainer.liger to auto or off"
        )
    return not missing


def _apply_liger(model: PreTrainedModel) -> None:
    """Fused norms, rotary embeddings and gated units; logprobs stay with `forward.score_hidden`."""
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(model=model, cross_entropy=False, fused_linear_cross_entropy=False)
    log.info("using Liger's kernels", model=str(model.config.model_type))


def compile_model(model: PreTrainedModel, backend: str | Callable[..., Any] = "inductor") -> bool:
    """Compile the model's body for any shape; the head works by chunks and stays as it is.

    A small forward and backward pass is tried at once: where the compiler fails, for want of a C++ compiler
    for instance, the model stays as it was, a warning says why, and the result is False.
    """
    body = model.base_model
    body.compile(backend=backend, dynamic=True)
    vocab_size = model.config.get_text_config().vocab_size
    ids_BT = torch.arange(1, 9, device=model.device)[None].expand(2, -1) % vocab_size
    try:
        body(input_ids=ids_BT, use_cache=False).last_hidden_state.sum().backward()
    except RuntimeError as error:  # what the compiler and its backends raise derives from it
        body._compiled_call_impl = None
        reason = " ".join(str(error).split())[:300]
        log.warning("torch.compile does not work here, training without it", reason=reason)
        return False
    finally:
        model.zero_grad(set_to_none=True)
    return True


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


MAX_DIFFERENCE = 0.1
"""Of a token's last hidden state, relative to its norm. Rounding in bfloat16 makes 0.01 to 0.03; the first
token of a sequence that sees its neighbour differs by about 1."""


def pick_layout(model: PreTrainedModel, scorer: TokenScorer, packing: bool, device: torch.device) -> Layout:
    """The layout of this model's tiles on this device: that of `choose_layout`, if it holds."""
    config = model.config.get_text_config()
    layout = choose_layout(packing, device, config, bool(getattr(model, "_is_stateful", False)))
    if layout == "padded":
        return layout
    problem = _find_leak(scorer, layout, config.vocab_size)
    if not problem:
        return layout
    log.warning(
        "sequences are padded instead of packed, this model does not keep packed ones apart",
        model=str(model.config.model_type),
        reason=problem,
    )
    return "padded"


@torch.no_grad()
def _find_leak(scorer: TokenScorer, layout: Layout, vocab_size: int) -> str:
    """What is wrong with two packed sequences; empty where they come out as they do alone."""
    rows = [_made_up_row(i, length, vocab_size) for i, length in enumerate((9, 7))]
    try:
        packed, alone = _hidden(scorer, rows, layout), _hidden(scorer, rows, "padded")
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
        return " ".join(str(error).split())[:200]
    difference = float(((packed - alone).norm(dim=-1) / alone.norm(dim=-1)).max())
    return "" if difference < MAX_DIFFERENCE else f"its hidden states differ by {difference:.0%}"


def _hidden(scorer: TokenScorer, rows: list[Row], layout: Layout) -> Tensor:
    (tile,) = make_tiles(rows, layout, max_tokens=64)
    hidden_NH = scorer.score(tile, 1.0, keep_hidden=True).hidden_NH
    assert hidden_NH is not None, "they were asked for"
    return hidden_NH.float()


def _made_up_row(sample: int, length: int, vocab_size: int) -> Row:
    """No token twice, none of them 0, and other ones in each row."""
    ids = (np.arange(1, length + 1) + 10 * sample) % vocab_size
    places = np.arange(length, dtype=np.int32)
    return Row(sample, ids.astype(np.int32), places, ids.astype(np.int32))

"""Faster code for the same model: torch.compile, and Liger's fused kernels.

Guarantee: what cannot be had here is said. An option that was asked for and is missing ends the start with
the reason; `auto`, and a compiler that fails, leave the model as it was.
"""

import importlib.util
from collections.abc import Callable
from typing import Any

import structlog
import torch
from transformers import PreTrainedModel

from common.config.trainer import TrainerConfig
from common.errors import ConfigError

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

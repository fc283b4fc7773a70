"""Loads the model that is trained: float32 master weights, in eval mode, on the configured device.

A rank opens the model without its weights, and reads its own shards of them once it is split. Every weight
comes from the files: a folder that lacks some, a model that is too short for the run, or a
device that is not there is a ConfigError.
"""

import os
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

import structlog
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from tidemill.common.config.run import ModelConfig
from tidemill.common.config.trainer import TrainerConfig
from tidemill.common.errors import ConfigError
from tidemill.common.run.model_config import freeze_rope, with_overrides
from tidemill.services.trainer.policy.attention import choose_attention
from tidemill.services.trainer.policy.layers import outermost
from tidemill.services.trainer.weights.store import model_tensors

if TYPE_CHECKING:
    from tidemill.services.trainer.weights.pretrained import PretrainedWeights

log = structlog.get_logger(__name__)


def auto_class(config: PreTrainedConfig) -> Any:
    """The class of transformers that makes the model of a configuration: a causal language model, or, where
    that is a part of one, the whole model that reads pictures too."""
    is_part = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None) is None
    sees = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None) is not None
    return AutoModelForImageTextToText if is_part and sees else AutoModelForCausalLM


def compute_dtype(config: ModelConfig) -> torch.dtype:
    """The dtype of the forward pass and of exported weights."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.dtype]


def use_device(name: str) -> torch.device:
    """Like `pick_device`, and make it this thread's current device, for code that names none (torch's stager
    of checkpoints waits for it)."""
    device = pick_device(name)
    if device.index is not None and device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def pick_device(name: str) -> torch.device:
    """`auto` is the first GPU, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"trainer.device: {name!r} is no device; use auto, cpu, cuda or cuda:0") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"trainer.device: no {name} here, torch sees {torch.cuda.device_count()} GPUs; use auto or cpu"
        )
    return device


def prepare_torch(config: TrainerConfig) -> None:
    """Threads, memory and determinism of this process; before anything is computed."""
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        # Read with the first tensor on a GPU. Tiles of many sizes leave holes in segments of fixed ones.
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    if config.deterministic:
        # Read by cuBLAS when its first handle is made, and by transformers' flash attention.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("FLASH_ATTENTION_DETERMINISTIC", "1")
        torch.use_deterministic_algorithms(True)


def load_model(config: ModelConfig, device: torch.device) -> PreTrainedModel:
    """Load `model.path` in float32 onto the device, in eval mode. Raises ConfigError: no model
    there, weights missing, or a context shorter than `model.max_model_len`."""
    # transformers reads weights into the CPU's memory; for a GPU that is one copy more than is needed.
    model, weights = open_model(config, device, reads_later=device.type != "cpu")
    if weights is not None:
        from tidemill.services.trainer.weights.pretrained import give_storage

        give_storage(model, device)
        weights.fill(model_tensors(model))
    return model


def open_model(
    config: ModelConfig, device: torch.device, reads_later: bool = True
) -> "tuple[PreTrainedModel, PretrainedWeights | None]":
    """Like `load_model`, but without weights, and the object that fills it. With weights and None if not
    `reads_later`, or where it is not clear which elements of the files are the model's."""
    try:
        model_config = with_overrides(AutoConfig.from_pretrained(config.path), config)
        model_config = freeze_rope(model_config, config.max_model_len)
        attention = choose_attention(model_config, device, compute_dtype(config))
        options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": attention}
        opened: Any = _open_empty(config.path, model_config, options) if reads_later else None
        if opened is None:
            opened = auto_class(model_config).from_pretrained(
                config.path, config=model_config, output_loading_info=True, **options
            )
            opened = (*opened, None)
    except ConfigError:
        raise
    except Exception as error:
        # Whatever transformers raises here (it uses a dozen types) is about the folder the user named.
        reason = " ".join(str(error).split())[:500]
        raise ConfigError(
            f"model.path: cannot load a causal language model from {config.path}: {reason}. Give a folder "
            "with config.json and safetensors weights, or the name of a model on the hub."
        ) from error
    model, info, weights = opened
    _check_weights(config, info)
    _check_context(config, model)
    if weights is None:
        model.to(device)
    # Without dropout: sampling has none, so the trainer's logprobs must not have any either.
    return model.eval(), weights


def _open_empty(
    path: str, config: PreTrainedConfig, options: dict[str, Any]
) -> "tuple[PreTrainedModel, dict[str, Any], PretrainedWeights] | None":
    # Not on a CPU: there transformers puts the weights where they stay.
    from tidemill.services.trainer.weights.pretrained import UnclearError, open_pretrained

    try:
        return open_pretrained(path, config, auto_class(config), **options)
    except UnclearError as error:
        log.warning("the whole model is read before it goes to its device", path=path, reason=str(error))
        return None


def _check_weights(config: ModelConfig, info: dict[str, Any]) -> None:
    """Transformers fills what is missing with random numbers and a warning; here it is an error."""
    absent = sorted(map(str, [*info.get("missing_keys", ()), *info.get("mismatched_keys", ())]))
    if absent:
        raise ConfigError(
            f"model.path: {config.path} lacks {len(absent)} of the model's weights, or has them in another "
            f"shape: {', '.join(absent[:3])}; its config.json and its weight files do not belong together"
        )


def _check_context(config: ModelConfig, model: PreTrainedModel) -> None:
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if isinstance(context, int) and context < config.max_model_len:
        raise ConfigError(
            f"model.max_model_len: {config.max_model_len} exceeds the model's context of {context}; lower it"
        )


def recompute_layers(model: nn.Module) -> None:
    """Wrap the layers that transformers would checkpoint, in place. Raises ConfigError: the model has no such
    layers."""
    layers = recomputable_layers(model)
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


def recomputable_layers(module: nn.Module) -> list[nn.Module]:
    """Layers that transformers would checkpoint, and that are in no other such layer."""
    return outermost(module, lambda inner: isinstance(inner, GradientCheckpointingLayer))

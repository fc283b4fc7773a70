"""Loads the model that is trained: float32 master weights, in eval mode, on the configured device.

Guarantee: every weight comes from the files. A folder that lacks some, a model that is too short for
the run, or a device that is not there is a ConfigError in plain words before anything is trained.
"""

from typing import Any

import structlog
import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils.import_utils import is_flash_attn_2_available

from common.config.run import ModelConfig
from common.errors import ConfigError
from common.run.chat_template import exact_attention

log = structlog.get_logger(__name__)

FLASH = "flash_attention_2"


def choose_attention(
    config: PreTrainedConfig, device: torch.device, dtype: torch.dtype
) -> str | dict[str, str] | None:
    """The value of `attn_implementation` for a model of this configuration; None is transformers' choice.

    Flash attention takes half precision on GPUs only, and knows how to cap scores; of a model with several
    parts it is for the text alone.
    """
    if device.type == "cuda" and dtype != torch.float32 and is_flash_attn_2_available():
        reason = why_no_flash(config)
        if not reason:
            return FLASH if config.get_text_config() is config else {"text_config": FLASH}
        log.warning("training without flash attention", model=config.model_type, reason=reason)
    return exact_attention(config)


def why_no_flash(config: PreTrainedConfig) -> str:
    """Why a model of this configuration does not run with flash attention 2; empty where it does."""
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is None:
        return ""  # loading it says what is wrong
    name = model_class.__name__
    if not model_class._supports_flash_attn:
        return f"transformers has no flash attention for {name}"
    if getattr(config, "alibi", False):
        return f"{name} with ALiBi adds distances to its attention scores, which {FLASH} leaves out"
    own = getattr(model_class, "_compatible_flash_implementations", None)
    if own and FLASH not in own:
        return f"{name} has attention sinks or blocks of its own, which {FLASH} leaves out"
    return ""


def compute_dtype(config: ModelConfig) -> torch.dtype:
    """The dtype of the forward pass and of exported weights."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.dtype]


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


def load_model(config: ModelConfig, device: torch.device) -> PreTrainedModel:
    """Load `model.path` in float32 onto the device, with every dropout at 0.

    Raises:
        ConfigError: no model there, weights missing, or a context shorter than `model.max_model_len`.
    """
    try:
        model_config = AutoConfig.from_pretrained(config.path)
        _disable_dropout(model_config)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            config.path,
            config=model_config,
            dtype=torch.float32,
            output_loading_info=True,
            attn_implementation=choose_attention(model_config, device, compute_dtype(config)),
        )
    except Exception as error:
        # Whatever transformers raises here (it uses a dozen types) is about the folder the user named.
        reason = " ".join(str(error).split())[:500]
        raise ConfigError(
            f"model.path: cannot load a causal language model from {config.path}: {reason}. Give a folder "
            "with config.json and safetensors weights, or the name of a model on the hub."
        ) from error
    model: PreTrainedModel = loaded[0]
    _check_weights(config, loaded[1])
    _check_context(config, model)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model.to(device).eval()  # type: ignore[arg-type]
    return model


def _disable_dropout(model_config: Any) -> None:
    """Sampling has none, so the trainer's logprobs must not have any either; eval mode has none as well."""
    for part in {id(part): part for part in (model_config, model_config.get_text_config())}.values():
        for name, value in list(vars(part).items()):
            if isinstance(value, float) and ("dropout" in name or name.endswith("pdrop")):
                setattr(part, name, 0.0)


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

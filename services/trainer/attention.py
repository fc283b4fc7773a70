"""Which attention the trained model is loaded with: flash attention where it can, else what is exact.

Guarantee: flash attention is never forced on a model that transformers does not run with it; where it is
installed and cannot be used, the log says so and why.
"""

from typing import Any

import structlog
import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig
from transformers.utils.import_utils import is_flash_attn_2_available

from common.attention import exact_attention

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

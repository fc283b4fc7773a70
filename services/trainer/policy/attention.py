"""Which attention kernel a model is trained with, and torch's variable-length attention for transformers.

On GPUs sequences lie end to end in one row and a kernel keeps them apart at their boundaries: torch's own
(`torch.nn.attention.varlen`), else flash attention where it is installed, which is the same algorithm (arXiv
2307.08691) with capped scores. Dense attention is what is left for a model that neither computes.
"""

from copy import deepcopy
from typing import Any

import structlog
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AttentionInterface,
    AutoModelForCausalLM,
    PreTrainedConfig,
)
from transformers.utils.import_utils import is_flash_attn_2_available

from tidemill.common.run.model_config import exact_attention, has_capped_attention
from tidemill.services.trainer.policy.precision import autocast_dtype
from tidemill.services.trainer.policy.trees import CHANGES_OF_SCORES, TREE, Tree

log = structlog.get_logger(__name__)

FLASH = "flash_attention_2"
VARLEN = "torch_varlen"
"""The name under which transformers finds `attend_varlen`."""
MAX_HEAD_SIZE = 256
"""Largest size of a head for the kernels behind `varlen_attn`; sizes are multiples of 8."""
OLDEST_GPU = (8, 0)
"""Compute capability that these kernels need: Ampere."""


def choose_attention(
    config: PreTrainedConfig, device: torch.device, dtype: torch.dtype
) -> str | dict[str, str] | None:
    """The value of `attn_implementation` for a model of this configuration; None is transformers' choice.

    Torch's kernel comes first, because it takes trees; flash-attn is for models whose scores are capped. Both
    kernels take half precision on GPUs only; of a model with several parts they are for the text alone.
    """
    if device.type != "cuda" or dtype == torch.float32:
        return exact_attention(config)
    kernel = VARLEN
    reason = why_no_flash(config)
    if not reason and (no_varlen := why_no_varlen(config, torch.cuda.get_device_capability(device))):
        kernel = FLASH
        reason = "" if is_flash_attn_2_available() else no_varlen
    if reason:
        log.warning(
            "training with dense attention masks, which is slow", model=config.model_type, reason=reason
        )
        return exact_attention(config)
    return kernel if config.get_text_config() is config else {"text_config": kernel}


def why_no_flash(config: PreTrainedConfig) -> str:
    """Why a model of this configuration does not run with flash attention 2; empty where it does."""
    # Of a model with several parts the text decides: in transformers 5.24 Gemma 3's whole model has no
    # flash attention, because of its images, and its text model still has it.
    text_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config.get_text_config()), None)
    model_class: Any = text_class or MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is None:
        return ""  # loading it says what is wrong
    name = model_class.__name__
    if not model_class._supports_flash_attn:
        return f"transformers has no flash attention for {name}"
    if getattr(config, "alibi", False):
        return f"{name} with ALiBi adds distances to its attention scores, which {FLASH} leaves out"
    kernels = getattr(model_class, "_compatible_flash_implementations", None)
    if kernels and FLASH not in kernels:
        return f"{name} has attention sinks or blocks of its own, which {FLASH} leaves out"
    return ""


def why_no_varlen(config: PreTrainedConfig, capability: tuple[int, int]) -> str:
    """Why a model that flash attention could run does not run with torch's kernel; empty where it does."""
    if capability < OLDEST_GPU:
        return f"torch's varlen attention needs a GPU of compute capability 8.0, this one has {capability}"
    if has_capped_attention(config):
        return "torch's varlen attention does not cap scores; flash-attn does, where it is installed"
    size = max(map(head_size, layer_configs(config)), key=lambda size: (size % 8, size))
    if size > MAX_HEAD_SIZE or size % 8:
        return (
            f"torch's varlen attention takes heads of up to {MAX_HEAD_SIZE} in steps of 8, these have {size}"
        )
    return (
        "" if takes_name(config, VARLEN) else f"transformers' {config.model_type} takes its own kernels alone"
    )


def takes_name(config: PreTrainedConfig, kernel: str) -> bool:
    """Whether a model of this configuration is built with a kernel of this name: some look it up in a table
    of their own. Tried without memory for weights."""
    if MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None) is None:
        return True  # loading it says what is wrong
    options = kernel if config.get_text_config() is config else {"text_config": kernel}
    try:
        with torch.device("meta"):
            AutoModelForCausalLM.from_config(deepcopy(config), attn_implementation=options)
    except KeyError:
        return False
    return True


def layer_configs(config: PreTrainedConfig) -> list[Any]:
    """The text's configuration, or one for each layer where layers have heads of different sizes."""
    text = config.get_text_config()
    try:
        getattr(text, "head_dim", None)
    except RuntimeError:  # transformers refuses to say one size for all
        return [text.per_layer_config[i] for i in range(text.num_hidden_layers)]
    return [text]


def head_size(text: Any) -> int:
    """Size of a layer's queries and keys, as its configuration says. With compressed keys and values (MLA,
    arXiv 2405.04434) a head has a part with positions and one without: 64 + 128 in DeepSeek-V3."""
    without_positions = getattr(text, "qk_nope_head_dim", None)
    if without_positions:
        return int(without_positions + (getattr(text, "qk_rope_head_dim", None) or 0))
    heads = max(1, int(getattr(text, "num_attention_heads", 1)))
    return int(getattr(text, "head_dim", None) or getattr(text, "hidden_size", 0) // heads)


def value_size(text: Any) -> int:
    """Size of a layer's values: that of its queries, where the configuration names no other."""
    is_compressed = getattr(text, "qk_nope_head_dim", None)
    return int((getattr(text, "v_head_dim", None) if is_compressed else None) or head_size(text))


def attend_varlen(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each of the sequences that lie end to end, or along the branches of a tree.

    Shapes: query [B, heads, T, D], key [B, key heads, T, D], value [B, key heads, T, E] with E <= D; returns
    [B, T, heads, E]. Boundaries are those of `cu_seq_lens_q`; without it each of the B rows is a sequence.
    With a tree's `columns` this rank has some of the T. A window of W is the token itself and the W - 1
    before it.
    """
    tree: Tree | None = kwargs.get(TREE)
    has_mask = attention_mask is not None and (tree is None or attention_mask.numel() > 0)
    if has_mask or any(kwargs.get(name) is not None for name in CHANGES_OF_SCORES):
        raise ValueError(f"{VARLEN} takes no mask, no cap of scores and no sinks")
    # Rotary embeddings of some models give float32, and autocast does not know this kernel.
    query = query.to(autocast_dtype(query) or query.dtype)
    key = key.to(autocast_dtype(key) or key.dtype)
    value = value.to(autocast_dtype(value) or value.dtype)
    columns = None if tree is None else tree.columns
    if columns is not None:
        query, key, value = map(columns.to_heads, (query, key, value))
    num_rows, _, width, size = query.shape
    own_size = value.shape[-1]
    if own_size < size:
        # The kernel wants one head size for all three; the padding is cut off at the end.
        value = F.pad(value, [0, size - own_size])
    flat = [x.transpose(1, 2).reshape(num_rows * width, x.shape[1], size) for x in (query, key, value)]
    if tree is not None:
        spread_arguments = tree.spread(flat[1], flat[2], sliding_window)
    else:
        boundaries = kwargs.get("cu_seq_lens_q")
        longest = kwargs.get("max_length_q", width)
        if boundaries is None:
            boundaries = torch.arange(0, num_rows * width + 1, width, dtype=torch.int32, device=query.device)
        spread_arguments = flat[1], flat[2], boundaries, boundaries, longest, longest
    attended = varlen_attn(
        flat[0],
        *spread_arguments,
        scale=scaling,
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(attended, Tensor), "nothing else was asked for"
    attended = attended[..., :own_size].reshape(num_rows, width, query.shape[1], own_size)
    return (attended if columns is None else columns.to_columns(attended)), None


AttentionInterface.register(VARLEN, attend_varlen)

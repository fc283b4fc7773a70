"""Tiny models of many families, whose numbers packing, tiles, checkpoints or kernels could get wrong."""

from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from tests.support.models import PIECES

SIZES: dict[str, Any] = {
    "vocab_size": len(PIECES), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
SLIDING = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
"""The vision part of models that read images too; no test gives them any."""
GEMMA4 = {"head_dim": 8, **SLIDING, "final_logit_softcapping": 3.0, "hidden_size_per_layer_input": 8}
GEMMA4 |= {"vocab_size_per_layer_input": len(PIECES)}
IMAGE_IDS = {"boi_token_id": 40, "eoi_token_id": 41, "image_token_id": 42, "video_token_id": 43}
"""Outside the vocabulary: no text holds them."""

FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {"tie_word_embeddings": True},
    "Qwen3": {"head_dim": 8, "tie_word_embeddings": True},
    "Mistral": {"sliding_window": 4},
    "Gemma2": {"head_dim": 8, **SLIDING, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0},
    "Gemma3Text": {"head_dim": 8, **SLIDING},
    "Gemma3": {"text_config": {**SIZES, "head_dim": 8, **SLIDING},
        "vision_config": VISION | {"image_size": 28, "patch_size": 14}, "mm_tokens_per_image": 4,
        "image_token_index": 42},
    "Gemma4Text": GEMMA4,
    "Gemma4": {"text_config": {**SIZES, "num_hidden_layers": 4, **GEMMA4,
        "num_kv_shared_layers": 2} | {"layer_types": SLIDING["layer_types"] * 2},
        "vision_config": VISION | {"num_key_value_heads": 2, "head_dim": 8}, "audio_config": None,
        **IMAGE_IDS},
    "Olmo2": {},
    "Mixtral": {"num_local_experts": 3},
    "Phimoe": {"num_local_experts": 4},
    "GptOss": {"head_dim": 8, **SLIDING, "num_local_experts": 4, "num_experts_per_tok": 2},
    "GPTNeoX": {"num_key_value_heads": None},
    "OPT": {"ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.3},
    "Falcon": {"alibi": True, "num_key_value_heads": None},
    "Mamba": {"state_size": 4, "num_heads": None},
    "RecurrentGemma": {"lru_width": 32, "attention_window_size": 4, "head_dim": 8},
}  # fmt: skip
HAS_OUTER_CONFIG = ("Gemma3", "Gemma4")
"""The text model's fields stand one level down in their configs, as `text_config`."""


def make_config(family: str, **changes: Any) -> PreTrainedConfig:
    config_class = getattr(transformers, f"{family}Config")
    sizes = {} if family in HAS_OUTER_CONFIG else SIZES
    fields = {
        name: value
        for name, value in (sizes | FAMILIES.get(family, {}) | changes).items()
        if value is not None
    }
    if family == "Gemma4":
        fields["audio_config"] = None
    config: PreTrainedConfig = config_class(**fields)
    return config


def make_model(family: str, seed: int = 0, attention: str | None = None, **changes: Any) -> PreTrainedModel:
    """A model with random weights from `seed`, in eval mode."""
    torch.manual_seed(seed)
    options = {} if attention is None else {"attn_implementation": attention}
    model: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(
        make_config(family, **changes), **options
    )
    return model.eval()

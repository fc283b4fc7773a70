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
_LINEAR = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "head_dim": 8}  # fmt: skip
_MIXED = {"layer_types": ["linear_attention", "full_attention"]}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 8,
    "mamba_n_groups": 1}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_SHARED = {"shared_expert_intermediate_size": 16}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}

RECURRENT: dict[str, dict[str, Any]] = {
    "Qwen3_5Text": _LINEAR | _MIXED,
    "Qwen3_5MoeText": _LINEAR | _MIXED | _EXPERTS | _SHARED,
    "Qwen3Next": _LINEAR | _MIXED | _EXPERTS | _SHARED,
    "Lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "Lfm2Moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1} | _EXPERTS,
    "GraniteMoeHybrid": _MIXED | _MAMBA | _LOCAL_EXPERTS | {"shared_intermediate_size": 16},
    "NemotronH": {"num_hidden_layers": None, "layers_block_type": [*_MIXED["layer_types"], "moe"],
        "head_dim": 8, "ssm_state_size": 8, "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 1,
        "chunk_size": 8, "time_step_min": 1e-9, "n_routed_experts": 4, "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 16},
    "KimiLinear": _MIXED | _LOCAL_EXPERTS | {"linear_head_dim": 8, "linear_num_heads": 4,
        "moe_intermediate_size": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
        "v_head_dim": 8, "num_key_value_heads": 4},
    "Mamba": FAMILIES["Mamba"],
    "Mamba2": {"state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 8},
    "FalconMamba": {"state_size": 4},
    "Zamba": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "n_mamba_heads": 2, "mamba_d_state": 4, "num_key_value_heads": 4},
    "Zamba2": {"num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention"],
        "mamba_d_state": 8, "n_mamba_heads": 4, "chunk_size": 8, "time_step_min": 1e-9,
        "num_key_value_heads": 4},
    "FalconH1": _MAMBA | {"mamba_d_ssm": 64, "head_dim": 8},
    "Bamba": _MAMBA | {"attn_layer_indices": [1]},
    "Jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4, "mamba_dt_rank": 4,
        "num_experts": 4, "num_experts_per_tok": 2, "use_mamba_kernels": False},
    "OlmoHybrid": _MIXED | {"linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
        "linear_value_head_dim": 8},
    "MiniMax": _MIXED | _LOCAL_EXPERTS | {"block_size": 8, "head_dim": 8},
    "Zaya": _EXPERTS | {"num_experts_per_tok": 1, "head_dim": 8, "router_hidden_size": 8},
    "InklingText": {"head_dim": 8, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2,
        "swa_head_dim": 8, "sliding_window_size": 8, "d_rel": 4, "rel_extent": 16,
        "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "layer_types": ["hybrid_sliding", "hybrid"]},
}  # fmt: skip
"""Families that keep other states than keys and values. transformers bounds the time step of NemotronH and
Zamba2 from below in a prompt and not in a token after it: here the bound is too low to matter."""
STATELESS_BATCHES: dict[str, dict[str, Any]] = {
    "Rwkv": {"attention_hidden_size": 32, "context_length": 128},
    "RecurrentGemma": FAMILIES["RecurrentGemma"],
    "xLSTM": {"num_heads": 4, "num_blocks": 2, "chunk_size": 8},
}
"""Families whose states transformers does not keep row by row."""
HAS_OUTER_CONFIG = ("Gemma3", "Gemma4")
"""The text model's fields stand one level down in their configs, as `text_config`."""


def make_config(family: str, **changes: Any) -> PreTrainedConfig:
    config_class = getattr(transformers, f"{family}Config")
    sizes = {} if family in HAS_OUTER_CONFIG else SIZES
    of_family = FAMILIES.get(family) or RECURRENT.get(family) or STATELESS_BATCHES.get(family) or {}
    fields = {name: value for name, value in (sizes | of_family | changes).items() if value is not None}
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

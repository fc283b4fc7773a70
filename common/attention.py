"""Which of transformers' kernels computes a model's attention as its authors wrote it.

Guarantee: who loads a model with `exact_attention` gets its own numbers. Transformers takes torch's fused
attention (sdpa) wherever a model runs with it, and that leaves out the soft cap on attention scores of
Gemma 2 and its kin: 0.035 nats of a logprob, without a word.
"""

from typing import Any

CAP = "attn_logit_softcapping"
"""The field of a configuration that caps attention scores; null or absent does not."""


def has_capped_attention(config: Any) -> bool:
    """Whether a model of this configuration caps its attention scores, in itself or in a part of it."""
    parts = [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    return any(getattr(part, CAP, None) is not None for part in (config, *parts))


def exact_attention(config: Any) -> str | None:
    """What to load a model of this configuration with: `eager` where sdpa would compute something else,
    None for transformers' own choice."""
    return "eager" if has_capped_attention(config) else None

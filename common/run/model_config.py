"""The run's configuration of a model, identical in trainer, engines, reward models and exports.

`model.overrides` are merged into config.json before anything is built from it. Rotary embeddings that depend
on a length are fixed once: transformers chooses them by the longest position of a forward pass, so that a
sequence's embeddings would depend on the others in its batch; vLLM chooses them when it starts.
"""

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from tidemill.common.config import ModelConfig, is_path
from tidemill.common.errors import ConfigError

ROPE = ("rope_scaling", "rope_parameters")
"""Old and new name of the same field. An override replaces the scaling; fields in `ROPE_BASE` stay."""
ROPE_BASE = ("rope_theta", "partial_rotary_factor")
ORIGINAL = "original_max_position_embeddings"
TRAINED = "max_trained_positions"
"""vLLM's name of `ORIGINAL`, for dynamic scaling."""
UNSAMPLED = ("recurrent_gemma", "rwkv", "xlstm")
"""Kinds of models whose states transformers does not keep row by row: batches have other numbers."""
LENGTHS = ("short", "long")
"""Prefixes of LongRoPE's two sets of factors, for short and long sequences (arXiv 2402.13753)."""


def check_folder(field: str, model: str) -> None:
    """Raises ConfigError: `model` means a folder without a model; `field` names it in the message."""
    folder = Path(model)
    if (is_path(model) or folder.exists()) and not (folder / "config.json").is_file():
        problem = "has no config.json" if folder.exists() else "does not exist"
        raise ConfigError(
            f"{field} {model}: the folder {problem}. Give that of a saved model; relative paths in a config "
            "start at the config's folder."
        )


def check_sampling(model_type: str) -> None:
    """Raises ConfigError: the transformers engine cannot sample from models of this kind."""
    if model_type in UNSAMPLED:
        raise ConfigError(
            f"model.path: rollout.engine transformers cannot sample from a {model_type}, whose states it "
            "cannot keep apart in a batch. Set rollout.engine to vllm if that has this model, or take "
            "another model"
        )


def overridden(tree: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a config.json with some fields replaced; nested maps are merged.

    `rope_scaling: null` turns {"rope_scaling": {"rope_theta": 1e4, "factor": 8.0}} into
    {"rope_scaling": {"rope_theta": 1e4, "rope_type": "default"}}.
    """
    merged = dict(tree)
    for name, value in overrides.items():
        if name in ROPE:
            name = "rope_parameters" if "rope_parameters" in tree else "rope_scaling"
            before = tree.get(name) or {}
            base = {field: before[field] for field in ROPE_BASE if field in before}
            merged[name] = {**base, **(value or {"rope_type": "default"})}
        elif isinstance(value, Mapping) and isinstance(tree.get(name), Mapping):
            merged[name] = overridden(tree[name], value)
        else:
            merged[name] = value
    return merged


def with_overrides(config: Any, model: ModelConfig, **options: Any) -> Any:
    """The configuration with `model.overrides`: transformers read `config` from `model.path` with `options`.

    Raises:
        ConfigError: the model has no such field.
    """
    if not model.overrides:
        return config
    tree, _ = type(config).get_config_dict(model.path, **options)
    unknown = [name for name in model.overrides if name not in tree and not hasattr(config, name)]
    if unknown:
        raise ConfigError(
            f"model.overrides: {', '.join(unknown)} is no field of {model.path} ({config.model_type}); the "
            "names are those of its config.json"
        )
    return type(config).from_dict(overridden(tree, model.overrides))


def for_vllm(changed: Any, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's `hf_overrides`, which replace whole values; `changed` is the result of `with_overrides`."""
    fields = {name: value for name, value in overrides.items() if name not in ROPE}
    if len(fields) < len(overrides):
        fields["rope_parameters"] = dict(changed.rope_parameters)
    return fields


def freeze_rope(config: Any, max_model_len: int) -> Any:
    """A copy of transformers' configuration, for sequences of up to `max_model_len` tokens.

    LongRoPE uses the long factors for all sequences if `max_model_len` exceeds the original context, else the
    short ones. Exported configurations keep both.

    Raises:
        ConfigError: the base of dynamic scaling would grow with the sequence.
    """
    frozen = deepcopy(config)
    text_config = frozen.get_text_config()
    sections = [frozen] if text_config is frozen else [frozen, text_config]
    for section in sections:
        context = getattr(section, "max_position_embeddings", None) or max_model_len
        rope = getattr(section, "rope_parameters", None)
        rope_parameters = rope if isinstance(rope, dict) else {}
        # One set for all layers, or one for each kind: {"full_attention": {"rope_type": "default"}}.
        sets_of_kinds = [
            values
            for values in rope_parameters.values()
            if isinstance(values, dict) and "rope_type" in values
        ]
        for parameters in sets_of_kinds or [rope_parameters]:
            kind = str(parameters.get("rope_type"))
            if kind == "longrope":
                is_long = max_model_len > (parameters.get(ORIGINAL) or context)
                short, long = LENGTHS
                chosen = long if is_long else short
                other_length = short if is_long else long
                for name in ("factor", "mscale"):
                    if f"{chosen}_{name}" in parameters:
                        parameters[f"{other_length}_{name}"] = parameters[f"{chosen}_{name}"]
            elif "dynamic" in kind:
                original = min(parameters.get(name) or context for name in (ORIGINAL, TRAINED))
                if max_model_len > original:
                    raise ConfigError(
                        f"max_model_len: {max_model_len} exceeds the model's original context of "
                        f"{original}, beyond which its dynamic RoPE gives the same tokens other positions in "
                        "longer sequences. Lower it, or give the model another rope_type"
                    )
    return frozen


def has_capped_attention(config: Any) -> bool:
    """Whether a model of this configuration, or a part of it, caps its attention scores (soft-capping)."""
    parts = [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    return any(getattr(section, "attn_logit_softcapping", None) is not None for section in (config, *parts))


def exact_attention(config: Any) -> str | None:
    """`attn_implementation` for a model of this configuration: `eager` where sdpa would compute something
    else, None for transformers' own choice."""
    return "eager" if has_capped_attention(config) else None

"""A model's configuration as this run has it, identically in trainer, engines, reward models and exports.

What `model.overrides` replaces in config.json is merged before anything is built of it. Rotary positions that
depend on a length are decided once: transformers decides by the longest position of a forward pass, so that
what a sequence's tokens get would depend on what is computed beside it, and vLLM when it starts.
"""

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from tidemill.common.config import ModelConfig, is_path
from tidemill.common.errors import ConfigError

ROPE = ("rope_scaling", "rope_parameters")
"""The former and the present name of the same field. The new value replaces the scaling; the base stays."""
ROPE_BASE = ("rope_theta", "partial_rotary_factor")
ORIGINAL = "original_max_position_embeddings"
TRAINED = "max_trained_positions"
"""vLLM's name of it, for dynamic scaling."""
LENGTHS = ("short", "long")
"""Of the sequences that a set of LongRoPE's factors is for (arXiv 2402.13753)."""


def check_folder(what: str, model: str) -> None:
    """Raises ConfigError: `model` means a folder (`what` names it in words), and no model is there."""
    folder = Path(model)
    if (is_path(model) or folder.exists()) and not (folder / "config.json").is_file():
        problem = "has no config.json" if folder.exists() else "does not exist"
        raise ConfigError(
            f"{what} {model}: the folder {problem}. Give that of a saved model; relative paths in a config "
            "start at the config's folder."
        )


def overridden(tree: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a config.json with some fields replaced; fields of a section are replaced one by one."""
    merged = dict(tree)
    for name, value in overrides.items():
        if name in ROPE:
            name = "rope_parameters" if "rope_parameters" in tree else "rope_scaling"
            before = tree.get(name) or {}
            base = {part: before[part] for part in ROPE_BASE if part in before}
            merged[name] = {**base, **(value or {"rope_type": "default"})}
        elif isinstance(value, Mapping) and isinstance(tree.get(name), Mapping):
            merged[name] = overridden(tree[name], value)
        else:
            merged[name] = value
    return merged


def with_overrides(found: Any, model: ModelConfig, **options: Any) -> Any:
    """The configuration that transformers has read from `model.path` with `options`, with the overrides.

    Raises:
        ConfigError: the model has no such field.
    """
    if not model.overrides:
        return found
    tree, _ = type(found).get_config_dict(model.path, **options)
    unknown = [name for name in model.overrides if name not in tree and not hasattr(found, name)]
    if unknown:
        raise ConfigError(
            f"model.overrides: {', '.join(unknown)} is no field of {model.path} ({found.model_type}); the "
            "names are those of its config.json"
        )
    return type(found).from_dict(overridden(tree, model.overrides))


def for_vllm(changed: Any, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's `hf_overrides`, which replace whole values; `changed` is the configuration with ours."""
    fields = {name: value for name, value in overrides.items() if name not in ROPE}
    if len(fields) < len(overrides):
        fields["rope_parameters"] = dict(changed.rope_parameters)
    return fields


def freeze_rope(config: Any, max_model_len: int) -> Any:
    """Transformers' configuration of a model that gets sequences of up to `max_model_len` tokens.

    LongRoPE has the long factors for all of them where one may be longer than the original context, else the
    short ones. It is a copy; what is published keeps both.

    Raises:
        ConfigError: the base of dynamic scaling would grow with the sequence.
    """
    frozen = deepcopy(config)
    for part in {id(part): part for part in (frozen, frozen.get_text_config())}.values():
        context = getattr(part, "max_position_embeddings", None) or max_model_len
        given = getattr(part, "rope_parameters", None)
        found = given if isinstance(given, dict) else {}
        of_layers = [own for own in found.values() if isinstance(own, dict) and "rope_type" in own]
        for parameters in of_layers or [found]:  # one set for each kind of layer, or one for all
            kind = str(parameters.get("rope_type"))
            if kind == "longrope":
                is_long = max_model_len > (parameters.get(ORIGINAL) or context)
                chosen, other = LENGTHS[is_long], LENGTHS[not is_long]
                for name in ("factor", "mscale"):
                    if f"{chosen}_{name}" in parameters:
                        parameters[f"{other}_{name}"] = parameters[f"{chosen}_{name}"]
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
    """Whether a model of this configuration caps its attention scores, in itself or in a part of it."""
    parts = [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    return any(getattr(part, "attn_logit_softcapping", None) is not None for part in (config, *parts))


def exact_attention(config: Any) -> str | None:
    """What to load a model of this configuration with: `eager` where sdpa would compute something else,
    None for transformers' own choice."""
    return "eager" if has_capped_attention(config) else None

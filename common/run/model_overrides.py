"""`model.overrides`: fields of a model's config.json that a run replaces, in trainer, engines and exports.

What stands in config.json is merged before anything is built of it, so that all of them have the same model.
"""

from collections.abc import Mapping
from typing import Any

from tidemill.common.config import ModelConfig
from tidemill.common.errors import ConfigError

ROPE = ("rope_scaling", "rope_parameters")
"""The former and the present name of the same field. The new value replaces the scaling; the base stays."""
ROPE_BASE = ("rope_theta", "partial_rotary_factor")


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
    """The configuration that transformers has read from `model.path`, with the overrides.

    `options` are those that it was read with.

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

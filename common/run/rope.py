"""Rotary positions that depend on a length, decided once, and identically in every service.

Transformers decides by the longest position of a forward pass: what a sequence's tokens get would depend on
what is computed beside it. vLLM decides when it starts, by the longest sequence that it may get.
"""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

from tidemill.common.errors import ConfigError

LENGTHS = ("short", "long")
"""Of the sequences that a set of LongRoPE's factors is for (arXiv 2402.13753)."""


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
        for parameters in _rope_parameters(part):
            kind = str(parameters.get("rope_type"))
            if kind == "longrope":
                _choose(parameters, max_model_len > (parameters.get(ORIGINAL) or context))
            elif "dynamic" in kind:
                original = min(parameters.get(name) or context for name in (ORIGINAL, TRAINED))
                if max_model_len > original:
                    raise ConfigError(
                        f"max_model_len: {max_model_len} exceeds the model's original context of "
                        f"{original}, beyond which its dynamic RoPE gives the same tokens other positions in "
                        "longer sequences. Lower it, or give the model another rope_type"
                    )
    return frozen


ORIGINAL = "original_max_position_embeddings"
TRAINED = "max_trained_positions"
"""vLLM's name of it, for dynamic scaling."""


def _rope_parameters(config: Any) -> Iterator[dict[str, Any]]:
    """One set, or one for each kind of layer."""
    parameters = getattr(config, "rope_parameters", None)
    if isinstance(parameters, dict):
        sets = [own for own in parameters.values() if isinstance(own, dict) and "rope_type" in own]
        yield from sets or [parameters]


def _choose(parameters: dict[str, Any], is_long: bool) -> None:
    chosen, other = LENGTHS[is_long], LENGTHS[not is_long]
    for name in ("factor", "mscale"):
        if f"{chosen}_{name}" in parameters:
            parameters[f"{other}_{name}"] = parameters[f"{chosen}_{name}"]

"""The families of models that see, one row each: how a picture becomes tokens, and what the model needs.

Other families are refused by name: each has traps of its own (docs/images.md), and none is taken on trust.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tidemill.common.errors import ConfigError

CountTokens = Callable[[Any, Any, Mapping[str, Any]], list[int]]
"""Tokens of each picture, from the image processor, the model's config, and what the processor returned."""


def _count_merged_patches(processor: Any, _config: Any, inputs: Mapping[str, Any]) -> list[int]:
    """Qwen's: a token stands for `merge_size` x `merge_size` patches."""
    return [int(grid.prod()) // processor.merge_size**2 for grid in inputs["image_grid_thw"]]


def _count_features(_processor: Any, config: Any, inputs: Mapping[str, Any]) -> list[int]:
    """LLaVA's: a token stands for one feature of the tower. Of 24 x 24 patches, CLIP's tower makes 577
    features, and `default` drops the first: 576 tokens."""
    vision = config.vision_config
    height, width = inputs["pixel_values"].shape[-2:]
    num_features = (height // vision.patch_size) * (width // vision.patch_size)
    # CLIP puts a class token before the patches; SigLIP does not.
    if vision.model_type == "clip_vision_model":
        num_features += 1
    # Whatever it is: of a tower without a class token, the first patch.
    if config.vision_feature_select_strategy == "default":
        num_features -= 1
    return [num_features] * len(inputs["pixel_values"])


@dataclass(frozen=True, slots=True)
class Family:
    """What is particular to a family."""

    model_type: str
    """As in the model's config.json."""
    count_tokens: CountTokens
    keeps_size: bool
    """Whether its processor takes a picture as large as it is, between two numbers of pixels (`size`, whose
    `shortest_edge` and `longest_edge` are numbers of pixels here). Others make all pictures of one size."""
    token_types: Literal["", "mm_token_type_ids"] = ""
    """The model's input that marks the tokens of pictures with 1; without it they are read as text."""
    has_grid_positions: bool = False
    """Whether positions have three axes, which the model's `get_rope_index` computes."""
    more_placeholders: tuple[str, ...] = ()
    """Fields of the model's config with further ids that stand for pixels, beside `image_token_id`."""
    marks: tuple[str, ...] = ()
    """Fields of the model's config with the ids that stand around pictures: no row's text may have them."""


def _qwen(model_type: str) -> Family:
    """Qwen's families differ in their layers, and in nothing that stands here."""
    return Family(
        model_type,
        _count_merged_patches,
        keeps_size=True,
        token_types="mm_token_type_ids",
        has_grid_positions=True,
        more_placeholders=("video_token_id",),
        marks=("vision_start_token_id", "vision_end_token_id"),
    )


FAMILIES = {
    family.model_type: family
    for family in (_qwen("qwen2_5_vl"), _qwen("qwen3_vl"), Family("llava", _count_features, keeps_size=False))
}
"""By `model_type`."""


def family_of(model_type: str) -> Family:
    """Raises ConfigError: the family is not one of those that are proven."""
    family = FAMILIES.get(model_type)
    if family is None:
        raise ConfigError(
            f"model.path is of type {model_type!r}, and pictures work with {', '.join(FAMILIES)}. Take a "
            "model of these, or leave out the section `images` and the pictures of the data."
        )
    return family

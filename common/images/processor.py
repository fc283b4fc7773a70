"""Pictures as the model's inputs, by the image processor of its family, the same on all sides of a run.

Always the class that works with PIL: the one of torchvision, which transformers takes where torchvision is
installed, gives other pixels for some sizes. Tokens are counted from what the processor returns.
"""

import io
import json
import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from tidemill.common.config.images import ImagesConfig
from tidemill.common.errors import ConfigError
from tidemill.common.images.families import Family, family_of
from tidemill.common.images.pictures import MAX_ASPECT
from tidemill.common.wire.arrays import Int32

if TYPE_CHECKING:
    import torch

SMALL = 32
"""Pixels of a side: at least a token of each family."""
Span = tuple[int, int]
"""First token of a picture in the expanded ids, and how many tokens stand for it."""
VOLATILE = ("transformers_version", "_processor_class", "processor_class", "auto_map")
"""Keys of a processor's config that do not change what it computes."""


class PictureProcessor:
    """Wraps the image processor of a model. Threads may share it."""

    def __init__(self, family: Family, processor: Any, config: Any, limits: dict[str, int]) -> None:
        """`processor` and `config` are the library's, `limits` the least and most pixels of a picture,
        as the processor's `size`; empty for a family that makes all pictures of one size."""
        self.family = family
        self.image_processor = processor
        self._config = config
        self.call_kwargs: dict[str, Any] = {"size": limits} if limits else {}
        """Keywords for each call of the processor; vLLM needs the same (`mm_processor_kwargs`)."""
        self.name = type(processor).__name__
        self.placeholder_id = int(config.image_token_id)
        more = [int(getattr(config, field)) for field in family.more_placeholders]
        self.banned_ids = tuple(sorted({self.placeholder_id, *more}))
        """Ids that stand for pixels: never sampled, never trained."""
        marks = [int(getattr(config, field)) for field in family.marks]
        self.reserved_ids = (self.placeholder_id, *more, *marks)
        """Ids that no text of a row may contain; the placeholder first."""
        settings = {key: value for key, value in processor.to_dict().items() if key not in VOLATILE}
        described = json.dumps([self.name, settings, self.call_kwargs], sort_keys=True, default=str)
        self.digest = xxhash.xxh3_128_hexdigest(described.encode())
        """Of class and config: two processors of one digest make the same pixels."""
        self._num_tokens_of_size: dict[tuple[int, int], int] = {}

    def pixels(self, pictures: Sequence[bytes]) -> "dict[str, torch.Tensor]":
        """The model's inputs for the stored pictures of one row, such as `pixel_values` and
        `image_grid_thw`. Raises ValueError: the processor refuses one."""
        return self._process([open_png(png) for png in pictures])

    def blank(self) -> "dict[str, torch.Tensor]":
        """The model's inputs for a small picture."""
        from PIL import Image

        return self._process([Image.new("RGB", (SMALL, SMALL))])

    def num_tokens(self, pictures: Sequence[bytes]) -> list[int]:
        """How many tokens stand for each picture. Raises ValueError: the processor refuses one."""
        return [self.num_tokens_of(*size_of(png)) for png in pictures]

    def has_counted(self, width: int, height: int) -> bool:
        """Whether `num_tokens_of` knows this size, and returns at once."""
        return (width, height) in self._num_tokens_of_size

    def num_tokens_of(self, width: int, height: int) -> int:
        """How many tokens stand for a picture of this size, by what the processor returns for one: they
        depend on nothing else. Raises ValueError: the processor refuses it."""
        size = (width, height)
        if size not in self._num_tokens_of_size:
            from PIL import Image

            inputs = self._process([Image.new("RGB", size)])
            (self._num_tokens_of_size[size],) = self.family.count_tokens(
                self.image_processor, self._config, inputs
            )
        return self._num_tokens_of_size[size]

    def most_tokens(self) -> int:
        """A bound on the tokens of a picture, whatever its size, of those that the door lets in.

        Example: 1,280 for at most 1,003,520 pixels, of which a token stands for 28 x 28.
        """
        if not self.family.keeps_size:
            return self.num_tokens_of(SMALL, SMALL)  # all are made of one size
        # Both sides become multiples of that of a token; then the product is below the bound, but for strips.
        side = int(self.image_processor.patch_size) * int(self.image_processor.merge_size)
        longest = int(self.call_kwargs["size"]["longest_edge"])
        shortest = int(self.call_kwargs["size"]["shortest_edge"])
        # As high as one token, however small that makes it; of less than half of it, it would be enlarged.
        num_of_strip = math.ceil(min(math.sqrt(longest * MAX_ASPECT) / side, 2 * longest / side**2))
        # Sides of a picture that is enlarged are rounded up.
        root = math.sqrt(shortest) / side
        num_enlarged = math.floor((root * math.sqrt(MAX_ASPECT) + 1) * (root / math.sqrt(MAX_ASPECT) + 1))
        return max(longest // side**2, num_of_strip, num_enlarged)

    def expand(self, ids: Sequence[int] | Int32, pictures: Sequence[bytes]) -> tuple[Int32, list[Span]]:
        """The ids with each placeholder repeated for all tokens of its picture, and these tokens' spans.

        Raises:
            ValueError: there are more or fewer placeholders than pictures, two have no text between them, or
                the processor refuses a picture.
        """
        return self.expand_sizes(ids, [size_of(png) for png in pictures])

    def expand_sizes(
        self, ids: Sequence[int] | Int32, sizes: Sequence[tuple[int, int]]
    ) -> tuple[Int32, list[Span]]:
        """Like `expand`, for pictures of these widths and heights."""
        places = np.flatnonzero(np.asarray(ids) == self.placeholder_id).tolist()
        if len(places) != len(sizes):
            raise ValueError(f"it has {len(sizes)} pictures and {len(places)} placeholders for them")
        if any(second == first + 1 for first, second in pairwise(places)):
            raise ValueError("two pictures have no text between them, and would count as one")
        counts = np.ones(len(ids), dtype=np.int64)
        counts[places] = [self.num_tokens_of(width, height) for width, height in sizes]
        expanded = np.repeat(np.asarray(ids, dtype=np.int32), counts)
        starts = np.cumsum(counts) - counts
        return expanded, [(int(starts[index]), int(counts[index])) for index in places]

    def _process(self, pictures: Sequence[Any]) -> dict[str, Any]:
        return dict(self.image_processor(images=pictures, return_tensors="pt", **self.call_kwargs))


def open_png(png: bytes) -> Any:
    """A stored picture as PIL's, with its pixels loaded."""
    from PIL import Image

    picture = Image.open(io.BytesIO(png), formats=["PNG"])
    picture.load()
    return picture


def size_of(png: bytes) -> tuple[int, int]:
    """Width and height of a stored picture, from its header."""
    # Signature (8 bytes), length and name of the first chunk (8), then both as 4 bytes.
    return int.from_bytes(png[16:20], "big"), int.from_bytes(png[20:24], "big")


def load_processor(model_path: str | Path, images: ImagesConfig) -> PictureProcessor:
    """The processor of a model folder or hub name.

    Raises:
        ConfigError: the family is not one of ours, or there is no processor that can be loaded.
    """
    try:
        from transformers import AutoConfig, AutoImageProcessor

        config = AutoConfig.from_pretrained(str(model_path))
        family = family_of(config.model_type)
        processor = AutoImageProcessor.from_pretrained(str(model_path), backend="pil")
    except (OSError, ValueError, KeyError, ImportError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(
            f"model folder {model_path} has no image processor that can be loaded: {lines[0]} Put "
            "preprocessor_config.json beside the model; the package pillow is needed."
        ) from None
    if not type(processor).__name__.endswith("Pil"):
        raise ConfigError(
            f"the image processor of {model_path} is {type(processor).__name__}; expected the class of its "
            "family that works with PIL, which this release of transformers does not have."
        )
    limits = {}
    if family.keeps_size:
        least = images.min_pixels or int(processor.size["shortest_edge"])
        # Both edges: one alone is refused by one class, and another one in its place taken by the next.
        limits = {"shortest_edge": min(least, images.max_pixels), "longest_edge": images.max_pixels}
    return PictureProcessor(family, processor, config, limits)

"""The pictures of a prompt on the wire: a digest, a size, and the tokens that stand for each.

Pixels are never in a message: the bytes lie in the run's store of images, named by their digest.
"""

from collections.abc import Sequence

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from tidemill.common.wire.arrays import Int32

PICTURES_FAULT = "its pictures: "
PLACEHOLDER_FAULT = "its placeholders: "
"""How faults of a sample begin whose pictures cannot be had, and of one whose tokens stand for others."""


class Image(BaseModel):
    """One picture of a prompt.

    Example: `digest` of a PNG of 1,204 bytes, `width` 56, `height` 56, `first` 15, `num_tokens` 4: the tokens
    15 to 18 of `prompt_ids` stand for it.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")
    digest: str = Field(pattern=r"^[0-9a-f]{32}$", description="xxh3-128 of the stored bytes")
    num_bytes: int = Field(ge=1)
    width: int = Field(ge=1, description="of the stored picture, in pixels")
    height: int = Field(ge=1)
    first: int = Field(ge=0, description="index in `prompt_ids` of the first token that stands for it")
    num_tokens: int = Field(ge=1, description="so many tokens stand for it")

    @property
    def end(self) -> int:
        """The token after its last one."""
        return self.first + self.num_tokens


def check_images(images: Sequence[Image], num_prompt_tokens: int) -> None:
    """Raises ValueError: the tokens of two pictures overlap, are not in order, or are outside of the
    prompt."""
    end = 0
    for position, image in enumerate(images):
        if image.first < end:
            raise ValueError(f"image {position} begins at token {image.first}, before token {end}")
        end = image.end
    if end > num_prompt_tokens:
        raise ValueError(f"an image ends at token {end} of a prompt of {num_prompt_tokens}")


def collapse(prompt_ids: Int32, images: Sequence[Image], placeholder_id: int) -> Int32:
    """The ids [C] before expansion: one placeholder for each picture.

    Example: [5, 9, 9, 9, 6] with a picture at tokens 1 to 3 and placeholder 9 is [5, 9, 6].
    """
    pieces = []
    end = 0
    for image in images:
        pieces.append(prompt_ids[end : image.first])
        pieces.append(np.array([placeholder_id], dtype=np.int32))
        end = image.end
    pieces.append(prompt_ids[end:])
    return np.concatenate(pieces)

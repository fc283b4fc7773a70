"""The pictures of a prompt or a session on the wire: a digest, a size, and the tokens that stand for each.

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
    """One picture of a prompt, or of what follows it in a session.

    Example: `digest` of a PNG of 1,204 bytes, `width` 56, `height` 56, `first` 15, `num_tokens` 4: the tokens
    15 to 18 stand for it. Of a prompt of 30 tokens that is a part of the prompt, of one of 10 it is a part of
    the completion: an environment has shown it, and no version has written its tokens.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")
    digest: str = Field(pattern=r"^[0-9a-f]{32}$", description="xxh3-128 of the stored bytes")
    num_bytes: int = Field(ge=1)
    width: int = Field(ge=1, description="of the stored picture, in pixels")
    height: int = Field(ge=1)
    first: int = Field(ge=0, description="first token that stands for it, in prompt and completion together")
    num_tokens: int = Field(ge=1, description="so many tokens stand for it")
    segment: int = Field(
        0, ge=0, description="the segment of its session whose tokens these are", exclude_if=lambda at: not at
    )

    @property
    def end(self) -> int:
        """The token after its last one."""
        return self.first + self.num_tokens


def check_images(images: Sequence[Image], lengths: Sequence[int]) -> None:
    """Check pictures against segments with so many tokens each. A prompt is one segment.

    Raises:
        ValueError: the tokens of two pictures overlap, are not in order, or are outside of their segment.
    """
    segment = 0
    end = 0
    for position, image in enumerate(images):
        if image.segment > segment:
            segment = image.segment
            end = 0
        if image.segment < segment or image.first < end:
            raise ValueError(
                f"image {position} begins at token {image.first} of segment {image.segment}, before token "
                f"{end} of segment {segment}"
            )
        if segment >= len(lengths):
            raise ValueError(f"image {position} is in segment {segment}, and there are {len(lengths)}")
        end = image.end
        if end > lengths[segment]:
            raise ValueError(f"an image ends at token {end} of a segment of {lengths[segment]} tokens")


def images_of(images: Sequence[Image], segment: int) -> tuple[Image, ...]:
    """The pictures of one segment, given by its number."""
    return tuple(image for image in images if image.segment == segment)


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

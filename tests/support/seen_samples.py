"""Samples whose prompts have pictures, for rewards that see: plain colours, in a run's store."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image as PilImage

from tests.support.trajectories import make_trajectory
from tests.support.vision import file_of, image_of
from tidemill.common.images.store import ImageStore
from tidemill.common.wire.images import Image
from tidemill.common.wire.messages import Trajectory

RED = (255, 0, 0)
GREEN = (0, 255, 0)
BLUE = (0, 0, 255)
NUM_TOKENS = 2
"""That stand for a picture."""
SIZE = (8, 6)
"""Width and height."""

Colour = tuple[int, int, int]


def png_of(colour: Colour) -> bytes:
    return file_of(PilImage.new("RGB", SIZE, colour))


def store_picture(store: ImageStore, png: bytes, first: int) -> Image:
    """The picture of a prompt, whose tokens begin with this one."""
    store.put(png)
    return image_of(png, first, NUM_TOKENS)


def seen_trajectory(
    store: ImageStore, colours: Sequence[Colour], ticket: int = 0, index: int = 0, **fields: Any
) -> Trajectory:
    """A completion of a prompt with pictures of these colours, which are in the store then."""
    images = [
        store_picture(store, png_of(colour), number * NUM_TOKENS) for number, colour in enumerate(colours)
    ]
    ids = np.arange(4 + NUM_TOKENS * len(colours), dtype=np.int32)
    content = [*({"type": "image"} for _ in colours), {"type": "text", "text": "Which colours?"}]
    extra = {"prompt": [{"role": "user", "content": content}]}
    fields = {"extra": extra, "prompt_ids": ids} | fields
    return make_trajectory(ticket, index, images=tuple(images), **fields)

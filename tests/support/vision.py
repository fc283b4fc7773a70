"""Pictures of noise, and files of them."""

import io
from typing import Any

import numpy as np
from PIL import Image as PilImage


def noise(width: int, height: int, seed: int = 0) -> PilImage.Image:
    """A picture without two equal patches."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return PilImage.fromarray(pixels)


def file_of(picture: PilImage.Image, kind: str = "PNG", **settings: Any) -> bytes:
    """The bytes of a file with a picture."""
    buffer = io.BytesIO()
    picture.save(buffer, kind, **settings)
    return buffer.getvalue()


def png_of(seed: int, width: int = 56, height: int = 56) -> bytes:
    """The file of a picture of noise."""
    return file_of(noise(width, height, seed))

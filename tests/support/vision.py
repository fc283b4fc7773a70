"""Pictures of noise, files of them, and what messages say of a file."""

import io
from typing import Any

import numpy as np
import xxhash
from PIL import Image as PilImage

from tidemill.common.images.processor import size_of
from tidemill.common.wire.images import Image


def noise(width: int, height: int, seed: int = 0) -> PilImage.Image:
    """A picture without two equal patches."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return PilImage.fromarray(pixels)


def file_of(picture: PilImage.Image, kind: str = "PNG", **settings: Any) -> bytes:
    """The bytes of a file with a picture."""
    buffer = io.BytesIO()
    picture.save(buffer, kind, **settings)
    return buffer.getvalue()


def image_of(png: bytes, first: int, num_tokens: int) -> Image:
    """A stored file on the wire, with so many tokens from this one on."""
    width, height = size_of(png)
    return Image(
        digest=xxhash.xxh3_128_hexdigest(png),
        num_bytes=len(png),
        width=width,
        height=height,
        first=first,
        num_tokens=num_tokens,
    )


def png_of(seed: int, width: int = 56, height: int = 56) -> bytes:
    """The file of a picture of noise."""
    return file_of(noise(width, height, seed))

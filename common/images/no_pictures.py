"""Recognises pictures in the data of a run that takes none, and refuses them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tidemill.common.errors import ConfigError

WEB = ("http", "https")
SUFFIXES = {
    ".png": "PNG",
    ".jpg": "JPEG",
    ".jpeg": "JPEG",
    ".webp": "WEBP",
    ".gif": "GIF",
    ".bmp": "BMP",
    ".tif": "TIFF",
    ".tiff": "TIFF",
}
IMAGES = ("images", "image")
"""The first of these columns that a row has holds its pictures."""
NO_SECTION = (
    "the run has no section `images`: add `images: {}` to train a model that sees, or leave the column out "
    "of the file"
)
NOT_IMITATED = (
    "demonstrations with pictures cannot be trained: take rows without them, or make it a source of prompts"
)


def looks_like_pictures(value: Any) -> bool:
    """Whether a column can only hold pictures: bytes with their path, as `datasets` writes them."""
    first = value[0] if isinstance(value, list) and value else value
    return isinstance(first, Mapping) and set(first) == {"bytes", "path"}


def names_pictures(value: Any) -> bool:
    """Whether the value of a column that is called `images` or `image` holds or names pictures, and not, say,
    the image of a container."""
    first = value[0] if isinstance(value, list) and value else value
    if isinstance(first, bytes):
        return True
    if not isinstance(first, str):
        return False
    scheme, separator, _ = first.lower().partition("://")
    is_url = bool(separator) and scheme in WEB
    return is_url or first.startswith("data:image/") or Path(first).suffix.lower() in SUFFIXES


def check_no_pictures(columns: Mapping[str, Any], origin: str, reason: str) -> None:
    """Raises ConfigError: a column has pictures, which the model would not see, and whose pixels would go
    through Redis."""
    for name, value in columns.items():
        if looks_like_pictures(value) or (name in IMAGES and names_pictures(value)):
            raise ConfigError(f"{origin}: column {name!r} holds pictures, and {reason}.")

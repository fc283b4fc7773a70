"""Where the pictures of a data row are: their bytes, a file, or a URL."""

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from tidemill.common.images.no_pictures import SUFFIXES, WEB

MEDIA_TYPES = {
    "image/png": "PNG",
    "image/jpeg": "JPEG",
    "image/jpg": "JPEG",
    "image/webp": "WEBP",
    "image/gif": "GIF",
    "image/bmp": "BMP",
    "image/tiff": "TIFF",
}


@dataclass(frozen=True, slots=True)
class ImageSource:
    """One of `content`, `path` and `url`; or `fault`, why there is none.

    Example: `path` "shapes/7.png" and `label` "PNG" of a row of JSON; `content` alone of a row of Parquet.
    """

    content: bytes | None = None
    path: str = ""
    url: str = ""
    label: str = ""
    """The format that its name says; empty where it says none."""
    fault: str = ""

    @property
    def name(self) -> str:
        """What it is called in messages."""
        return self.path or self.url or "a picture in the data"


def parse_source(value: Any, base: Path) -> ImageSource:
    """The source in a value of a data set.

    Args:
        value: a path relative to `base`, a URL (`http`, `https`, `file`, `data`), bytes, or an object with
            one of these under `bytes` and `path` (Parquet of verl, TRL and datasets), `image`, `image_url`
            or `url`.
        base: the folder of the data file.
    """
    if isinstance(value, bytes):
        return ImageSource(content=value)
    if isinstance(value, str):
        return _parse_text(value, base)
    if not isinstance(value, Mapping):
        return ImageSource(fault=f"it is {type(value).__name__}; expected a path, a URL, or bytes")
    if value.get("bytes") is not None:
        return parse_source(value["bytes"], base)
    for key in ("path", "image", "image_url", "url"):
        if value.get(key) is not None:
            return parse_source(value[key], base)
    return ImageSource(fault=f"it has neither bytes nor a path; its keys are {sorted(map(str, value))}")


def _parse_text(text: str, base: Path) -> ImageSource:
    if not text.strip():
        return ImageSource(fault="its path is empty")
    if text.startswith("data:"):
        return _parse_data_url(text)
    scheme, separator, _ = text.partition("://")
    if separator and scheme.lower() in WEB:
        return ImageSource(url=text)
    path = text
    if separator:
        if scheme.lower() != "file":
            return ImageSource(fault=f"its address has the scheme {scheme!r}; expected http, https or file")
        path = unquote(urlsplit(text).path)
    return ImageSource(path=str(base / path), label=SUFFIXES.get(Path(path).suffix.lower(), ""))


def _parse_data_url(url: str) -> ImageSource:
    head, comma, payload = url.partition(",")
    media_type, *parameters = head.removeprefix("data:").split(";")
    if not comma or "base64" not in parameters:
        return ImageSource(fault="its data URL is not in base64")
    try:
        content = base64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError):
        return ImageSource(fault="the base64 of its data URL is damaged")
    return ImageSource(content=content, label=MEDIA_TYPES.get(media_type.lower(), ""))

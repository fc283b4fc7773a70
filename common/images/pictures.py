"""One form for all pictures: PNG, RGB with 8 bits a channel, upright, bounded, nothing beside the pixels.

Made once, before anything else sees the picture, because libraries disagree about everything else: what is
under an alpha channel, whether an orientation tag counts, what 16 bits mean (docs/images.md). Whatever is not
plainly one still picture is refused with a reason.
"""

import contextlib
import errno
import importlib
import io
import math
from collections.abc import Iterator
from dataclasses import dataclass
from threading import Condition
from typing import Any

from tidemill.common.errors import BrokenImageError, ConfigError

FORM = "png1"
"""Name of this form. Another form of the same picture has another name."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
PHONE_FORMAT = "MPO"
"""A JPEG file with further pictures behind the first one, such as previews; the first one counts."""
READERS = (
    "_webp",
    "PngImagePlugin",
    "JpegImagePlugin",
    "MpoImagePlugin",
    "WebPImagePlugin",
    "GifImagePlugin",
    "BmpImagePlugin",
    "TiffImagePlugin",
)
"""PIL's modules for `FORMATS`; each after those that it uses."""
MAX_SOURCE_PIXELS = 1 << 26
"""Most pixels of a picture before it is reduced: 192 MiB in memory, and with PIL's copies about 1 GiB."""
MAX_PIXELS_AT_ONCE = 2 * MAX_SOURCE_PIXELS
"""Most pixels of all pictures that threads of a process decode at the same time."""
MAX_ASPECT = 200
"""Longest side over shortest: Qwen's processor refuses more."""
DEEP_MODES = ("I", "F")
"""Beginnings of PIL's modes of more than 8 bits: it cuts their values off at 255."""
ALPHA_MODES = ("LA", "La", "PA", "RGBA", "RGBa")
SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors of this machine: no descriptor or memory is left."""
WHITE = (255, 255, 255)
COMPRESS_LEVEL = 1
"""Of zlib: the fastest; others take several times as long for a tenth of the bytes."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture in our form."""

    png: bytes
    width: int
    height: int


class PixelBudget:
    """Bounds the pixels that threads decode at the same time, and so their memory."""

    def __init__(self, num_pixels: int) -> None:
        self._num_free = num_pixels
        self._changed = Condition()

    @contextlib.contextmanager
    def holding(self, num_pixels: int) -> Iterator[None]:
        """Waits until so many pixels are free, which must not be more than there are at all."""
        with self._changed:
            self._changed.wait_for(lambda: num_pixels <= self._num_free)
            self._num_free -= num_pixels
        try:
            yield
        finally:
            with self._changed:
                self._num_free += num_pixels
                self._changed.notify_all()


_BUDGET = PixelBudget(MAX_PIXELS_AT_ONCE)
"""Of the whole process, as its memory is."""


def make_picture(content: bytes, max_pixels: int, label: str = "") -> Picture:
    """A picture of a file's content.

    Args:
        content: the bytes of a file in one of `FORMATS`.
        max_pixels: a larger picture is reduced to so many.
        label: the format that its name or its server says, one of `FORMATS`; empty where nothing does.

    Raises:
        BrokenImageError: it is empty, damaged, of another format than its label, animated, too large, too
            narrow, or has more than 8 bits a channel.
        ConfigError: pillow is not installed.
        OSError, MemoryError, ImportError: this machine is short of something (`is_shortage`).
    """
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ModuleNotFoundError:
        raise ConfigError(
            "pictures need the package pillow, which is not installed here: pip install pillow"
        ) from None
    if not content:
        raise BrokenImageError("it is empty")
    _import_readers()
    try:
        source = Image.open(io.BytesIO(content), formats=FORMATS)
        _check_header(source, label)
        with _BUDGET.holding(source.width * source.height):
            source.load()
            upright = ImageOps.exif_transpose(source)
            picture = _reduced(_to_rgb(upright), max_pixels)
            # Only the pixels: PIL would write colour profiles and other data that came with them.
            picture.info = {}
            buffer = io.BytesIO()
            picture.save(buffer, "PNG", compress_level=COMPRESS_LEVEL)
    except BrokenImageError:
        raise
    except Image.DecompressionBombError:
        raise BrokenImageError(_too_large("far more")) from None
    except Exception as error:  # PIL's readers raise many kinds for damaged bytes
        if is_shortage(error):
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        if isinstance(error, UnidentifiedImageError):
            reason = f"it is none of {', '.join(FORMATS)} (it begins with {content[:12]!r})"
        raise BrokenImageError(f"it cannot be decoded: {reason}") from None
    return Picture(buffer.getvalue(), picture.width, picture.height)


def is_shortage(error: Exception) -> bool:
    """Whether an exception of `make_picture` says that the machine is short of something."""
    # An ImportError is of a library that is installed and cannot be opened or mapped now.
    is_of_machine = isinstance(error, MemoryError | ImportError)
    return is_of_machine or getattr(error, "errno", None) in SHORTAGES


def _import_readers() -> None:
    """Import PIL's readers. Raises OSError, ImportError: one of them cannot be imported now."""
    # PIL itself goes on without a reader that could not be imported, until the process ends: after a
    # shortage of descriptors or memory it would refuse sound pictures for ever.
    for name in READERS:
        # A PIL may have been built without WebP; such a picture is refused, with PIL's reason.
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(f"PIL.{name}")


def _check_header(source: Any, label: str) -> None:
    """Raises BrokenImageError: it is none of ours, which can be seen before pixels are decoded."""
    is_of_phone = source.format == PHONE_FORMAT
    kind = "JPEG" if is_of_phone else source.format
    if label and label != kind:
        raise BrokenImageError(f"it is labelled {label}, and its content is {kind}")
    width, height = source.size
    if not width or not height:
        raise BrokenImageError(f"it has no pixels: {width} x {height}")
    if width * height > MAX_SOURCE_PIXELS:
        raise BrokenImageError(_too_large(f"{width} x {height}"))
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise BrokenImageError(
            f"it is {width} x {height}: one side is more than {MAX_ASPECT} times as long as the other"
        )
    num_frames = 1 if is_of_phone else getattr(source, "n_frames", 1)
    if num_frames > 1:
        raise BrokenImageError(f"it has {num_frames} frames or pages, and only still pictures are taken")
    if source.mode.startswith(DEEP_MODES):
        raise BrokenImageError(
            f"it has more than 8 bits a channel (mode {source.mode}), whose range only you know; scale it to "
            "8 bits"
        )


def _to_rgb(picture: Any) -> Any:
    """In RGB, with white under what is transparent, as vLLM does it."""
    from PIL import Image

    if picture.mode not in ALPHA_MODES and "transparency" not in picture.info:
        return picture.convert("RGB")
    layered = picture.convert("RGBA")
    flat = Image.new("RGB", layered.size, WHITE)
    flat.paste(layered, mask=layered.getchannel("A"))
    return flat


def _reduced(picture: Any, max_pixels: int) -> Any:
    from PIL import Image

    width, height = picture.size
    if width * height <= max_pixels:
        return picture
    scale = math.sqrt(max_pixels / (width * height))
    size = (max(1, math.floor(width * scale)), max(1, math.floor(height * scale)))
    return picture.resize(size, Image.Resampling.BICUBIC)


def _too_large(size: str) -> str:
    return f"it has {size} pixels, and at most {MAX_SOURCE_PIXELS:,} are decoded"

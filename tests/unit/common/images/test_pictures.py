"""Pictures at the door: one form for all, and a reason for each that is refused."""

import errno
import io
import struct
import subprocess
import sys
import zlib
from textwrap import dedent
from threading import Thread
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps, PngImagePlugin

from tests.support.vision import file_of, noise
from tidemill.common.errors import BrokenImageError
from tidemill.common.images import pictures as module
from tidemill.common.images.pictures import MAX_SOURCE_PIXELS, PixelBudget, make_picture

LARGE = 1 << 20
SHORT_OF_MEMORY = dedent("""
    import contextlib, importlib, resource, sys
    from pathlib import Path
    from PIL import Image
    from tidemill.common.images.pictures import is_shortage, make_picture

    for name in Image._plugins:
        if name != "WebPImagePlugin":
            with contextlib.suppress(ModuleNotFoundError):  # of packages that a format needs
                importlib.import_module(f"PIL.{name}")
    content = Path(sys.argv[1]).read_bytes()
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = num_pages * resource.getpagesize() + (200 << 10)  # no library of 1 MB can be mapped
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    try:
        make_picture(content, 1000)
    except Exception as error:
        print(is_shortage(error), error)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    print(make_picture(content, 1000).width)
""")


def pixels_of(png: bytes) -> np.ndarray[Any, Any]:
    picture = Image.open(io.BytesIO(png))
    assert (picture.format, picture.mode) == ("PNG", "RGB")
    assert not picture.info, "nothing beside the pixels"
    return np.asarray(picture)


def made(content: bytes, max_pixels: int = LARGE, label: str = "") -> np.ndarray[Any, Any]:
    picture = make_picture(content, max_pixels, label)
    pixels = pixels_of(picture.png)
    assert pixels.shape == (picture.height, picture.width, 3)
    return pixels


def reason_of(content: bytes, max_pixels: int = LARGE, label: str = "") -> str:
    with pytest.raises(BrokenImageError) as caught:
        make_picture(content, max_pixels, label)
    return str(caught.value)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_of(width: int, height: int, depth: int = 8, colour: int = 2, data: bytes = b"") -> bytes:
    """A PNG whose header says this, whatever its data is."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    end = chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + end


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "GIF", "WEBP"])
def test_formats_without_loss_keep_their_pixels_and_nothing_else(kind):
    picture = noise(20, 30)
    if kind == "GIF":
        picture = picture.quantize(64)
    settings = {"lossless": True} if kind == "WEBP" else {}
    content = file_of(picture, kind, **settings)
    assert np.array_equal(made(content, label=kind), np.asarray(picture.convert("RGB")))


def test_a_jpeg_is_what_pil_decodes_without_its_profile_and_comments():
    content = file_of(noise(20, 30), "JPEG", icc_profile=b"x" * 200, comment=b"by me", dpi=(72, 72))
    assert np.array_equal(made(content), np.asarray(Image.open(io.BytesIO(content)).convert("RGB")))
    tagged = PngImagePlugin.PngInfo()
    tagged.add_text("prompt", "hidden")
    content = file_of(noise(20, 30), "PNG", pnginfo=tagged, icc_profile=b"x" * 200)
    assert b"hidden" not in make_picture(content, LARGE).png
    assert np.array_equal(made(content), np.asarray(noise(20, 30)))


def test_the_same_file_gives_the_same_bytes():
    content = file_of(noise(50, 40), "JPEG")
    assert make_picture(content, 900) == make_picture(content, 900)


def test_white_is_put_under_what_is_transparent_in_any_mode():
    pixels = np.zeros((2, 3, 4), np.uint8)
    pixels[0] = (200, 100, 50, 255)
    pixels[1] = (200, 100, 50, 0)
    pixels[1, 2] = (0, 0, 0, 51)
    rgba = made(file_of(Image.fromarray(pixels)))
    assert (rgba[0] == (200, 100, 50)).all() and (rgba[1, :2] == 255).all()
    assert (rgba[1, 2] == 204).all(), "a fifth of black over white"
    grey = made(file_of(Image.fromarray(pixels[:, :, [0, 3]])))
    assert (grey[1, :2] == 255).all() and (grey[0] == 200).all()
    palette = Image.fromarray(np.array([[0, 1]], np.uint8), "P")
    palette.putpalette([10, 20, 30, 40, 50, 60])
    for kind in ("PNG", "GIF"):
        assert made(file_of(palette, kind, transparency=1)).tolist() == [[[10, 20, 30], [255, 255, 255]]]
    assert made(file_of(Image.new("RGB", (1, 1), (1, 2, 3)), transparency=(1, 2, 3))).tolist() == [
        [[255] * 3]
    ]
    assert made(file_of(Image.new("L", (1, 1), 7))).tolist() == [[[7, 7, 7]]]
    assert made(file_of(Image.new("1", (1, 1), 1))).tolist() == [[[255, 255, 255]]]
    assert made(file_of(Image.new("CMYK", (8, 8)), "JPEG")).shape == (8, 8, 3)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["PNG", "TIFF", "WEBP"])
def test_a_picture_is_turned_upright_once_and_its_tag_is_gone(orientation, kind):
    picture = noise(20, 30)
    tags = picture.getexif()
    tags[0x0112] = orientation
    settings = {"lossless": True} if kind == "WEBP" else {}
    content = file_of(picture, kind, exif=tags, **settings)
    expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(content))))
    upright = make_picture(content, LARGE)
    assert np.array_equal(pixels_of(upright.png), expected)
    assert (upright.width, upright.height) == ((20, 30) if orientation < 5 else (30, 20))
    assert make_picture(upright.png, LARGE) == upright, "what is in our form stays as it is"


def test_a_large_picture_is_reduced_to_the_bound_and_keeps_its_aspect():
    for width, height in ((100, 50), (31, 217), (3, 400)):
        picture = make_picture(file_of(noise(width, height)), 1000)
        assert picture.width * picture.height <= 1000
        assert (
            abs(picture.width / picture.height - width / height) < 0.1 * width / height + 1 / picture.height
        )
    assert made(file_of(noise(10, 100)), 1000).shape == (100, 10, 3), "exactly the bound"


def test_the_first_picture_of_a_phones_file_counts_and_animations_are_refused():
    def several(kind: str) -> bytes:
        # PIL notes settings of a format on a picture that it saves, so each file has pictures of its own.
        return file_of(noise(20, 30), kind, save_all=True, append_images=[noise(20, 30, 1)])

    phone = several("MPO")
    assert np.array_equal(made(phone, label="JPEG"), np.asarray(Image.open(io.BytesIO(phone)).convert("RGB")))
    for kind in ("GIF", "PNG", "WEBP", "TIFF"):
        assert "frames or pages" in reason_of(several(kind)), kind


@pytest.mark.parametrize(
    "content, words",
    [
        (b"", "empty"),
        (b"<html>Not found</html>", "none of PNG"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "none of PNG"),
        (b"\x89PNG\r\n\x1a\n", "decoded"),
        (file_of(noise(40, 40))[:-700], "decoded"),
        (file_of(noise(40, 40), "JPEG")[:-300], "truncated"),
        (file_of(noise(40, 40), "BMP")[:-300], "truncated"),
        (file_of(noise(40, 40), "WEBP")[:-300], "decoded"),
        (file_of(noise(40, 40), "TIFF")[:-300], ""),
        (file_of(noise(40, 40).quantize(), "GIF")[:-300], ""),
        (file_of(noise(40, 40)).replace(b"IDAT", b"IDXT", 1), ""),
        (png_of(0, 5), ""),
        (png_of(5, 0), ""),
        (png_of(5, 5, data=b"\0"), "decoded"),
        (png_of(20_000, 20_000), "pixels"),
        (png_of(8193, 8192), "8193 x 8192"),
        (png_of(1000, 4), "200 times"),
        (file_of(Image.fromarray(np.full((4, 4), 40_000, np.uint16))), "8 bits"),
        (file_of(Image.fromarray(np.full((4, 4), 0.5, np.float32)), "TIFF"), "8 bits"),
        (file_of(Image.fromarray(np.full((4, 4), 70_000, np.int32)), "TIFF"), "8 bits"),
    ],
)
def test_what_is_no_plain_still_picture_is_refused_with_a_reason(content, words):
    assert words in reason_of(content)


def test_a_picture_that_is_too_large_is_refused_before_it_is_decoded(monkeypatch):
    monkeypatch.setattr(PngImagePlugin.PngImageFile, "load", None)  # would be called
    width = MAX_SOURCE_PIXELS // 8192
    assert "decoded" in reason_of(png_of(width + 1, 8192))


def test_a_label_that_is_wrong_is_refused():
    content = file_of(noise(4, 4), "JPEG")
    assert reason_of(content, label="PNG") == "it is labelled PNG, and its content is JPEG"
    assert made(content, label="JPEG").shape == (4, 4, 3)


def test_a_file_of_other_formats_is_not_even_opened():
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 4\n%%EndComments\n"
    assert "none of PNG" in reason_of(eps)
    assert "none of PNG" in reason_of(file_of(noise(4, 4), "PPM"))


def test_a_shortage_of_the_machine_says_nothing_about_the_picture(monkeypatch):
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    content = file_of(noise(56, 56))
    # PIL imports its readers with the first picture.
    monkeypatch.setattr(Image, "open", refuse)
    with pytest.raises(OSError, match="Too many open files"):
        make_picture(content, LARGE)


def test_a_reader_that_cannot_be_imported_for_a_while_refuses_no_picture_later(tmp_path):
    path = tmp_path / "a.webp"
    path.write_bytes(file_of(noise(8, 6), "WEBP"))
    command = [sys.executable, "-c", SHORT_OF_MEMORY, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    first, later = done.stdout.splitlines()
    assert first.startswith("True"), done.stdout + done.stderr
    assert later == "8"


def test_pixels_that_threads_decode_at_the_same_time_are_bounded(monkeypatch):
    budget = PixelBudget(MAX_SOURCE_PIXELS)
    monkeypatch.setattr(module, "_BUDGET", budget)
    content = file_of(noise(10, 10))
    order = []

    def make() -> None:
        make_picture(content, LARGE)
        order.append("made")

    thread = Thread(target=make)
    with budget.holding(MAX_SOURCE_PIXELS - 99):
        thread.start()
        while thread.is_alive() and not budget._changed._waiters:
            pass
        order.append("freed")
    thread.join()
    assert order == ["freed", "made"]
    with budget.holding(MAX_SOURCE_PIXELS):
        pass  # all are free again

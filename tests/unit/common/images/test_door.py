"""The door and the store: each picture made once, stored once, and read as it was stored."""

import asyncio
import base64
import errno
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.vision import file_of, noise
from tidemill.common.config.images import ImagesConfig
from tidemill.common.errors import BrokenImageError, StoreError, UnreadableError
from tidemill.common.files import StorageError
from tidemill.common.images import door as module
from tidemill.common.images import store as store_module
from tidemill.common.images.door import NOTES_FILE, ImageDoor, StoredPicture
from tidemill.common.images.fetching import Fetched
from tidemill.common.images.pictures import make_picture
from tidemill.common.images.sources import ImageSource, parse_source
from tidemill.common.images.store import ImageStore, read_images
from tidemill.common.wire.images import Image

CONFIG = ImagesConfig()


def image_of(stored: StoredPicture) -> Image:
    return stored.at(0, num_tokens=1)


def open_door(folder: Path, config: ImagesConfig = CONFIG) -> ImageDoor:
    store = ImageStore(folder)
    return ImageDoor(config, store, store.folder)


def test_a_picture_is_stored_once_by_its_digest_and_read_as_it_was(tmp_path):
    content = file_of(noise(20, 30), "JPEG")
    (tmp_path / "a.jpg").write_bytes(content)
    sources = [ImageSource(content=content), parse_source("a.jpg", tmp_path), ImageSource(content=content)]
    run = tmp_path / "run"
    run.mkdir()
    pictures = open_door(run).take(sources)
    assert len(set(pictures)) == 1
    assert [path.name for path in (run / "images").glob("*.png")] == [f"{pictures[0].digest}.png"]
    assert ImageStore(run).read(image_of(pictures[0])) == make_picture(content, CONFIG.max_pixels).png


def test_a_broken_picture_fails_alone_with_its_reason(tmp_path):
    good = ImageSource(content=file_of(noise(20, 30)))
    (tmp_path / "page.png").write_bytes(b"<html>")
    (tmp_path / "photo.png").write_bytes(file_of(noise(9, 9), "JPEG"))
    broken = [
        "missing.png",
        "page.png",
        "photo.png",
        "s3://bucket/a.png",
        "",
        "data:image/png,AAAA",
        7,
        {"a": 1},
    ]
    broken += [None, "\0.png", ".", {"bytes": b"", "path": "page.png"}, "data:image/png;base64,$$$"]
    sources = [good, *(parse_source(value, tmp_path) for value in broken)]
    run = tmp_path / "run"
    run.mkdir()
    first, *others = open_door(run).take(sources)
    assert not first.fault
    words = ["No such file", "none of PNG", "labelled PNG", "'s3'", "empty", "base64", "int", "neither bytes"]
    words += ["NoneType", "null", "directory", "empty", "damaged"]
    for picture, word in zip(others, words, strict=True):
        assert word in picture.fault, picture.fault
    assert str(tmp_path / "missing.png") in others[0].fault


def test_sources_are_read_in_all_their_forms(tmp_path):
    content = file_of(noise(5, 6))
    (tmp_path / "a b.png").write_bytes(content)
    encoded = base64.b64encode(content).decode()
    forms: list[Any] = [
        "a b.png",
        str(tmp_path / "a b.png"),
        f"file://{tmp_path}/a%20b.png",
        content,
        {"bytes": content, "path": None},
        {"bytes": content, "path": "elsewhere.jpg"},
        {"bytes": None, "path": "a b.png"},
        {"image": "a b.png"},
        {"image": {"bytes": content}},
        {"image_url": {"url": f"data:image/png;base64,{encoded}"}},
        {"image_url": f"data:image/png;base64,{encoded}"},
        {"url": f"data:;base64,{encoded}"},
    ]
    pictures = open_door(tmp_path).take([parse_source(form, tmp_path) for form in forms])
    assert [picture.fault for picture in pictures] == [""] * len(forms)
    assert len({picture.digest for picture in pictures}) == 1
    assert parse_source("https://a.example/b.png", tmp_path) == ImageSource(url="https://a.example/b.png")


def test_a_picture_that_exceeds_the_limit_of_bytes_is_not_read(tmp_path):
    (tmp_path / "a.png").write_bytes(b"x" * 20_000)
    door = open_door(tmp_path, ImagesConfig(max_file_mb=0.01))
    pictures = door.take([parse_source("a.png", tmp_path), ImageSource(content=b"x" * 20_000)])
    assert all("0.01 MB" in picture.fault for picture in pictures)


def test_a_url_is_fetched_once_in_a_run_also_over_a_restart(tmp_path, monkeypatch):
    content = file_of(noise(20, 30))
    fetched = []

    def fetch(url: str, _: ImagesConfig) -> Fetched:
        fetched.append(url)
        if url.endswith("gone"):
            raise BrokenImageError("status 404")
        return Fetched(content, "PNG")

    monkeypatch.setattr(module, "fetch", fetch)
    sources = [ImageSource(url="http://a.example/b"), ImageSource(url="http://a.example/gone")]
    door = open_door(tmp_path)
    first = door.take(sources)
    assert door.take(sources) == first
    assert len(fetched) == 2
    assert open_door(tmp_path).take(sources) == first
    assert len(fetched) == 3, "a start that was refused for it asks again for what failed"
    door.keep_failures()
    assert open_door(tmp_path).take(sources) == first, "the notes say it, also what failed"
    assert len(fetched) == 3
    open_door(tmp_path, ImagesConfig(max_pixels=100)).take(sources)
    assert len(fetched) == 5, "another bound makes another picture"


def test_after_a_restart_nothing_is_decoded_and_a_file_that_changed_is_another_picture(tmp_path, monkeypatch):
    (tmp_path / "a.png").write_bytes(file_of(noise(20, 30)))
    sources = [parse_source("a.png", tmp_path)]
    (first,) = open_door(tmp_path).take(sources)
    with monkeypatch.context() as patched:
        patched.setattr(module, "make_picture", None)
        assert open_door(tmp_path).take(sources) == [first]
    door = open_door(tmp_path)
    door.take(sources)
    (tmp_path / "a.png").write_bytes(file_of(noise(20, 30, seed=1)))
    assert door.take(sources) == [first], "in one process, what was read counts"
    assert open_door(tmp_path).take(sources) != [first]


def test_half_a_line_of_notes_costs_only_that_picture(tmp_path):
    sources = [ImageSource(content=file_of(noise(8, 8, seed))) for seed in range(3)]
    pictures = open_door(tmp_path).take(sources)
    notes = tmp_path / "images" / NOTES_FILE
    lines = notes.read_text().splitlines()
    assert len(lines) == 3 and all(json.loads(line)["digest"] for line in lines)
    notes.write_text("\n".join(lines)[:-20])
    assert open_door(tmp_path).take(sources) == pictures
    kept, half, remade = notes.read_text().splitlines()[-3:]
    assert (json.loads(kept), remade) == (json.loads(lines[1]), lines[2]), (
        "the new note has a line of its own"
    )
    assert lines[2].startswith(half)
    assert open_door(tmp_path).take(sources) == pictures


def test_a_picture_whose_file_is_gone_is_made_again(tmp_path):
    source = ImageSource(content=file_of(noise(8, 8)))
    (picture,) = open_door(tmp_path).take([source])
    (tmp_path / "images" / f"{picture.digest}.png").unlink()
    assert open_door(tmp_path).take([source]) == [picture]
    assert ImageStore(tmp_path).read(image_of(picture))


def test_without_a_store_pictures_are_only_looked_at(tmp_path):
    sources = [ImageSource(content=file_of(noise(8, 8))), ImageSource(content=b"no")]
    good, bad = ImageDoor(CONFIG, None).take(sources)
    assert good.digest and bad.fault
    assert not list(tmp_path.iterdir())


def test_a_missing_or_damaged_picture_is_its_own_fault_and_a_folder_that_is_away_is_not(tmp_path):
    (picture,) = open_door(tmp_path).take([ImageSource(content=file_of(noise(8, 8)))])
    image = image_of(picture)
    path = tmp_path / "images" / f"{picture.digest}.png"
    store = ImageStore(tmp_path)
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b"?")
    with pytest.raises(BrokenImageError, match="digest"):
        store.read(image)
    path.write_bytes(content + b"?")
    with pytest.raises(BrokenImageError, match="digest"):
        store.read(image)
    path.unlink()
    with pytest.raises(BrokenImageError, match="missing"):
        store.read(image)
    with pytest.raises(StoreError, match="cannot be read now"):
        ImageStore(tmp_path / "elsewhere").read(image)


@pytest.mark.parametrize("damage", [Path.mkdir, lambda path: path.symlink_to(path.name)])
async def test_a_picture_that_alone_cannot_be_read_is_broken_after_some_looks(tmp_path, monkeypatch, damage):
    """Where no file can be read, the store is away: that is waited for."""
    monkeypatch.setattr(store_module, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(store_module, "LAST_PAUSE_S", 0.02)
    door = ImageDoor(CONFIG, ImageStore(tmp_path))
    pictures = door.take([ImageSource(content=file_of(noise(8, 8, seed))) for seed in range(2)])
    first, second = map(image_of, pictures)
    path = tmp_path / "images" / f"{first.digest}.png"
    path.unlink()
    damage(path)
    store = ImageStore(tmp_path)
    with pytest.raises(UnreadableError, match="cannot be read now"):
        store.read(first)
    async with asyncio.timeout(60):
        with pytest.raises(BrokenImageError, match=first.digest):
            await read_images(store, [second, first])
        assert len(await read_images(store, [second])) == 1
    (tmp_path / "images" / f"{second.digest}.png").unlink()
    with pytest.raises(StoreError) as caught:
        store.read(first)
    assert not isinstance(caught.value, UnreadableError)


def test_a_store_that_takes_nothing_ends_the_call_and_blames_no_row(tmp_path):
    (tmp_path / "images").write_text("a file in its place")
    with pytest.raises(StorageError, match="image"):
        open_door(tmp_path).take([ImageSource(content=file_of(noise(8, 8)))])


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EMFILE, "Too many open files"),
        MemoryError(),
        ImportError("libwebp.so: failed to map segment from shared object"),
    ],
)
def test_a_shortage_of_the_machine_ends_the_call_and_blames_no_row(tmp_path, monkeypatch, error):
    def refuse(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(module, "make_picture", refuse)
    with pytest.raises(StoreError, match="short of something"):
        open_door(tmp_path).take([ImageSource(content=file_of(noise(56, 56)))])

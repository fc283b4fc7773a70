"""The door: pictures of data rows become files of the run's store, each made into our form once.

What was made of a file or a URL is noted in the run's folder, so that a trainer that starts again fetches and
decodes nothing, and gets the same pictures: also on a machine whose libraries decode or compress otherwise.
"""

import errno
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import xxhash

from tidemill.common.config.images import ImagesConfig
from tidemill.common.errors import BrokenImageError, StoreError
from tidemill.common.files import append_durably
from tidemill.common.images.fetching import fetch
from tidemill.common.images.pictures import FORM, is_shortage, make_picture
from tidemill.common.images.sources import ImageSource
from tidemill.common.images.store import ImageStore
from tidemill.common.wire.images import Image

NOTES_FILE = "sources.jsonl"
"""Beside the pictures: what was made of which source, one JSON object a line."""
ITS_FAULT = (
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EACCES,
    errno.EPERM,
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.EINVAL,
)
"""Errors of a file that say something about it."""
NUM_THREADS = 8
"""Pictures that are fetched, decoded and written at once."""


@dataclass(frozen=True, slots=True)
class StoredPicture:
    """A picture in the store; `digest`, `num_bytes`, `width` and `height` as in the wire's `Image`. Or
    `fault`: why it is none.

    Example: of a photo of 640 x 480 `digest` "5a0c...", `num_bytes` 512,204, `width` 640, `height` 480. Of an
    empty file only `fault` "it is empty".
    """

    digest: str = ""
    num_bytes: int = 0
    width: int = 0
    height: int = 0
    fault: str = ""

    def at(self, first: int, num_tokens: int) -> Image:
        """The picture at its place among the tokens of a prompt."""
        return Image(
            digest=self.digest,
            num_bytes=self.num_bytes,
            width=self.width,
            height=self.height,
            first=first,
            num_tokens=num_tokens,
        )


class ImageDoor:
    """Takes pictures in. Without a store it only looks whether it could (`tidemill check`)."""

    def __init__(
        self, config: ImagesConfig, store: ImageStore | None, notes_folder: Path | None = None
    ) -> None:
        """`notes_folder` is of this machine, also where the store is not."""
        self._config = config
        self._store = store
        self._notes_path = notes_folder / NOTES_FILE if notes_folder else None
        self._notes: dict[str, StoredPicture] = {}
        self._new_notes: dict[str, StoredPicture] = {}
        self._new_failures: dict[str, StoredPicture] = {}
        """Of URLs, until `keep_failures`."""
        self._lock = Lock()
        self._form = f"{FORM}:{config.max_pixels}"
        """Of all keys of notes: with another bound a picture becomes another one."""
        self._ends_in_half_a_line = False
        """Of the notes: a trainer died as it wrote them."""
        if self._notes_path is not None and self._notes_path.is_file():
            written = self._notes_path.read_bytes()
            self._notes = _read_notes(written)
            self._ends_in_half_a_line = not written.endswith(b"\n")

    def take(self, sources: Sequence[ImageSource]) -> list[StoredPicture]:
        """The pictures of these sources, in order; with `fault` where one is refused.

        Raises:
            ConfigError: pillow is not installed.
            StorageError, StoreError: the store does not take one, or this machine cannot read, fetch or
                decode one now.
        """
        if not sources:
            return []
        with ThreadPoolExecutor(min(NUM_THREADS, len(sources)), "images") as threads:
            taken_in = list(threads.map(self._take_one, sources))
        with self._lock:
            notes = self._new_notes
            self._new_notes = {}
        self._write_notes(notes)
        return taken_in

    def keep_failures(self) -> None:
        """Note in the run's folder which URLs failed: the run goes on without them, also after a restart.

        Only then: a start that is refused for them must ask again, after a proxy or certificates were mended.

        Raises:
            StorageError: the notes cannot be written.
        """
        with self._lock:
            failures = self._new_failures
            self._new_failures = {}
        self._write_notes(failures)

    def _take_one(self, source: ImageSource) -> StoredPicture:
        try:
            return self._take(source)
        except BrokenImageError as error:
            return StoredPicture(fault=f"{source.name}: {error}")

    def _take(self, source: ImageSource) -> StoredPicture:
        if source.fault:
            raise BrokenImageError(source.fault)
        # A file or URL is read once in a run: what it becomes later is another picture.
        address = source.path or source.url
        key = f"{self._form}:{address}" if address else ""
        noted = self._noted(key)
        if noted is not None:
            return noted
        label = source.label
        try:
            if source.url:
                fetched = fetch(source.url, self._config)
                content = fetched.content
                label = fetched.label
            else:
                content = self._read_file(source.path) if source.content is None else source.content
            self._check_size(len(content))
            picture = self._make(content, label)
        except BrokenImageError as error:
            fault = StoredPicture(fault=f"{source.name}: {error}")
            with self._lock:
                if key:
                    self._notes[key] = fault
                if source.url:
                    self._new_failures[key] = fault
            return fault
        with self._lock:
            if key:
                self._notes[key] = picture
            if source.url:
                self._new_notes[key] = picture
        return picture

    def _make(self, content: bytes, label: str) -> StoredPicture:
        key = f"{self._form}:{label}:{xxhash.xxh3_128_hexdigest(content)}"
        noted = self._noted(key)
        if noted is not None:
            return noted
        try:
            picture = make_picture(content, self._config.max_pixels, label)
        except Exception as error:
            if not is_shortage(error):
                raise
            reason = str(error) or type(error).__name__
            raise StoreError(
                f"no picture can be decoded: this machine is short of something ({reason})"
            ) from error
        if self._store is None:
            digest = xxhash.xxh3_128_hexdigest(picture.png)
        else:
            digest = self._store.put(picture.png)
        stored = StoredPicture(digest, len(picture.png), picture.width, picture.height)
        with self._lock:
            self._notes[key] = stored
            self._new_notes[key] = stored
        return stored

    def _read_file(self, path: str) -> bytes:
        try:
            self._check_size(Path(path).stat().st_size)
            return Path(path).read_bytes()
        except OSError as error:
            if error.errno not in ITS_FAULT:
                # The machine's fault: no row may be left out for it.
                raise StoreError(f"the picture {path} cannot be read now: {error.strerror}") from error
            raise BrokenImageError(f"it cannot be read: {error.strerror}") from None
        except ValueError as error:  # a name with a null character
            raise BrokenImageError(f"it cannot be read: {error}") from None

    def _check_size(self, num_bytes: int) -> None:
        limit_mb = self._config.max_file_mb
        if num_bytes > limit_mb * (1 << 20):
            raise BrokenImageError(
                f"it has {num_bytes:,} bytes, more than {limit_mb:g} MB (images.max_file_mb)"
            )

    def _noted(self, key: str) -> StoredPicture | None:
        with self._lock:
            noted = self._notes.get(key)
        if noted is None or noted.fault:
            return noted
        # Its file may be gone: the run's folder was copied without pictures, or they are in another store.
        is_there = self._store is None or self._store.has(noted.digest)
        return noted if is_there else None

    def _write_notes(self, notes: Mapping[str, StoredPicture]) -> None:
        if not notes or self._notes_path is None:
            return
        lines = [json.dumps(_as_plain(key, picture)) for key, picture in notes.items()]
        text = "".join(f"{line}\n" for line in lines)
        if self._ends_in_half_a_line:
            # Else the first note here would be lost with it, and a URL fetched again.
            text = f"\n{text}"
            self._ends_in_half_a_line = False
        append_durably(self._notes_path, text.encode(), "notes of pictures")


def _as_plain(key: str, picture: StoredPicture) -> dict[str, Any]:
    if picture.fault:
        return {"source": key, "fault": picture.fault}
    return {
        "source": key,
        "digest": picture.digest,
        "num_bytes": picture.num_bytes,
        "width": picture.width,
        "height": picture.height,
    }


def _read_notes(written: bytes) -> dict[str, StoredPicture]:
    notes = {}
    for line in written.splitlines():
        try:
            fields = json.loads(line)
            key = fields.pop("source")
            notes[key] = StoredPicture(**fields)
        except (ValueError, TypeError, KeyError):
            continue  # a crash may leave half a line, of a picture that is made again
    return notes

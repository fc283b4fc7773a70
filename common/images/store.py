"""The pictures of a run: PNG files named by their digest, in the run's folder or an object store.

Guarantees: a file is whole and durable before a ticket names it; a reader gets the bytes that were stored, or
an error that says whether the picture or the store is at fault. Nothing is removed while the run lives: the
archive's trajectories need the pictures.
"""

import os
from pathlib import Path
from threading import Lock

import xxhash

from tidemill.common.errors import StoreError, TidemillError
from tidemill.common.files import storage_errors, write_atomically
from tidemill.common.store.claims import RETRIES
from tidemill.common.store.objects import Objects
from tidemill.common.wire.images import Image

IMAGES_FOLDER = "images"
"""Name of the folder of pictures in the run's folder."""


class BrokenImageError(TidemillError):
    """A picture is missing, damaged, or not one that we take: its sample has failed, and no other."""


class ImageStore:
    """Threads may share it."""

    def __init__(self, run_dir: Path, url: str = "") -> None:
        """Pictures are in the run's folder, or below `url` (`streams.claim_check_url`).

        Raises:
            ConfigError: the store at `url` cannot be opened.
        """
        self.folder = run_dir / IMAGES_FOLDER
        self._objects: Objects | None = None
        if url:
            address = f"{url.rstrip('/')}/{run_dir.name}/{IMAGES_FOLDER}"
            self._objects = Objects(address, "streams.claim_check_url", retries=RETRIES)
        self._stored: set[str] = set()
        self._lock = Lock()

    def put(self, png: bytes) -> str:
        """Store a picture unless it is there; returns its digest.

        Raises:
            StorageError: the disk is full, read-only or not there.
            StoreError: the object store does not take it.
        """
        digest = xxhash.xxh3_128_hexdigest(png)
        with self._lock:
            if digest in self._stored:
                return digest
        self._write(digest, png)
        with self._lock:
            self._stored.add(digest)
        return digest

    def read(self, image: Image) -> bytes:
        """The bytes of a picture.

        Raises:
            BrokenImageError: it is missing, or is not what was stored.
            StoreError: the store is away, which says nothing about the picture.
        """
        name = _name(image.digest)
        png = self._read_file(name) if self._objects is None else self._read_object(self._objects, name)
        if len(png) != image.num_bytes or xxhash.xxh3_128_hexdigest(png) != image.digest:
            raise BrokenImageError(f"image {self.folder.name}/{name} does not match its digest")
        return png

    def _write(self, digest: str, png: bytes) -> None:
        name = _name(digest)
        if self._objects is not None:
            self._objects.write(name, png)
            return
        path = self.folder / name
        with storage_errors("an image", self.folder):
            self.folder.mkdir(exist_ok=True)
            # A file of this name has these bytes: it was published whole.
            if not path.is_file() or path.stat().st_size != len(png):
                write_atomically(path, png)

    def _read_file(self, name: str) -> bytes:
        try:
            # The folder first: if it were absent at the open of the file, the file would count as missing.
            folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise StoreError(f"{self.folder} cannot be read now: {error.strerror}") from error
        try:
            with open(name, "rb", opener=lambda path, flags: os.open(path, flags, dir_fd=folder)) as file:
                return file.read()
        except FileNotFoundError:
            raise BrokenImageError(f"image {self.folder / name} is missing") from None
        except OSError as error:
            raise StoreError(f"{self.folder / name} cannot be read now: {error.strerror}") from error
        finally:
            os.close(folder)

    def _read_object(self, objects: Objects, name: str) -> bytes:
        try:
            return objects.read_all(name)
        except StoreError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                raise BrokenImageError(f"image {IMAGES_FOLDER}/{name} is missing in the store") from None
            raise


def _name(digest: str) -> str:
    return f"{digest}.png"

"""The pictures of a run: PNG files named by their digest, in the run's folder or an object store.

Guarantees: a file is whole and durable before a ticket names it; a reader gets the bytes that were stored, or
an error that says whether the picture or the store is at fault. Nothing is removed while the run lives: the
archive's trajectories need the pictures.
"""

import asyncio
import os
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import TypeVar

import structlog
import xxhash

from tidemill.common.errors import BrokenImageError, StoreError, UnreadableError
from tidemill.common.files import storage_errors, write_atomically
from tidemill.common.store.claims import (
    FIRST_PAUSE_S,
    LAST_PAUSE_S,
    LONGEST_PAUSE_S,
    RETRIES,
    Refusals,
    gives_others,
)
from tidemill.common.store.objects import Objects
from tidemill.common.threads import BoundedThreads
from tidemill.common.wire.images import Image

log = structlog.get_logger(__name__)

Used = TypeVar("Used")
IMAGES_FOLDER = "images"
"""Name of the folder of pictures in the run's folder."""
NUM_THREADS = 4
"""Prompts whose pictures are read at once."""
_NAME = re.compile(r"([0-9a-f]{32})\.png")


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
        self._stored: set[str] | None = None
        """Digests of the pictures that are there; None before they were listed."""
        self._has_folder = False
        self._lock = Lock()
        self.threads = BoundedThreads("images", NUM_THREADS)
        """For reading: while the store is away, each call takes up to a minute."""

    def put(self, png: bytes) -> str:
        """Store a picture unless it is there; returns its digest.

        Raises:
            StorageError: the disk is full, read-only or not there.
            StoreError: the object store does not take it.
        """
        digest = xxhash.xxh3_128_hexdigest(png)
        if not self.has(digest):
            self._write(_name(digest), png)
            with self._lock:
                self._digests().add(digest)
        return digest

    def has(self, digest: str) -> bool:
        """Whether a picture is there, as far as this process knows: the store is listed once.

        Raises:
            StoreError: the object store cannot be listed.
        """
        with self._lock:
            return digest in self._digests()

    def read(self, image: Image) -> bytes:
        """The bytes of a picture.

        Raises:
            BrokenImageError: it is missing, or is not what was stored.
            StoreError: the store is away, which says nothing about the picture; `UnreadableError` where
                others can be read, `RefusedError` where it refuses this process's keys.
        """
        name = _name(image.digest)
        png = self._read_file(name) if self._objects is None else self._read_object(self._objects, name)
        if len(png) != image.num_bytes or xxhash.xxh3_128_hexdigest(png) != image.digest:
            raise BrokenImageError(f"image {self.folder.name}/{name} does not match its digest")
        return png

    def _digests(self) -> set[str]:
        if self._stored is None:
            if self._objects is not None:
                names = self._objects.names()
            else:
                names = [path.name for path in self.folder.iterdir()] if self.folder.is_dir() else []
            # A file of such a name has its bytes: it was published whole.
            self._stored = {match[1] for match in map(_NAME.fullmatch, names) if match}
        return self._stored

    def _write(self, name: str, png: bytes) -> None:
        if self._objects is not None:
            self._objects.write(name, png)
            return
        with storage_errors("an image", self.folder):
            # Once: if the folder vanishes later, it is not mounted, and a new one would be without pictures.
            if not self._has_folder:
                self.folder.mkdir(exist_ok=True)
            self._has_folder = True
            write_atomically(self.folder / name, png)

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
            # The picture's fault only where others can be read: else the disk or the mount is at fault.
            kind = UnreadableError if gives_others(self.folder, name) else StoreError
            raise kind(f"image {self.folder / name} cannot be read now: {error.strerror}") from error
        finally:
            os.close(folder)

    def _read_object(self, objects: Objects, name: str) -> bytes:
        try:
            return objects.read_all(name)
        except StoreError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                raise BrokenImageError(f"image {IMAGES_FOLDER}/{name} is missing in the store") from None
            raise


async def read_images(store: ImageStore, images: Sequence[Image]) -> list[bytes]:
    """The bytes of pictures, read on a thread. Waits for a store that is away, without any limit.

    Raises:
        BrokenImageError: a picture is missing or damaged, or cannot be read while others can.
        ConfigError: the store refuses the keys of this process.
    """
    return await waiting(store, lambda: [store.read(image) for image in images])


async def waiting(store: ImageStore, use: Callable[[], Used]) -> Used:
    """What `use` returns, which reads or writes pictures, on a thread; again while the store is away.

    Raises:
        BrokenImageError: a picture cannot be read while others can; and what `use` raises.
        ConfigError: the store refuses the keys of this process.
    """
    pause_s = FIRST_PAUSE_S
    refusals = Refusals()
    while True:
        try:
            return await store.threads.run(use)
        except StoreError as error:
            if isinstance(error, UnreadableError) and pause_s > LAST_PAUSE_S:
                raise BrokenImageError(str(error)) from error
            refusals.note(error)
            log.warning("waiting for the store of pictures", error=str(error))
        # All readers lost the store at once, and must not all return at once.
        await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _name(digest: str) -> str:
    return f"{digest}.png"

"""Versions from another machine, in a cache folder that has the layout of a run's folder.

A file is fetched in pieces, several at once, into a file aside that remembers which it has: after a broken
connection, or in the next process, only the missing ones are fetched. It counts once all its bytes are
checked. One worker of the machine downloads, the others wait and find its files.
"""

import fcntl
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import structlog
from pydantic import ValidationError

from tidemill.common.errors import DamagedWeightsError, WeightsError
from tidemill.common.files import (
    StorageError,
    append_whole,
    aside_folder,
    file_checksum,
    publish_folder,
    remove_folder,
    retire_folder,
    write_atomically,
)
from tidemill.common.run.weight_files import (
    MANIFEST_FILE,
    WEIGHTS_FOLDER,
    folder_versions,
    read_manifest,
    verified_files,
    version_name,
)
from tidemill.common.weights.remote import Remote
from tidemill.common.wire.messages import WeightFile, WeightManifest

log = structlog.get_logger(__name__)

CACHE_VARIABLE = "TIDEMILL_CACHE_DIR"
PIECE_BYTES = 16 << 20
STREAMS = 4
"""Pieces that are fetched at once: so many of them are in memory."""
ATTEMPTS = 3
"""For each piece, before the version counts as not to be had now."""
KEPT_VERSIONS = 2
"""The newest, and the one before it, which a slower worker of this machine may still be reading."""


class WeightDownload:
    """Brings versions of one run into the cache."""

    def __init__(self, remote: Remote, run_id: str, cache: Path) -> None:
        self._remote, self.folder = remote, cache / run_id

    def manifest(self, version: int) -> WeightManifest | None:
        """What the other side says of a version; None where it cannot say.

        Raises:
            WeightsError: it says something else.
        """
        if (known := read_manifest(self.folder, version)) is not None:
            return known
        path = f"{WEIGHTS_FOLDER}/{version_name(version)}/{MANIFEST_FILE}"
        try:
            return WeightManifest.model_validate_json(self._remote.read_all(path))
        except ValidationError as error:
            raise WeightsError(f"{path} is not a manifest of weights: {error}") from None

    def files(self, manifest: WeightManifest) -> list[Path]:
        """The files of a version, downloaded if need be and checked. Blocks: call it on a thread.

        Raises:
            WeightsError: the other side does not answer, does not have the version, or sends other bytes.
        """
        try:
            with self._alone():
                try:
                    return verified_files(self.folder, manifest)
                except WeightsError:
                    self._download(manifest)
                self._prune(manifest)
                target = self.folder / WEIGHTS_FOLDER / manifest.folder
                return [target / file.name for file in manifest.files]
        except (OSError, StorageError) as error:  # a full disk: to be tried again, or left to another worker
            raise WeightsError(f"weights of version {manifest.version}: {error}") from error

    def close(self) -> None:
        self._remote.close()

    def _download(self, manifest: WeightManifest) -> None:
        target = self.folder / WEIGHTS_FOLDER / manifest.folder
        partial = self.folder / "partial" / f"{manifest.folder}-{manifest.digest.rpartition(':')[2]}"
        partial.mkdir(parents=True, exist_ok=True)
        for file in manifest.files:
            self._fetch(file, f"{WEIGHTS_FOLDER}/{manifest.folder}/{file.name}", partial)
            if (checksum := file_checksum(partial / file.name)) != file.checksum:
                remove_folder(partial)
                raise DamagedWeightsError(
                    f"weights of version {manifest.version}: {file.name} came with checksum {checksum}, the "
                    f"manifest says {file.checksum}: it is damaged."
                )
        with aside_folder(target, f"the weights of version {manifest.version}") as aside:
            for file in manifest.files:
                os.replace(partial / file.name, aside / file.name)
            # The manifest last: a folder that has one is whole.
            write_atomically(aside / MANIFEST_FILE, manifest.model_dump_json(indent=1))
            publish_folder(aside, target)
        # What an abandoned version has left is of no use any more.
        remove_folder(partial.parent)
        log.info("weights downloaded", version=manifest.version, num_bytes=manifest.num_bytes)

    def _fetch(self, file: WeightFile, path: str, partial: Path) -> None:
        """Fetch the pieces that are missing. Each is noted once its bytes are in the file."""
        notes = partial / f"{file.name}.pieces"
        noted = notes.read_text().split() if notes.exists() else []
        done = {int(note) for note in noted if note.isdecimal()}
        missing = [start for start in range(0, file.num_bytes, PIECE_BYTES) if start not in done]
        with open(partial / file.name, "r+b" if done else "wb") as output, open(notes, "ab", 0) as note:

            def fetch(start: int) -> None:
                data = self._piece(path, start, min(PIECE_BYTES, file.num_bytes - start))
                os.pwrite(output.fileno(), data, start)
                # After its bytes: a note of a piece that was not written would hide it from the next attempt.
                append_whole(note, f"{start}\n".encode())

            with ThreadPoolExecutor(STREAMS) as streams:
                futures = [streams.submit(fetch, start) for start in missing]
                try:
                    for future in futures:
                        future.result()
                finally:
                    streams.shutdown(wait=True, cancel_futures=True)

    def _piece(self, path: str, start: int, length: int) -> bytes:
        for attempt in range(ATTEMPTS):
            try:
                return self._remote.read(path, start, length)
            except WeightsError:
                if attempt == ATTEMPTS - 1:
                    raise
        raise AssertionError("not reached")

    def _prune(self, manifest: WeightManifest) -> None:
        """Remove what neither this version's chain nor a slower worker needs."""
        folder = self.folder / WEIGHTS_FOLDER
        first = manifest.base if manifest.is_delta else manifest.version
        for version in folder_versions(folder)[:-KEPT_VERSIONS]:
            if not first <= version <= manifest.version:
                retire_folder(folder / version_name(version))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / "download.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


class LocalVersions:
    """The run's folder itself, where this machine sees it."""

    def __init__(self, run_dir: Path) -> None:
        self.folder = run_dir

    def manifest(self, version: int) -> WeightManifest | None:
        """What lies beside the version's files."""
        return read_manifest(self.folder, version)

    def files(self, manifest: WeightManifest) -> list[Path]:
        return verified_files(self.folder, manifest)


def cache_folder() -> Path:
    """Where this machine keeps downloads of all runs."""
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "tidemill").resolve()

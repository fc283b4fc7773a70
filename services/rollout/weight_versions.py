"""Where versions come from, and by which of their files an engine gets to one.

From another machine they come into a cache folder that has the layout of a run's folder. A file is fetched in
pieces, several at once, into a file aside that remembers which it has: after a broken connection, or in the
next process, only the missing ones are fetched. It counts once all its bytes are checked. One worker of the
machine downloads, the others wait and find its files.
"""

import fcntl
import os
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
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
from tidemill.common.weights.bits import Bits, TensorInfo
from tidemill.common.weights.digest import Digest, digest_of, is_additive
from tidemill.common.weights.remote import Remote
from tidemill.common.wire.messages import WeightFile, WeightManifest
from tidemill.services.rollout.engines.checkpoint import patched_tensors, read_tensors

log = structlog.get_logger(__name__)

CACHE_VARIABLE = "TIDEMILL_CACHE_DIR"
PIECE_BYTES = 16 << 20
STREAMS = 4
"""Pieces that are fetched at once: so many of them are in memory."""
ATTEMPTS = 3
"""For each piece, before the version counts as not to be had now."""
KEPT_VERSIONS = 2
"""The newest, and the one before it, which a slower worker of this machine may still be reading."""
NUM_THREADS = min(8, len(os.sched_getaffinity(0)))
"""Tensors whose digests are computed at once. Where deltas change them, so many copies are in memory."""


class LocalVersions:
    """The run's folder itself, where this machine sees it."""

    def __init__(self, run_dir: Path) -> None:
        self.folder = run_dir

    def manifest(self, version: int) -> WeightManifest | None:
        return read_manifest(self.folder, version)

    def files(self, manifest: WeightManifest) -> list[Path]:
        """The files of a version, whole and checked. Blocks: call it on a thread."""
        return verified_files(self.folder, manifest)


class WeightDownload(LocalVersions):
    """Brings versions of one run into the cache of this machine."""

    def __init__(self, remote: Remote, run_id: str, cache: Path | None = None) -> None:
        cache = cache or Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "tidemill").resolve()
        super().__init__(cache / run_id)
        self._remote = remote

    def manifest(self, version: int) -> WeightManifest:
        """What the other side says of a version.

        Raises:
            WeightsError: it says something else, or does not answer.
        """
        if (known := super().manifest(version)) is not None:
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
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(self.folder / "download.lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                # Looked at under the lock: another worker of this machine may just have brought them.
                try:
                    return super().files(manifest)
                except WeightsError:
                    self._download(manifest)
                self._prune(manifest)
                target = self.folder / WEIGHTS_FOLDER / manifest.folder
                return [target / file.name for file in manifest.files]
        except (OSError, StorageError) as error:  # a full disk: to be tried again, or left to another worker
            raise WeightsError(f"weights of version {manifest.version}: {error}") from error

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
                length = min(PIECE_BYTES, file.num_bytes - start)
                data = self._read(path, start, length)
                os.pwrite(output.fileno(), data, start)
                # After its bytes: a note of a piece that was not written would hide it from the next try.
                append_whole(note, f"{start}\n".encode())

            with ThreadPoolExecutor(STREAMS) as streams:
                futures = [streams.submit(fetch, start) for start in missing]
                try:
                    for future in futures:
                        future.result()
                finally:
                    streams.shutdown(wait=True, cancel_futures=True)

    def _read(self, path: str, start: int, length: int) -> bytes:
        for _ in range(ATTEMPTS - 1):
            try:
                return self._remote.read(path, start, length)
            except WeightsError:
                continue
        return self._remote.read(path, start, length)

    def _prune(self, manifest: WeightManifest) -> None:
        """Remove what neither this version's chain nor a slower worker needs."""
        folder = self.folder / WEIGHTS_FOLDER
        first = manifest.base if manifest.is_delta else manifest.version
        for version in folder_versions(folder)[:-KEPT_VERSIONS]:
            if not first <= version <= manifest.version:
                retire_folder(folder / version_name(version))


@dataclass(frozen=True, slots=True)
class Route:
    """A full version's files, or none, and the deltas since then, oldest first."""

    files: Sequence[Path]
    deltas: Sequence[Sequence[Path]]


def find_route(versions: LocalVersions, wanted: WeightManifest, held: WeightManifest | None) -> Route:
    """From the weights of `held`, where the chain of `wanted` goes through them; else from its full version.

    Deltas are fetched and checked on the way, and what is returned leads to `wanted`: of a route from a full
    version that is proven here, of one from `held` the engine proves it.

    Raises:
        WeightsError: something of the chain is missing, torn, or of another history.
    """
    chain = [wanted]
    while (child := chain[0]).is_delta:
        if held is not None and (child.parent, child.parent_digest) == (held.version, held.digest):
            return Route((), [versions.files(each) for each in chain])
        parent = versions.manifest(child.parent)
        if parent is None or (parent.version, parent.digest) != (child.parent, child.parent_digest):
            found = "not there" if parent is None else f"of other weights ({parent.digest})"
            raise WeightsError(
                f"weights of version {wanted.version}: version {child.version} changes version "
                f"{child.parent} ({child.parent_digest}), which is {found}."
            )
        chain.insert(0, parent)
    files = versions.files(chain[0])
    route = Route(files, [versions.files(each) for each in chain[1:]])
    if is_additive(wanted.digest):
        digest = _digest_of(patched_tensors(read_tensors(files), route.deltas))
        if digest != Digest.parse(wanted.digest):
            raise DamagedWeightsError(
                f"weights of version {wanted.version}: its files make {digest}, its manifest says "
                f"{wanted.digest}; they are of another history, or damaged before they were announced."
            )
    return route


def _digest_of(tensors: Iterable[tuple[TensorInfo, Bits]]) -> Digest:
    """Of several tensors at once: numpy computes without the interpreter's lock."""
    total, waiting = Digest(), deque[Future[Digest]]()
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        for tensor in tensors:
            waiting.append(threads.submit(lambda each: digest_of([each]), tensor))
            if len(waiting) > NUM_THREADS:
                total += waiting.popleft().result()
    return sum((future.result() for future in waiting), total)

"""Follows the `weights` stream: keeps the engine at the newest announced version.

Guarantees: versions only go up, unless the run itself went back: a later trainer process has announced an
older version, or other weights of the same one, because Redis and the trainer have lost what came after.
`reach(v)` returns only when the engine holds version `v` or a newer one, so that no ticket starts too early.

If the engine holds a version of the chain, all deltas since then are merged and applied at once. Otherwise it
loads the full version of the chain and the deltas since. Checks that the weights are right, in their order:

1. Files: each has the size and the checksum of its manifest (`verified_files`).
2. Chain: each delta has the parent that it was made for (`find_chain`).
3. Digest, before anything is written. A full version with its deltas: computed from the files (`find_route`).
   Deltas alone: the engine computes it from the values that it holds (`prove`).
4. Parameters: the engine reads back what it has written.

A full version is not used where 1 to 3 fail, and is tried again; where 4 fails, the worker ends. Where deltas
alone fail 3, or in vLLM 4, the full version is loaded.

Versions from another machine are downloaded into a cache folder with the layout of a run's folder. A file is
fetched in pieces, several at once, into a partial file with a list of the pieces that are there: after a
broken connection, or in the next process, only the missing ones are fetched. A file is used once its checksum
is right. One worker of the machine downloads; the others wait and find its files.
"""

import asyncio
import fcntl
import os
import random
import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import structlog
from pydantic import ValidationError

from tidemill.common.errors import DamagedWeightsError, WeightsError, WeightsMismatchError
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
from tidemill.common.process.service import ServiceContext
from tidemill.common.run.weight_files import (
    MANIFEST_FILE,
    WEIGHTS_FOLDER,
    find_chain,
    folder_versions,
    read_manifest,
    verified_files,
    version_name,
)
from tidemill.common.streams import Entry, Garbled, OffsetReader, id_before, read_newest
from tidemill.common.telemetry import metrics
from tidemill.common.weights.bits import Bits, TensorInfo
from tidemill.common.weights.digest import Digest, digest_of, is_additive
from tidemill.common.weights.remote import Remote, open_remote
from tidemill.common.wire.messages import WeightFile, WeightManifest
from tidemill.services.rollout.engines.checkpoint import patched_tensors, read_tensors
from tidemill.services.rollout.engines.engine import Engine, WeightUpdate

log = structlog.get_logger(__name__)

POLL_S = 3.0
"""New versions are read at once; this is how often a stream that has become shorter is noticed."""
RETRY_S = 1.0
SPREAD_S_PER_GROUP = 0.001
LONGEST_SPREAD_S = 1.0
"""All workers learn of a version at once. So that a thousand do not read it in the same moment, each waits a
random time: at most this much for each group of a step, and at most a second. There are hardly more workers
than groups."""
REPORT_AFTER = 3
"""Reads in a row that find a version damaged, before it is reported: some file systems show files late."""
REPAIR_S = 60.0
"""Time within which the trainer writes a reported version again."""
GIVE_UP_LEASES = 2.0
"""Leases for which weights may be unusable before the worker ends and others take its tickets."""

CACHE_VARIABLE = "TIDEMILL_CACHE_DIR"
PIECE_BYTES = 16 << 20
STREAMS = 4
"""Pieces that are fetched, and in memory, at once."""
ATTEMPTS = 3
"""Attempts at each piece before the download fails."""
KEPT_VERSIONS = 2
"""The newest, and the one before it, which a slower worker of this machine may still be reading."""
NUM_THREADS = min(8, len(os.sched_getaffinity(0)))
"""Tensors whose digests are computed at once. If deltas change them, this many copies are in memory."""


class WeightFollower:
    """Loads announced versions into one engine; `run` goes on until it is cancelled."""

    def __init__(self, context: ServiceContext, engine: Engine) -> None:
        """Raises ConfigError: `weights.url` is of an unknown kind, or needs a library that is missing."""
        self.context = context
        self.engine = engine
        run_id = context.keys.run_id
        remote = open_remote(context.config.weights.address, run_id)
        self._versions = WeightDownload(remote, run_id) if remote else LocalVersions(context.run_dir)
        spread_s = SPREAD_S_PER_GROUP * context.config.trainer.groups_per_step
        self._spread_s = min(LONGEST_SPREAD_S, spread_s)
        self._arrived = asyncio.Condition()
        self.num_waiting = 0
        """Groups that wait for a version to arrive."""
        self._held: WeightManifest | None = None
        """What the engine holds; None for the starting model, and where it is in doubt."""
        self.history = 0
        """Increases when the engine has left a lost history: samples that began before that are lost."""
        self._is_leaving = False
        """Whether the held weights belong to a lost history, and those of the run are being loaded."""
        self._failing: WeightManifest | None = None
        """The version that could not be used in the last attempt; None after a success."""
        self._failing_since = 0.0
        """When attempts began to fail, of whatever version."""
        self._was_damaged = False
        """Whether a version was found damaged since then: the trainer may be writing it again."""
        self._num_damaged = 0
        """Attempts in a row, up to the last one, that found a version damaged."""
        self.damaged_version = -1
        """A version with other bytes than announced, which the trainer has to write again; -1: none."""
        self.last_update: WeightUpdate | None = None
        self.num_mismatches = 0
        """Updates after which the engine did not hold what the manifest says."""

    @property
    def term(self) -> int:
        """Number of the trainer process that announced the held weights; 0 for the starting model."""
        return self._held.term if self._held else 0

    async def run(self) -> None:
        reader = OffsetReader(self.context.broker, self.context.keys.weights, WeightManifest)
        while True:
            read = await reader.read(block_s=POLL_S)
            entries = [entry for entry in read if isinstance(entry, Entry)]
            if read and isinstance(read[-1], Garbled):
                log.warning("an unexpected entry among the weights is skipped", entry=read[-1].entry_id)
            # If nothing came, there may still be something to load: the stream may have become shorter.
            newest = entries[-1] if entries else await self._newest()
            if newest is None:
                continue
            if self._is_to_load(newest.message):
                await self._load(newest.message, reader)
            elif self._held is not None and newest.message.version == self.engine.version:
                self._held = newest.message  # the same weights, announced by another trainer
                self._is_leaving = False
                async with self._arrived:
                    self._arrived.notify_all()

    async def reach(self, version: int) -> int:
        """Wait until the engine holds `version` or a newer one of the run; returns the one it holds."""
        self.num_waiting += 1
        try:
            async with self._arrived:
                # Not with weights of a lost history: a sample that begins with them is dropped at its end.
                await self._arrived.wait_for(lambda: self.engine.version >= version and not self._is_leaving)
                return self.engine.version
        finally:
            self.num_waiting -= 1

    def is_lost(self, history: int) -> bool:
        """Whether a sample that began when `history` had this value, and ends now, may have tokens of weights
        that are not the run's."""
        return self._is_leaving or history != self.history

    def _is_to_load(self, manifest: WeightManifest) -> bool:
        """Whether it is newer, the same version with other weights, or an older one of a later trainer."""
        held = self._held
        if manifest.version > self.engine.version:
            return True
        if held is None:
            # After a mismatch nobody knows what the engine holds: only a load can leave a lost history.
            return self._is_leaving
        if manifest.version < self.engine.version:
            return manifest.term > held.term
        return manifest.digest != held.digest

    async def _newest(self) -> Entry[WeightManifest] | None:
        return await read_newest(self.context.broker, self.context.keys.weights, WeightManifest)

    async def _load(self, manifest: WeightManifest, reader: OffsetReader[WeightManifest]) -> None:
        """Verify and load one version; an incomplete one is tried again unless there is a newer one."""
        if self._held is not None and manifest.term != self._held.term:
            # Announced by another trainer process: the held weights may be no ancestor of these.
            # Samples that end before the new ones are loaded have tokens of weights that are lost.
            self._is_leaving = True
        await asyncio.sleep(random.random() * self._spread_s)
        try:
            update = await self._update(manifest)
        except WeightsError as error:
            self._note_failure(manifest, error)
            newest = await self._newest()
            if newest and newest.message.version == manifest.version:
                reader.position = id_before(newest.entry_id)
                # Random: when a server fails, all workers fail at the same moment.
                await asyncio.sleep(RETRY_S * (0.5 + random.random()))
            return
        if self._is_leaving:
            log.warning(
                "left weights of a history that is lost", version=manifest.version, term=manifest.term
            )
            # Samples that go on have tokens of both histories, and are lost at their end.
            self.history += 1
            self._is_leaving = False
        # Only now: later deltas build on `_held`, so it must never name weights that the engine may not hold.
        self._held = manifest
        self.last_update = update
        self._failing = None
        self._num_damaged = 0
        self.damaged_version = -1
        metrics.WEIGHT_LOAD_SECONDS.observe(update.load_s)
        metrics.WEIGHT_PAUSE_SECONDS.observe(update.paused_s)
        metrics.WEIGHT_DELAY_SECONDS.observe(max(0.0, time.time() - manifest.announced_at))
        metrics.ENGINE_VERSION.set(update.version)
        log.debug("weights loaded", version=update.version, load_s=update.load_s, paused_s=update.paused_s)
        # Last: callers that wait in `reach` start to generate at once, with the loaded weights.
        async with self._arrived:
            self._arrived.notify_all()

    async def _update(self, manifest: WeightManifest) -> WeightUpdate:
        """Bring the engine to a version, by deltas from what it holds if it can apply them."""
        held = self._held if self.engine.can_patch else None
        try:
            return await self._load_from(held, manifest)
        except WeightsMismatchError as error:
            self.num_mismatches += 1
            metrics.WEIGHT_MISMATCHES.inc()
            log.error("the engine holds other weights", version=manifest.version, error=str(error))
        # The engine's own weights are in doubt: nothing may build on them.
        self._held = None
        return await self._load_from(None, manifest)

    async def _load_from(self, held: WeightManifest | None, manifest: WeightManifest) -> WeightUpdate:
        """Load a version by deltas from `held`, or in full where that is None or is not in its chain."""
        files, deltas = await self.context.outside.run(find_route, self._versions, manifest, held)
        return await self.engine.load(manifest.version, files, deltas, manifest.digest)

    def _note_failure(self, manifest: WeightManifest, error: WeightsError) -> None:
        """Count a failed attempt; report the version where its files are damaged. Raises the error if weights
        have been unusable for too long: tickets held here could never start."""
        metrics.WEIGHT_FAILURES.inc()
        log.warning("weights cannot be used yet", version=manifest.version, error=str(error))
        now = time.monotonic()
        before = self._failing
        # Announced again: the trainer has just repaired it, and each version is repaired once.
        is_repair = before is not None and before.version == manifest.version and before != manifest
        if before is None or is_repair:
            self._failing_since = now
            self._was_damaged = False
        self._failing = manifest
        self._num_damaged = self._num_damaged + 1 if isinstance(error, DamagedWeightsError) else 0
        self._was_damaged |= self._num_damaged > 0
        self.damaged_version = manifest.version if self._num_damaged >= REPORT_AFTER else -1
        patience_s = GIVE_UP_LEASES * self.context.config.streams.lease_s
        if self._was_damaged:
            # Also where it is missing now: it is being replaced.
            patience_s = max(patience_s, REPAIR_S)
        if now - self._failing_since > patience_s:
            raise error


class LocalVersions:
    """Versions in the run's folder, if this machine can read it."""

    def __init__(self, run_dir: Path) -> None:
        self.folder = run_dir

    def manifest(self, version: int) -> WeightManifest | None:
        return read_manifest(self.folder, version)

    def files(self, manifest: WeightManifest) -> list[Path]:
        """The files of a version, whole and checked. Blocks: call it on a thread."""
        return verified_files(self.folder, manifest)


class WeightDownload(LocalVersions):
    def __init__(self, remote: Remote, run_id: str, cache: Path | None = None) -> None:
        cache = cache or Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "tidemill").resolve()
        super().__init__(cache / run_id)
        self._remote = remote

    def manifest(self, version: int) -> WeightManifest:
        """The manifest of a version, from the cache or the remote side.

        Raises:
            WeightsError: the remote side does not answer, or sends something else.
        """
        manifest = super().manifest(version)
        if manifest is not None:
            return manifest
        path = f"{WEIGHTS_FOLDER}/{version_name(version)}/{MANIFEST_FILE}"
        try:
            return WeightManifest.model_validate_json(self._remote.read_all(path))
        except ValidationError as error:
            raise WeightsError(f"{path} is not a manifest of weights: {error}") from None

    def files(self, manifest: WeightManifest) -> list[Path]:
        """The files of a version, downloaded if need be and checked. Blocks: call it on a thread.

        Raises:
            WeightsError: the remote side does not answer, does not have the version, or sends other bytes.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(self.folder / "download.lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                # Looked at under the lock: another worker of this machine may just have downloaded them.
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
            checksum = file_checksum(partial / file.name)
            if checksum != file.checksum:
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
        # Partial files of abandoned versions are of no use any more.
        remove_folder(partial.parent)
        log.info("weights downloaded", version=manifest.version, num_bytes=manifest.num_bytes)

    def _fetch(self, file: WeightFile, path: str, partial: Path) -> None:
        """Fetch the pieces that are missing. Each is noted once its bytes are in the file."""
        notes = partial / f"{file.name}.pieces"
        noted = notes.read_text().split() if notes.exists() else []
        done = {int(note) for note in noted if note.isdecimal()}
        missing = [start for start in range(0, file.num_bytes, PIECE_BYTES) if start not in done]
        mode = "r+b" if done else "wb"
        with open(partial / file.name, mode) as output, open(notes, "ab", buffering=0) as note:

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
            with suppress(WeightsError):
                return self._remote.read(path, start, length)
        return self._remote.read(path, start, length)

    def _prune(self, manifest: WeightManifest) -> None:
        """Remove versions that neither this version's chain nor a slower worker needs."""
        folder = self.folder / WEIGHTS_FOLDER
        first = manifest.base if manifest.is_delta else manifest.version
        for version in folder_versions(folder)[:-KEPT_VERSIONS]:
            if not first <= version <= manifest.version:
                retire_folder(folder / version_name(version))


def find_route(
    versions: LocalVersions, wanted: WeightManifest, held: WeightManifest | None
) -> tuple[list[Path], list[list[Path]]]:
    """The files that lead to `wanted`: from `held`, if its chain goes through it; else from its full version.

    Returns the files of the full version, or none, and those of the deltas since then, oldest first. All are
    fetched and checked. The digest of a full version with its deltas is compared with `wanted`'s here; that
    of deltas alone by the engine.

    Raises:
        WeightsError: a part of the chain is missing, incomplete, or of another history.
    """
    chain = find_chain(wanted, versions.manifest, held)
    files_of_chain = [versions.files(manifest) for manifest in chain]
    if chain[0].is_delta:
        return [], files_of_chain
    files, *deltas = files_of_chain
    if is_additive(wanted.digest):
        digest = _digest_of(patched_tensors(read_tensors(files), deltas))
        if digest != Digest.parse(wanted.digest):
            raise DamagedWeightsError(
                f"weights of version {wanted.version}: its files make {digest}, its manifest says "
                f"{wanted.digest}; they are of another history, or damaged before they were announced."
            )
    return files, deltas


def _digest_of(tensors: Iterable[tuple[TensorInfo, Bits]]) -> Digest:
    """The digest of all tensors, several at once: numpy computes without the interpreter's lock."""
    total = Digest()
    waiting = deque[Future[Digest]]()
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        for tensor in tensors:
            waiting.append(threads.submit(digest_of, [tensor]))
            # The oldest first: tensors that wait for their digest are in memory.
            if len(waiting) > NUM_THREADS:
                total += waiting.popleft().result()
    return sum((future.result() for future in waiting), total)

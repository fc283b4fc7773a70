"""Follows the `weights` stream: the engine computes with the newest announced version.

Guarantees: versions only go up, unless the run itself went back: a trainer that was started after the one
whose version the engine holds stands at an older version, or at other weights of the same one, because Redis
and trainer have lost what came after. Bytes are verified before the engine sees them; `reach(v)` returns only
when the engine holds version `v` or a newer one, which is what keeps tickets from starting too early.
"""

import asyncio
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import structlog

from tidemill.common.errors import ConfigError, WeightsError
from tidemill.common.files import StorageError, aside_folder, publish_folder, retire_folder
from tidemill.common.process.service import ServiceContext
from tidemill.common.run.weight_files import (
    WEIGHTS_FOLDER,
    WEIGHTS_TOKEN_VARIABLE,
    folder_versions,
    verified_files,
    version_name,
)
from tidemill.common.streams import Entry, Garbled, OffsetReader, id_before, read_newest
from tidemill.common.telemetry import metrics
from tidemill.common.wire.messages import WeightFile, WeightManifest
from tidemill.services.rollout.engines.engine import Engine

log = structlog.get_logger(__name__)

URL_VARIABLE = "TIDEMILL_WEIGHTS_URL"
"""Address of a weight server of the trainer's, such as http://head:8200; empty reads the run's folder."""
CACHE_VARIABLE = "TIDEMILL_CACHE_DIR"
CHUNK_BYTES = 4 << 20
TIMEOUT_S = 30.0
"""For each piece of an answer; a download as a whole takes as long as it takes."""
KEPT_VERSIONS = 2
"""The newest, and the one before it, which a slower worker of this machine may still be reading."""


class WeightDownload:
    """Brings versions of one run into a cache folder with the layout of a run's folder."""

    def __init__(self, url: str, token: str, run_id: str, cache: Path) -> None:
        self._url = f"{url.rstrip('/')}/runs/{run_id}/{WEIGHTS_FOLDER}"
        self._folder = cache / run_id
        self._http = httpx.Client(
            timeout=TIMEOUT_S, headers={"Authorization": f"Bearer {token}"} if token else {}
        )

    def files(self, manifest: WeightManifest) -> list[Path]:
        """The files of a version, downloaded if need be and checked. Blocks: call it on a thread.

        Raises:
            WeightsError: the server does not answer, does not have the version, or sends other bytes.
        """
        try:
            with self._alone():
                try:
                    return verified_files(self._folder, manifest)
                except WeightsError:
                    self._download(manifest)
                paths = verified_files(self._folder, manifest)
                self._prune()
                return paths
        except (OSError, StorageError) as error:  # a full disk: to be tried again, or left to another worker
            raise WeightsError(f"weights of version {manifest.version}: {error}") from error

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def _download(self, manifest: WeightManifest) -> None:
        target = self._folder / WEIGHTS_FOLDER / manifest.folder
        with aside_folder(target, f"the weights of version {manifest.version}") as aside:
            for file in manifest.files:
                self._fetch(file, manifest, aside / file.name)
            publish_folder(aside, target)
        num_bytes = sum(file.num_bytes for file in manifest.files)
        log.info("weights downloaded", version=manifest.version, num_bytes=num_bytes)

    def _fetch(self, file: WeightFile, manifest: WeightManifest, path: Path) -> None:
        url, where = f"{self._url}/{manifest.folder}/{file.name}", f"weights of version {manifest.version}"
        num_bytes = 0
        try:
            with self._http.stream("GET", url) as answer, open(path, "xb") as output:
                if (status := answer.status_code) != httpx.codes.OK:
                    raise WeightsError(f"{where}: {url} answered {status}; {_advice(status)}")
                for chunk in answer.iter_raw(CHUNK_BYTES):
                    num_bytes += len(chunk)
                    if num_bytes > file.num_bytes:
                        raise WeightsError(
                            f"{where}: {url} sent more than the {file.num_bytes:,} bytes that were announced."
                        )
                    output.write(chunk)
        except httpx.HTTPError as error:
            raise WeightsError(
                f"{where}: cannot download {url}: {str(error) or type(error).__name__}. Is {URL_VARIABLE} "
                "right, and does the head serve weights?"
            ) from error

    def _prune(self) -> None:
        folder = self._folder / WEIGHTS_FOLDER
        for version in folder_versions(folder)[:-KEPT_VERSIONS]:
            retire_folder(folder / version_name(version))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One worker of the machine downloads, the others wait and find its files."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with open(self._folder / "download.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def weight_download(run_id: str) -> WeightDownload | None:
    """What the environment asks for; None where weights are read from the run's folder.

    Raises:
        ConfigError: the address is none of HTTP.
    """
    url = os.environ.get(URL_VARIABLE, "")
    if not url:
        return None
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
        raise ConfigError(f"{URL_VARIABLE} is {url!r}; expected an address such as http://head:8200.")
    cache = Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "tidemill").resolve()
    return WeightDownload(url, os.environ.get(WEIGHTS_TOKEN_VARIABLE, ""), run_id, cache)


def _advice(status: int) -> str:
    if status == httpx.codes.UNAUTHORIZED:
        return f"{WEIGHTS_TOKEN_VARIABLE} is not the one of the server."
    if status == httpx.codes.NOT_FOUND:
        return "the version was pruned already and a newer one is on its way, or the server has other runs."
    return "expected 200."


POLL_S = 1.0
RETRY_S = 1.0
GIVE_UP_LEASES = 2.0
"""For so many leases weights may be unreadable before the worker ends and others take its tickets."""


class WeightFollower:
    """Loads announced versions into one engine; `run` goes on until it is cancelled."""

    def __init__(self, context: ServiceContext, engine: Engine) -> None:
        self.context, self.engine = context, engine
        self._download = weight_download(context.keys.run_id)
        self._arrived = asyncio.Condition()
        self.num_waiting = 0
        """Groups that wait for a version to arrive."""
        self._held: WeightManifest | None = None
        self.history = 0
        """Counts up when the engine leaves a history that is lost: what it generated until then is too."""
        self._failing_since: float | None = None

    async def run(self) -> None:
        """Load the newest version whenever one is announced."""
        reader = OffsetReader(self.context.broker, self.context.keys.weights, WeightManifest)
        while True:
            read = await reader.read(block_s=POLL_S)
            entries = [entry for entry in read if isinstance(entry, Entry)]
            if read and isinstance(read[-1], Garbled):
                log.warning("a foreign entry among the weights is passed over", entry=read[-1].entry_id)
            # Where nothing came, what is there may still be news: the stream may be shorter than it was.
            newest = entries[-1] if entries else await self._newest()
            if newest and self._is_news(newest.message):
                await self._load(newest.message, reader)

    async def reach(self, version: int) -> int:
        """Wait until the engine holds `version` or a newer one; returns the one it holds."""
        self.num_waiting += 1
        try:
            async with self._arrived:
                await self._arrived.wait_for(lambda: self.engine.version >= version)
                return self.engine.version
        finally:
            self.num_waiting -= 1

    def _files_of(self, manifest: WeightManifest) -> list[Path]:
        """The version's files, checked: from the run's folder, or downloaded."""
        if self._download is not None:
            return self._download.files(manifest)
        return verified_files(self.context.run_dir, manifest)

    def _is_news(self, manifest: WeightManifest) -> bool:
        """A newer version, the same one with other bytes, or any that a later trainer stands at."""
        held = self._held
        if manifest.version > self.engine.version or held is None:
            return manifest.version > self.engine.version
        if manifest.version < self.engine.version:
            return manifest.term > held.term
        if manifest.digest == held.digest:
            self._held = manifest
            return False
        return True

    def _is_other_history(self, manifest: WeightManifest) -> bool:
        """Whether the weights held now may be no ancestor of these: their trainer is another one."""
        return self._held is not None and manifest.term != self._held.term

    async def _newest(self) -> Entry[WeightManifest] | None:
        return await read_newest(self.context.broker, self.context.keys.weights, WeightManifest)

    async def _load(self, manifest: WeightManifest, reader: OffsetReader[WeightManifest]) -> None:
        """Verify and load one version; a torn one is tried again unless a newer one is there."""
        is_other_history = self._is_other_history(manifest)
        self.history += is_other_history  # what ends from now on was begun with weights that are gone
        try:
            files = await asyncio.to_thread(self._files_of, manifest)
            update = await self.engine.load(manifest.version, files)
        except WeightsError as error:
            metrics.WEIGHT_FAILURES.inc()
            log.warning("weights cannot be used yet", version=manifest.version, error=str(error))
            self._give_up_after_a_while(error)
            newest = await self._newest()
            if newest and newest.message.version == manifest.version:
                reader.position = id_before(newest.entry_id)
                await asyncio.sleep(RETRY_S)
            return
        if is_other_history:
            log.warning(
                "left weights of a history that is lost", version=manifest.version, term=manifest.term
            )
            self.history += 1  # and what was begun while the new ones were loaded
        self._failing_since, self._held = None, manifest
        metrics.WEIGHT_LOAD_SECONDS.observe(update.load_s)
        metrics.WEIGHT_PAUSE_SECONDS.observe(update.paused_s)
        metrics.WEIGHT_DELAY_SECONDS.observe(max(0.0, time.time() - manifest.announced_at))
        metrics.ENGINE_VERSION.set(update.version)
        log.debug("weights loaded", version=update.version, load_s=update.load_s, paused_s=update.paused_s)
        async with self._arrived:
            self._arrived.notify_all()

    def _give_up_after_a_while(self, error: WeightsError) -> None:
        """End this worker rather than hold tickets that it will never be able to start."""
        now = time.monotonic()
        self._failing_since = self._failing_since or now
        if now - self._failing_since > GIVE_UP_LEASES * self.context.config.streams.lease_s:
            raise error

"""Weights over HTTP, where the trainer's run folder cannot be seen from here.

Guarantees: a version is in the cache whole and checked, or not at all; workers of a machine that share the
cache download each version once; what the server sends beyond the announced size is not stored.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import structlog

from common.errors import ConfigError, WeightsError
from common.files import StorageError, aside_folder, publish_folder, retire_folder
from common.messages import WeightFile, WeightManifest
from common.weight_files import (
    WEIGHTS_FOLDER,
    WEIGHTS_TOKEN_VARIABLE,
    folder_versions,
    verified_files,
    version_name,
)

log = structlog.get_logger(__name__)

URL_VARIABLE = "TIDEMILL_WEIGHTS_URL"
"""Address of services.trainer.weight_server, such as http://head:8200; empty reads the run's folder."""
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

"""Brings versions to where workers read them that do not see the run's folder.

A version is published as the end of part 6 of a step (`trainer.py`): after its files are on the disk, because
a crash in between publishes them again from there, and before part 7, because workers start to download when
they hear of it. Publishing again does no harm: what is there already stays.
"""

import errno
import os
from pathlib import Path
from urllib.parse import urlsplit

import structlog
from pydantic import ValidationError

from tidemill.common.errors import WeightsError
from tidemill.common.files import StorageError
from tidemill.common.run.weight_files import MANIFEST_FILE, WEIGHTS_FOLDER, version_name
from tidemill.common.store.objects import OBJECT_SCHEMES
from tidemill.common.weights.remote import URL_VARIABLE, ObjectStore
from tidemill.common.wire.messages import WeightManifest

log = structlog.get_logger(__name__)


class ObjectPublisher:
    """Copies versions into an object store, the manifest last."""

    def __init__(self, url: str, run_id: str) -> None:
        self._url, self._store = url, ObjectStore(url, run_id)

    def publish(self, manifest: WeightManifest, folder: Path) -> None:
        """Copy a version. Raises StorageError: it did not work now; call again."""
        target = f"{WEIGHTS_FOLDER}/{manifest.folder}"
        try:
            if self._published(target) == (manifest.digest, manifest.files):
                return
            # Of a history that is lost: its manifest must not stay beside new files.
            self._store.remove(target)
            for file in manifest.files:
                self._store.write(f"{target}/{file.name}", folder / file.name)
            # The manifest last: a worker that finds it may read every file that it names.
            self._store.write(f"{target}/{MANIFEST_FILE}", folder / MANIFEST_FILE)
        except WeightsError as error:
            what = f"the weights of version {manifest.version}"
            raise StorageError(what, Path(self._url), errno.ETIMEDOUT, str(error)) from error

    def remove(self, version: int) -> None:
        """Remove a version that nobody needs. What cannot be removed now stays, and costs space alone."""
        try:
            self._store.remove(f"{WEIGHTS_FOLDER}/{version_name(version)}")
        except WeightsError as error:
            log.warning("old weights stay in the object store", version=version, error=str(error))

    def _published(self, target: str) -> tuple[object, ...] | None:
        try:
            data = self._store.read_all(f"{target}/{MANIFEST_FILE}")
            found = WeightManifest.model_validate_json(data)
        except (WeightsError, ValidationError):
            return None
        return found.digest, found.files


def build_publisher(url: str, run_id: str) -> ObjectPublisher | None:
    """What the address asks for, or that of the environment, which wins; None where workers fetch themselves.

    Raises:
        ConfigError: the store cannot be opened.
    """
    url = os.environ.get(URL_VARIABLE) or url
    return ObjectPublisher(url, run_id) if urlsplit(url).scheme in OBJECT_SCHEMES else None

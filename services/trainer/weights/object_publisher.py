"""Versions in an object store, beside those in the run's folder."""

import errno
from pathlib import Path
from urllib.parse import urlsplit

import structlog
from pydantic import ValidationError

from tidemill.common.errors import WeightsError
from tidemill.common.files import StorageError
from tidemill.common.run.weight_files import MANIFEST_FILE, WEIGHTS_FOLDER, version_name
from tidemill.common.store.objects import OBJECT_SCHEMES
from tidemill.common.weights.remote import ObjectStore
from tidemill.common.wire.messages import WeightManifest

log = structlog.get_logger(__name__)


class ObjectPublisher:
    """Copies versions into an object store, for workers that do not see the run's folder.

    That is the end of part 6 of a step (`trainer.py`). The files are on the disk by then: after a crash they
    are published again from there, and what is in the store already stays. Part 7 comes later: with the
    manifest that it announces, workers start to download.
    """

    def __init__(self, url: str, run_id: str) -> None:
        self._url = url
        self._store = ObjectStore(url, run_id)

    def publish(self, manifest: WeightManifest, folder: Path) -> None:
        """Copy a version. Raises StorageError: it did not work now; call again."""
        target = f"{WEIGHTS_FOLDER}/{manifest.folder}"
        try:
            if self._published(target) == (manifest.digest, manifest.files):
                return
            # What is there is of a lost history: its manifest must not stay beside new files.
            self._store.remove(target)
            for file in manifest.files:
                self._store.write(f"{target}/{file.name}", folder / file.name)
            # The manifest last: a worker that finds it may read every file that it names.
            self._store.write(f"{target}/{MANIFEST_FILE}", folder / MANIFEST_FILE)
        except WeightsError as error:
            content = f"the weights of version {manifest.version}"
            raise StorageError(content, Path(self._url), errno.ETIMEDOUT, str(error)) from error

    def remove(self, version: int) -> None:
        """Remove a version that is no longer needed. What cannot be removed stays, and costs space alone."""
        try:
            self._store.remove(f"{WEIGHTS_FOLDER}/{version_name(version)}")
        except WeightsError as error:
            log.warning("old weights stay in the object store", version=version, error=str(error))

    def _published(self, target: str) -> tuple[object, ...] | None:
        try:
            data = self._store.read_all(f"{target}/{MANIFEST_FILE}")
            manifest = WeightManifest.model_validate_json(data)
        except (WeightsError, ValidationError):
            return None
        return manifest.digest, manifest.files


def open_publisher(url: str, run_id: str) -> ObjectPublisher | None:
    """The publisher for an address of weights; None if it is no object store's.

    Raises:
        ConfigError: the store cannot be opened.
    """
    return ObjectPublisher(url, run_id) if urlsplit(url).scheme in OBJECT_SCHEMES else None

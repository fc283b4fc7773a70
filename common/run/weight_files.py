"""The layout of a run's `weights` folder, and the check before an engine reads from it.

A manifest comes over the network and is not trusted: the paths it names must lie inside the run's folder,
also after symbolic links are followed, and sizes and checksums must match the bytes.
"""

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path

from pydantic import ValidationError

from tidemill.common.errors import DamagedWeightsError, WeightsError
from tidemill.common.files import file_checksum
from tidemill.common.wire.messages import DELTA_ENCODING, WeightFile, WeightManifest

WEIGHTS_FOLDER = "weights"
"""Folder of all versions in the run's folder."""
MANIFEST_FILE = "manifest.json"
"""File beside the weights of a version: its manifest, for people and for tools without Redis."""


def version_name(version: int) -> str:
    """The folder name of a version: `v00000012`."""
    return f"v{version:08d}"


def folder_versions(folder: Path) -> list[int]:
    """The versions that have a subfolder in `folder`, in ascending order."""
    names = [path.name for path in folder.glob("v*") if path.is_dir()] if folder.is_dir() else []
    return sorted(
        int(name[1:]) for name in names if name[1:].isdecimal() and version_name(int(name[1:])) == name
    )


def verified_files(run_dir: Path, manifest: WeightManifest) -> list[Path]:
    """The files of a version, as absolute paths in the manifest's order, after checking all their bytes.

    Raises:
        WeightsError: a path leaves the run's folder, a file is missing or its bytes are not those that were
            announced, or the version is a delta in another release's format. A later version may be fine.
    """
    run = run_dir.resolve()
    where = f"weights of version {manifest.version}"
    if manifest.is_delta and manifest.encoding != DELTA_ENCODING:
        raise WeightsError(
            f"{where} are a delta in the format {manifest.encoding}, this release reads {DELTA_ENCODING}. "
            "Read them with the release that wrote them, or have the trainer write a new version."
        )
    if not manifest.files:
        raise WeightsError(f"{where}: the manifest names no files; expected at least one.")
    paths = [_path_inside(run, manifest.folder, file, where) for file in manifest.files]
    if len(set(paths)) != len(paths):
        raise WeightsError(f"{where}: the manifest names a file twice.")
    # All sizes before the first checksum: a torn file is usually short, and checksums read everything.
    for path, file in zip(paths, manifest.files, strict=True):
        _check_size(path, file, where)
    for path, file in zip(paths, manifest.files, strict=True):
        _check_content(path, file, where)
    return paths


def read_chain(run_dir: Path, manifest: WeightManifest) -> list[WeightManifest]:
    """Like `find_chain`, for the versions in a run's folder."""
    return find_chain(manifest, partial(read_manifest, run_dir))


def find_chain(
    manifest: WeightManifest,
    read: Callable[[int], WeightManifest | None],
    held: WeightManifest | None = None,
) -> list[WeightManifest]:
    """The manifests that make up a version: a full one, then the deltas in order, `manifest` last. If `held`
    is in this chain, only the deltas after it. `read` gets the manifest of a version.

    Raises:
        WeightsError: a parent is missing, or is not the one that the delta was made for.
    """
    chain = [manifest]
    while (child := chain[0]).is_delta:
        if held is not None and (child.parent, child.parent_digest) == (held.version, held.digest):
            break
        parent = read(child.parent)
        if parent is None or (parent.version, parent.digest) != (child.parent, child.parent_digest):
            problem = "not there" if parent is None else f"of other weights ({parent.digest})"
            raise WeightsError(
                f"weights of version {manifest.version}: version {child.version} is a delta to version "
                f"{child.parent} ({child.parent_digest}), which is {problem}."
            )
        chain.insert(0, parent)
    return chain


def needed_versions(run_dir: Path, versions: Iterable[int]) -> set[int]:
    """`versions` and all versions in their chains. A version that cannot be read needs only itself."""
    needed: set[int] = set()
    for version in versions:
        needed.add(version)
        with suppress(WeightsError):
            manifest = read_manifest(run_dir, version)
            if manifest:
                needed.update(link.version for link in read_chain(run_dir, manifest))
    return needed


def read_manifest(run_dir: Path, version: int) -> WeightManifest | None:
    """The manifest stored beside a version's files; None where the version is not in the folder.

    Raises:
        WeightsError: it is there but cannot be read.
    """
    path = run_dir / WEIGHTS_FOLDER / version_name(version) / MANIFEST_FILE
    try:
        return WeightManifest.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a weight manifest"
        raise WeightsError(
            f"cannot read {path}: {reason}. Remove the folder to have it written again."
        ) from None


def _path_inside(run: Path, folder: str, file: WeightFile, where: str) -> Path:
    path = run / WEIGHTS_FOLDER / folder / file.name
    try:
        resolved = path.resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise WeightsError(f"{where}: {path} is not a usable path: {error}.") from None
    if not resolved.is_relative_to(run / WEIGHTS_FOLDER):
        raise WeightsError(
            f"{where}: {folder}/{file.name} leads to {resolved}, outside of {run / WEIGHTS_FOLDER}. "
            "Weights must lie in the run's folder; refused."
        )
    return resolved


def _check_size(path: Path, file: WeightFile, where: str) -> None:
    try:
        num_bytes = path.stat().st_size
    except OSError as error:
        raise WeightsError(
            f"{where}: {path} is not there ({error.strerror}). Either the version was pruned already and a "
            "newer one is on its way, or this machine does not see the trainer's run folder "
            "(TIDEMILL_RUNS_DIR must be shared)."
        ) from None
    if num_bytes != file.num_bytes:
        raise DamagedWeightsError(
            f"{where}: {path} has {num_bytes:,} bytes, the manifest says {file.num_bytes:,}: it is torn."
        )


def _check_content(path: Path, file: WeightFile, where: str) -> None:
    try:
        checksum = file_checksum(path)
    except OSError as error:
        raise WeightsError(f"{where}: cannot read {path}: {error.strerror}.") from error
    if checksum != file.checksum:
        raise DamagedWeightsError(
            f"{where}: {path} has checksum {checksum}, the manifest says {file.checksum}: it is damaged."
        )

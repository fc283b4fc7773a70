"""Checkpoints: the trainer's whole state in one atomic rename, and the way back to the newest whole one.

Layout: `checkpoints/v00000012/{checkpoint.json, ...}` below the run's folder. `checkpoint.json` holds the
state as JSON, and size and checksum of every other file; those are written by the policy (model, optimizer,
torch's generators) as safetensors. Nothing is pickled.

Invariants: a folder named after a version was complete when it got its name. What the disk did to it since is
found by checksum, and `load_latest` then takes the one before. Older checkpoints are removed only after the
new one is durable, and only where `keep` whole ones remain. Each save looks at those that it keeps: sizes and
times of their files are noted when their bytes are written or read, and bytes are read again only where these
have changed. So a run is not left without any, and the disk holds `keep + 1` of them, more only beside torn
ones. All bytes of a checkpoint are read when it is restored, and before all others are given up for it.
"""

import contextlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import structlog
import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from tidemill.common.command_line import command_line
from tidemill.common.errors import TidemillError
from tidemill.common.files import (
    aside_folder,
    clear_aside,
    file_checksum,
    publish_folder,
    retire_folder,
    write_atomically,
)
from tidemill.common.run.weight_files import folder_versions, version_name
from tidemill.common.wire.keys import StreamName

log = structlog.get_logger(__name__)

CHECKPOINTS_FOLDER = "checkpoints"
"""Below the run's folder."""
STATE_FILE = "checkpoint.json"

SCHEMA_MAJOR = 2
SCHEMA = "2.0"
"""Fields of a newer minor are ignored; another major is refused."""

_ENTRY_ID = re.compile(r"^[0-9]+-[0-9]+$")


class CheckpointError(TidemillError):
    """There are checkpoints, but none that this trainer can continue from."""


class NoneWholeError(CheckpointError):
    """Every checkpoint there is has been damaged."""


class TrainerState(BaseModel):
    """What the trainer needs besides tensors to continue as if it had not stopped.

    Every value is plain JSON (text keys, lists instead of tuples, finite numbers): `save` refuses what would
    come back different. Each owner fills and reads its own mapping.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)
    version: int = Field(ge=0, description="committed steps")
    positions: dict[StreamName, str] = Field(
        default_factory=dict,
        description="stream -> id behind which it is read again, below all that an outstanding group has: "
        "`StreamJoin.positions`",
    )
    scheduler: dict[str, Any] = Field(
        default_factory=dict, description="tickets issued and outstanding: `Scheduler.state`"
    )
    intake: dict[str, Any] = Field(
        default_factory=dict,
        description="how far the streams were read, and hashes that show whether they still hold that: "
        "`StreamJoin.state`; `dropped`: replaced groups that the next commit has to report",
    )
    data: dict[str, Any] = Field(
        default_factory=dict,
        description="fingerprint and position of the prompts, curriculum: `PromptPlan.state`",
    )

    @field_validator("positions")
    @classmethod
    def _are_entry_ids(cls, positions: dict[StreamName, str]) -> dict[StreamName, str]:
        for stream, entry_id in positions.items():
            if not _ENTRY_ID.match(entry_id):
                raise ValueError(
                    f"position {entry_id!r} of {stream} is not an entry id such as 1700000000000-0"
                )
        return positions


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole checkpoint: its state, and the folder that the policy's `load_state` takes."""

    state: TrainerState
    folder: Path


FileNote = tuple[int, int, int, int]
"""Inode, size, and times of the last change of a file's bytes and of itself, in ns: they change with it."""


class _TornError(Exception):
    """The checkpoint is not whole; says why."""


class CheckpointStore:
    """The `checkpoints` folder of one run. One trainer writes it; construction clears what a crash left."""

    def __init__(self, run_dir: Path, keep: int) -> None:
        self.folder = run_dir / CHECKPOINTS_FOLDER
        self.keep = keep
        self.kept: list[TrainerState] = []
        """States of at most `keep` checkpoints, in ascending order: those that were whole when the last one
        was saved; before that those up to the restored one, of which only that was read as a whole."""
        self._noted: dict[int, dict[str, FileNote]] = {}
        """For each version whose bytes are known to be right, its files when they were written or read."""
        leftovers = clear_aside(self.folder)
        if leftovers:
            log.info("removed unfinished checkpoints of an earlier process", names=leftovers)

    def versions(self) -> list[int]:
        """The versions that have a checkpoint, in ascending order; whether it is whole shows on loading."""
        return folder_versions(self.folder)

    def save(self, state: TrainerState, write_tensors: Callable[[Path], object]) -> None:
        """Save state and tensors together; replaces a checkpoint of the same version. `write_tensors` writes
        all else that training needs, as safetensors, into an existing folder.

        Raises:
            StorageError: the disk is full or read-only. All earlier checkpoints are as they were; call again.
            ValueError: the state is not plain JSON.
        """
        body = _plain_json(state)
        target = self.folder / version_name(state.version)
        with aside_folder(target, f"the checkpoint of version {state.version}") as aside:
            # Tensors first: the document that follows holds size and checksum of every other file.
            write_tensors(aside)
            paths = sorted(path for path in aside.rglob("*") if path.is_file())
            names = [path.relative_to(aside).as_posix() for path in paths]
            sums = [[path.stat().st_size, file_checksum(path)] for path in paths]
            document = {"schema": SCHEMA, "state": body, "files": dict(zip(names, sums, strict=True))}
            write_atomically(aside / STATE_FILE, json.dumps({**document, "checksum": _checksum(document)}))
            publish_folder(aside, target)
        # Not before: publishing sets the files' modes, and with that the time of their change.
        self._noted[state.version] = {name: _note(target / name) for name in names}
        # Only behind the rename: a crash in between leaves one too many, which the next save removes.
        self._prune(state)

    def load_latest(self) -> Checkpoint | None:
        """The newest whole checkpoint; None where there is none at all.

        Each torn one that is skipped is logged with what was wrong with it.

        Raises:
            CheckpointError: checkpoints exist, but none is whole, or the newest was written by another
                release. Starting over silently would train on streams that were trimmed already.
        """
        versions = self.versions()
        checkpoint = _newest_whole(self.folder, versions)
        self.kept = []
        # Those above it are not whole; the next save removes them.
        for version in [v for v in versions if checkpoint and v <= checkpoint.state.version]:
            with contextlib.suppress(_TornError, CheckpointError):
                document = _read_document(self.folder / version_name(version) / STATE_FILE)
                self.kept.append(_state_of(document, version))
        del self.kept[: -self.keep]
        return checkpoint

    def keep_newest_only(self) -> bool:
        """Remove all but the newest of `kept`, if every byte of it can be read back; else change nothing."""
        newest = self.kept[-1].version
        try:
            # Every byte is read before anything is removed: the only one left must not be a damaged one.
            self.kept = [_verified_state(self.folder / version_name(newest), newest)]
        except _TornError as error:
            log.error("the newest checkpoint is not whole; keeping older ones", problem=str(error))
            return False
        for version in self.versions():
            if version != newest:
                retire_folder(self.folder / version_name(version))
        return True

    def _prune(self, saved: TrainerState) -> None:
        """Keep the newest `keep` whole ones up to the one just saved; torn ones stay until there are so
        many."""
        versions = self.versions()
        # A start has skipped those above as torn; each later start would read them first.
        for version in [v for v in versions if v > saved.version]:
            log.warning("removing a checkpoint that was skipped", version=version, saved=saved.version)
            retire_folder(self.folder / version_name(version))
        whole = [saved]
        for version in sorted((v for v in versions if v < saved.version), reverse=True):
            if len(whole) == self.keep:
                break
            try:
                whole.append(self._whole_state(version))
            except (_TornError, CheckpointError) as error:
                log.error(
                    "a checkpoint has been damaged; keeping the one before it",
                    version=version,
                    problem=str(error),
                )
        self.kept = whole[::-1]
        kept = {state.version for state in whole}
        self._noted = {version: notes for version, notes in self._noted.items() if version in kept}
        if len(whole) == self.keep:
            for version in [v for v in versions if v < saved.version and v not in kept]:
                retire_folder(self.folder / version_name(version))

    def _whole_state(self, version: int) -> TrainerState:
        """The state of a checkpoint that is whole; bytes are read only where a file is not as it was noted.
        Raises like `_verified_state`."""
        folder = self.folder / version_name(version)
        notes = self._noted.pop(version, None)
        document = _read_document(folder / STATE_FILE)
        if notes is not None and notes == _notes_of(folder, document):
            state = _state_of(document, version)
        else:
            # Before the bytes are read: a change meanwhile shows at the next look.
            notes = _notes_of(folder, document)
            state = _verified_state(folder, version)
        self._noted[version] = notes
        return state


def read_checkpoint(run_dir: Path, at_most: int) -> Checkpoint | None:
    """The newest whole checkpoint of a version up to `at_most`; None where there is none. Changes nothing.
    Raises CheckpointError: as `CheckpointStore.load_latest`."""
    folder = run_dir / CHECKPOINTS_FOLDER
    return _newest_whole(folder, [version for version in folder_versions(folder) if version <= at_most])


def _newest_whole(folder: Path, versions: list[int]) -> Checkpoint | None:
    problems: list[str] = []
    for version in reversed(versions):
        path = folder / version_name(version)
        try:
            checkpoint = Checkpoint(_verified_state(path, version), path)
        except _TornError as error:
            log.warning("checkpoint is not whole; trying the one before", version=version, problem=str(error))
            problems.append(f"{path.name}: {error}")
            continue
        if problems:
            log.warning("continuing from an older checkpoint", version=version, skipped=problems)
        return checkpoint
    if problems:
        raise NoneWholeError(
            f"none of the {len(problems)} checkpoint(s) in {folder} is whole:\n  "
            + "\n  ".join(problems)
            + "\nRestore one from a backup, or start a new run."
        )
    return None


def _plain_json(state: TrainerState) -> dict[str, Any]:
    """The state as JSON values, after checking that reading it gives the same state."""
    body = state.model_dump()
    try:
        text = json.dumps(body, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the trainer's state is not plain JSON: {error}") from None
    # JSON turns integer keys into text and tuples into lists without a word; found on the first save, that is
    # a bug report, found on a resume it is a lost run.
    changed = json.loads(text)
    if changed != body:
        fields = [name for name in body if changed[name] != body[name]]
        raise ValueError(
            f"the trainer's state is not plain JSON: {', '.join(fields)} would come back different"
        )
    return body


def _checksum(document: dict[str, Any]) -> str:
    """Checksum of a document's content, whatever the spacing and order of its JSON."""
    return xxhash.xxh3_128_hexdigest(json.dumps(document, sort_keys=True, separators=(",", ":")).encode())


def _note(path: Path) -> FileNote:
    stat = path.stat()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def _notes_of(folder: Path, document: dict[str, Any]) -> dict[str, FileNote]:
    """The files of a checkpoint as they are now. Raises _TornError: one is missing."""
    try:
        return {name: _note(_path_inside(folder, name)) for name in document["files"]}
    except FileNotFoundError as error:
        raise _TornError(f"{Path(error.filename).name} is missing") from None
    except OSError as error:
        raise _TornError(f"{error.filename} cannot be read: {error.strerror}") from None


def _verified_state(folder: Path, version: int) -> TrainerState:
    """Check every byte of a checkpoint and return its state; `_TornError` says what is wrong."""
    document = _read_document(folder / STATE_FILE)
    for name, (num_bytes, checksum) in document["files"].items():
        _check_file(folder, name, num_bytes, checksum)
    return _state_of(document, version)


def _state_of(document: dict[str, Any], version: int) -> TrainerState:
    try:
        state = TrainerState.model_validate(document["state"])
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise _TornError(f"{STATE_FILE}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    # A folder that was renamed or copied by hand would be replayed from the wrong step.
    if state.version != version:
        raise _TornError(f"{STATE_FILE} is that of version {state.version}")
    return state


def _read_document(path: Path) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads(path.read_bytes())
        checksum = document.pop("checksum")
    except FileNotFoundError:
        raise _TornError(f"{path.name} is missing") from None
    except OSError as error:
        raise _TornError(f"{path.name} cannot be read: {error.strerror}") from None
    except (ValueError, AttributeError, KeyError, TypeError):
        raise _TornError(f"{path.name} is cut off or not JSON") from None
    if checksum != _checksum(document):
        raise _TornError(f"{path.name} does not match its own checksum")
    # After the checksum, so that damage is not mistaken for another release.
    if int(str(document["schema"]).split(".")[0]) != SCHEMA_MAJOR:
        raise CheckpointError(
            f"{path} has schema {document['schema']}, this release reads {SCHEMA_MAJOR}.x. Continue with the "
            f"release that wrote it, or start a new run from its weights (`{command_line('export')}`)."
        )
    return document


def _check_file(folder: Path, name: str, num_bytes: int, checksum: str) -> None:
    path = _path_inside(folder, name)
    try:
        # The size first: it costs nothing, and distinguishes a file that was cut off from a changed one.
        num_found = path.stat().st_size
        if num_found != num_bytes:
            raise _TornError(f"{name} has {num_found:,} bytes instead of {num_bytes:,}")
        if file_checksum(path) != checksum:
            raise _TornError(f"{name} does not match its checksum")
    except FileNotFoundError:
        raise _TornError(f"{name} is missing") from None
    except OSError as error:
        raise _TornError(f"{name} cannot be read: {error.strerror}") from None


def _path_inside(folder: Path, name: str) -> Path:
    """Raises _TornError: the file is not in the checkpoint."""
    path = folder / name
    # Names come from a file that may have been copied from anywhere: they must lead nowhere else.
    if PurePosixPath(name).is_absolute() or not path.resolve().is_relative_to(folder.resolve()):
        raise _TornError(f"{name} lies outside of the checkpoint")
    return path

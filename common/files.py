"""Files and folders that are either whole or absent, and checksums that prove it.

Invariant: a name that readers look for never refers to half-written bytes. Everything is written under an
aside name in the same folder (`.name.<random>.aside`), flushed to the disk, and then renamed; the rename is
flushed too before the call returns. What a crash leaves behind is under an aside name, which
`clear_aside` removes at the next start.
"""

import difflib
import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

import xxhash
from safetensors import SafetensorError

from tidemill.common.errors import TidemillError

CHUNK_BYTES = 4 << 20
"""Bytes read at once for a checksum."""

_ASIDE = re.compile(r"^\.(?P<name>.+)\.(?:[0-9a-f]{8}\.aside|(?P<replaced>replaced))$")
_OS_ERROR = re.compile(r"\(os error (\d+)\)")

_REMEDIES = {
    errno.ENOSPC: "free some space on that disk",
    errno.EDQUOT: "raise the quota, or free some space",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
    errno.EROFS: "mount it writable",
    errno.EACCES: "give this user permission to write there",
    errno.EPERM: "give this user permission to write there",
}


class LockedError(TidemillError):
    """Another process works on the same files."""


class StorageError(TidemillError):
    """A file or folder could not be written. Nothing half-written is visible; the call may be repeated.

    `can_clear` says whether waiting makes sense: a full or read-only disk is something that an operator
    can put right while the run waits; a path that is no folder is not.
    """

    def __init__(self, label: str, path: Path, number: int | None, reason: str) -> None:
        remedy = _REMEDIES.get(number or 0, "check the disk and the path")
        super().__init__(f"cannot write {label} to {path}: {reason}; {remedy}.")
        self.path = path
        self.reason = reason
        self.errno = number
        self.can_clear = number in _REMEDIES or number in (errno.EIO, errno.ESTALE, errno.ETIMEDOUT)


@contextmanager
def storage_errors(label: str, path: Path) -> Iterator[None]:
    """Turn the errors of writing, Python's and those of safetensors, into one `StorageError`.

    Blocks may nest: the message names what the outermost one was writing.
    """
    try:
        yield
    except StorageError as error:
        raise StorageError(label, path, error.errno, error.reason) from error
    except OSError as error:
        raise StorageError(label, path, error.errno, error.strerror or str(error)) from error
    except SafetensorError as error:
        match = _OS_ERROR.search(str(error))
        number = int(match[1]) if match else None
        raise StorageError(label, path, number, os.strerror(number) if number else str(error)) from error


def write_atomically(path: Path, data: bytes | str) -> None:
    """Replace the file at `path`, or create it. After a crash it holds the old bytes or the new ones.

    Raises:
        StorageError: the disk is full, read-only, or not there. The old file is untouched.
    """
    aside = _aside_name(path)
    with storage_errors("a file", path):
        try:
            with open(aside, "xb") as file:
                file.write(data.encode() if isinstance(data, str) else data)
                file.flush()
                # Before the rename: after a power failure the name must not refer to bytes that were lost.
                os.fsync(file.fileno())
            os.replace(aside, path)
        except BaseException:
            with suppress(OSError):
                aside.unlink(missing_ok=True)
            raise
        fsync_folder(path.parent)


def append_durably(path: Path, data: bytes, label: str = "a file", end: int | None = None) -> None:
    """Append to the file at `path`, or create it; with `end`, cut it to so many bytes first. Flushes.

    Raises:
        StorageError: the disk is full, read-only, or not there. Nothing was appended.
    """
    with storage_errors(label, path):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Unbuffered: closing a buffered file would write the rest after `append_whole` has cut the file.
        with open(path, "ab", buffering=0) as file:
            append_whole(file, data, end, is_durable=True)


def append_whole(file: FileIO, data: bytes, end: int | None = None, is_durable: bool = False) -> None:
    """Append all of `data` to an unbuffered file, or nothing; see `append_durably`. Raises OSError."""
    size = os.fstat(file.fileno()).st_size
    # Never beyond the end of the file: `ftruncate` would fill the gap with zeros.
    end = size if end is None else min(end, size)
    try:
        if size > end:
            os.ftruncate(file.fileno(), end)
        unwritten = memoryview(data)
        while unwritten:  # one write may take only a part; the next one goes on, or raises
            unwritten = unwritten[file.write(unwritten) :]
        if is_durable:
            os.fsync(file.fileno())
    except OSError:
        # After a failed flush too: what is reported as not written must not be read by the next start.
        os.ftruncate(file.fileno(), end)
        raise


@contextmanager
def aside_file(target: Path, label: str = "a file") -> Iterator[Path]:
    """Yield a path beside `target`: write it, then call `publish_file`. If not published, it is removed.

    Raises:
        StorageError: writing failed, inside the block or around it. `target` is as it was.
    """
    aside = _aside_name(target)
    with storage_errors(label, target):
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            yield aside
        finally:
            with suppress(OSError):
                aside.unlink(missing_ok=True)


def publish_file(aside: Path, target: Path) -> None:
    """Flush the file at `aside` and rename it to `target`."""
    _fsync(aside)
    os.replace(aside, target)
    fsync_folder(target.parent)


@contextmanager
def aside_folder(target: Path, label: str = "a folder") -> Iterator[Path]:
    """Yield an empty folder beside `target`: fill it, then call `publish_folder`, or it is removed.

    Raises:
        StorageError: writing failed, inside the block or around it. `target` is as it was.
    """
    with storage_errors(label, target):
        aside = begin_folder(target, label)
        try:
            yield aside
        finally:
            remove_folder(aside)


def begin_folder(target: Path, label: str = "a folder") -> Path:
    """Create an empty folder beside `target`: fill it, then call `publish_folder` or `remove_folder`.

    Raises:
        StorageError: it cannot be made.
    """
    aside = _aside_name(target)
    with storage_errors(label, target):
        target.parent.mkdir(parents=True, exist_ok=True)
        aside.mkdir()
    return aside


def publish_folder(aside: Path, target: Path) -> None:
    """Flush everything below `aside` and rename it to `target`.

    A folder that exists at `target` is replaced, only once the new one is complete and flushed;
    `clear_aside` repairs a crash between the two renames.
    """
    _fsync_tree(aside)  # first, as in `write_atomically`: the old folder still has its name
    replaced = target.with_name(f".{target.name}.replaced")
    if target.exists():
        # Left over by a crash after the swap.
        remove_folder(replaced)
        os.rename(target, replaced)  # a folder cannot be renamed over one that is not empty
    try:
        os.rename(aside, target)
    except OSError:
        if replaced.exists():
            os.rename(replaced, target)
        raise
    fsync_folder(target.parent)
    # Only now: before the renames are on the disk, a power failure may bring the old name back.
    remove_folder(replaced)


def clear_aside(folder: Path, others: Collection[str] = ()) -> list[str]:
    """Remove what a crash left in `folder`; returns the names. Call only while no other process writes
    there; files named in `others` are left alone and may be written."""
    with storage_errors("folder names", folder):
        folder.mkdir(parents=True, exist_ok=True)
        leftovers = []
        for path in sorted(folder.iterdir()):
            match = _ASIDE.match(path.name)
            if match is not None and match["name"] not in others:
                leftovers.append((path, match))
        for path, match in leftovers:
            if match["replaced"] and not (folder / match["name"]).exists():
                os.rename(path, folder / match["name"])  # crashed between the two renames of a swap
            elif path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        if leftovers:
            fsync_folder(folder)
    return [path.name for path, _ in leftovers]


def retire_folder(path: Path) -> None:
    """Remove a published folder. It loses its name first, so that no reader finds half of it.

    Raises:
        StorageError: the folder cannot be renamed.
    """
    aside = _aside_name(path)
    with storage_errors("the removal of an old folder", path):
        os.rename(path, aside)
        fsync_folder(path.parent)  # the name must be gone for good before the bytes go
    remove_folder(aside)


def remove_folder(path: Path) -> None:
    """Remove a folder as far as that is possible; `clear_aside` finishes at the next start."""
    shutil.rmtree(path, ignore_errors=True)


@contextmanager
def locked(path: Path, otherwise: str) -> Iterator[int]:
    """Hold an exclusive lock on a file; a child that inherits the descriptor keeps it until it ends.

    Raises:
        LockedError: another process holds it; the message is `otherwise`.
        StorageError: the file cannot be made.
    """
    with storage_errors("a lock", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "w")  # noqa: SIM115 (closed below; errors of the block are not errors of the lock)
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LockedError(otherwise) from None
        yield file.fileno()


def file_checksum(path: Path) -> str:
    """xxh3-128 of the file's bytes, 32 hexadecimal digits, read in chunks.

    Detects torn and damaged files, not deliberate changes.
    """
    digest = xxhash.xxh3_128()
    buffer = bytearray(CHUNK_BYTES)
    view = memoryview(buffer)
    with open(path, "rb", buffering=0) as file:
        while num_bytes := file.readinto(buffer):
            digest.update(view[:num_bytes])
    return digest.hexdigest()


def free_share(folder: Path) -> float:
    """Share of the disk with `folder` that is free for this process, between 0 and 1."""
    disk = os.statvfs(folder)
    return disk.f_bavail / max(1, disk.f_blocks)


def fsync_folder(folder: Path) -> None:
    """Flush a folder's own entries, so that a rename in it survives a power failure."""
    _fsync(folder, os.O_DIRECTORY)


def _fsync(path: Path | str, flags: int = 0, mode: int | None = None) -> None:
    descriptor = os.open(path, os.O_RDONLY | flags)
    try:
        if mode is not None:
            os.fchmod(descriptor, mode)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _aside_name(path: Path) -> Path:
    return path.parent / f".{path.name}.{secrets.token_hex(4)}.aside"  # also where it has no name


def _fsync_tree(folder: Path) -> None:
    """Flush all files and folders below, innermost first; files get the folder's read and write modes."""
    # safetensors creates its files readable by their owner only; a rollout worker in another container may
    # be another user.
    mode = folder.stat().st_mode & 0o666
    for root, _, names in os.walk(folder, topdown=False):
        for name in names:
            _fsync(os.path.join(root, name), os.O_NOFOLLOW, mode)
        fsync_folder(Path(root))


def did_you_mean(missing: Path, is_wanted: Callable[[Path], bool] = Path.is_file) -> str:
    """A sentence, with a space before it, that names what lies beside a missing path and is called much like
    it; empty where there is nothing."""
    try:
        beside = [path.name for path in missing.parent.iterdir() if is_wanted(path)]
    except OSError:
        return ""
    close = difflib.get_close_matches(missing.name, beside, n=1)
    return f" Did you mean {missing.parent / close[0]}?" if close else ""

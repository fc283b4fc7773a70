"""The disk that all machines of a run share: it may be full, have torn files, and locks of living processes.

It stands between `os` and the run's folder. A process that was killed changes nothing any more, not even in
`finally`: what it would clean up stays as it was.
"""

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.simulation.loop import OWNER
from tests.simulation.process import KilledError, Process

WRITING = ("x", "w", "a", "+")


@dataclass
class Disk:
    """`kill` ends the process whose trap a file operation springs."""

    folder: Path
    kill: Callable[[Process], None]
    is_full: bool = False
    num_operations: int = 0
    broken: list[str] = field(default_factory=list)
    """Names that were given to bytes that a power failure could still take."""
    _flushed: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    """Device and inode -> size and time of the last change when the file was flushed."""
    _locks: dict[tuple[int, int], tuple[Process, Any]] = field(default_factory=dict)

    def step(self, path: Any) -> None:
        """Called before every operation that changes the disk.

        Raises:
            KilledError: the process dies, or is dead.
            OSError: the disk is full.
        """
        # Names without a folder are those that `rmtree` removes.
        if isinstance(path, int) or not os.path.isabs(path) or str(path).startswith(str(self.folder)):
            self._step()

    def _step(self) -> None:
        process = OWNER.get(None)
        if process is None:
            return
        self.num_operations += 1
        if process.is_dead:
            raise KilledError
        self.spring("file")

    def spring(self, kind: str) -> None:
        """Raises KilledError: the process dies at this step of the kind."""
        process = OWNER.get(None)
        if process is not None and process.springs(kind):
            self.kill(process)
            raise KilledError

    def step_growing(self, path: Any) -> None:
        """The same, of an operation that needs room."""
        self.step(path)
        if self.is_full and OWNER.get(None) is not None and str(path).startswith(str(self.folder)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def flush(self, descriptor: int) -> None:
        """A file or folder is flushed."""
        status = os.fstat(descriptor)
        self._flushed[status.st_dev, status.st_ino] = status.st_size, status.st_mtime_ns

    def give_name(self, source: Any, target: Any) -> None:
        """A file or folder of the run gets a name: all that is in it must have been flushed before."""
        path = Path(target)
        # What begins with a dot is a name that no reader looks for.
        if OWNER.get(None) is None or path.name.startswith(".") or not path.is_relative_to(self.folder):
            return
        origin = Path(source)
        files = [entry for entry in origin.rglob("*") if entry.is_file()] if origin.is_dir() else [origin]
        for file in files:
            status = os.lstat(file)
            if self._flushed.get((status.st_dev, status.st_ino)) != (status.st_size, status.st_mtime_ns):
                self.broken.append(f"disk: {path.name} got its name before {file.name} was flushed")

    def lock(self, file: Any, is_waiting: bool) -> None:
        """An exclusive lock on an open file, as long as file and process are there.

        Raises:
            BlockingIOError: another one holds it.
        """
        process = OWNER.get(None)
        status = os.fstat(file.fileno())
        key = status.st_dev, status.st_ino
        holder = self._locks.get(key)
        if holder is not None and not holder[1].closed and not holder[0].is_dead:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        if process is not None:
            self._locks[key] = process, file

    def free_locks(self, process: Process) -> None:
        """Release the locks of a process that is dead."""
        self._locks = {key: held for key, held in self._locks.items() if held[0] is not process}

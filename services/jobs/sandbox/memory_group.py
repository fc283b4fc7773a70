"""Memory cgroups for programs that nobody trusts, where this process may make one.

In a group the kernel counts also what belongs to no process, such as buffers of sockets. Where none may be
made, programs have the limits that `jail.py` sets and looks at.
"""

import contextlib
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

GROUP_PREFIX = "tidemill-jail-"
CGROUP_1 = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")
CGROUP_2 = ("memory.max", "memory.swap.max")
CGROUPS = Path("/sys/fs/cgroup")
ENTER_GROUP = '{ echo 0 > "$0"; } 2>/dev/null; exec "$@"'
"""Where a process may not move itself, the program has the other limits."""
REMOVE_GROUP_S, PAUSE_S = 2.0, 0.01


class MemoryGroup:
    """A memory cgroup for one program after the other; without a folder there is none. In it the kernel
    counts what belongs to no process, too."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def entered(self, command: list[str]) -> list[str]:
        if self._folder is None:
            return command
        return ["/bin/sh", "-c", ENTER_GROUP, str(self._folder / "cgroup.procs"), *command]

    def num_killed(self) -> int:
        """How many processes the kernel has killed in it for want of memory."""
        for name in ("memory.events", "memory.oom_control") if self._folder else ():
            with contextlib.suppress(OSError):
                for line in Path(f"{self._folder}/{name}").read_text().splitlines():
                    if line.startswith("oom_kill "):
                        return int(line.split()[1])
        return 0


@contextlib.contextmanager
def memory_group(num_bytes: int) -> Iterator[MemoryGroup]:
    """A group with this limit where one may be made, else none."""
    folder = _make(num_bytes)
    try:
        yield MemoryGroup(folder)
    finally:
        deadline = time.monotonic() + REMOVE_GROUP_S
        while folder is not None and time.monotonic() < deadline:
            with contextlib.suppress(OSError):  # busy until the last of its processes is gone
                folder.rmdir()
                break
            time.sleep(PAUSE_S)


def _remove_orphans(place: Path) -> None:
    """Groups of workers that were killed."""
    for folder in place.glob(f"{GROUP_PREFIX}*"):
        if not Path("/proc", folder.name.removeprefix(GROUP_PREFIX).partition("-")[0]).exists():
            with contextlib.suppress(OSError):
                folder.rmdir()


def _make(num_bytes: int) -> Path | None:
    for place in _places():
        _remove_orphans(place)
        folder = place / f"{GROUP_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
        with contextlib.suppress(OSError):
            folder.mkdir()
            is_second = (folder / "memory.max").exists()
            limit, swap = CGROUP_2 if is_second else CGROUP_1
            with contextlib.suppress(OSError), open(folder / limit, "r+") as file:
                file.write(str(num_bytes))
                file.flush()
                with contextlib.suppress(OSError):  # no swap, where it is counted
                    (folder / swap).write_text("0" if is_second else str(num_bytes))
                return folder
            folder.rmdir()
    return None


def _places() -> Iterator[Path]:
    """This process's own group, and the one above: groups with processes may have no children with limits."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" or "memory" in controllers.split(","):
            own = CGROUPS / ("" if number == "0" else "memory") / path.lstrip("/")
            yield own
            if path != "/":
                yield own.parent

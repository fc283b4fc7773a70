"""A memory cgroup for a jail, where one may be made: there the kernel counts what belongs to no process,
too.
"""

import contextlib
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
ENTER = '{ echo 0 > "$0"; } 2>/dev/null; exec "$@"'
"""Where a process may not move itself, the program has the other limits."""
REMOVE_S, PAUSE_S = 2.0, 0.01


class MemoryGroup:
    """A cgroup for one program after the other; without a folder there is none."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def entered(self, command: list[str]) -> list[str]:
        """The command that runs `command` in the group."""
        if self._folder is None:
            return command
        return ["/bin/sh", "-c", ENTER, str(self._folder / "cgroup.procs"), *command]

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
        deadline = time.monotonic() + REMOVE_S
        while folder is not None and time.monotonic() < deadline:
            with contextlib.suppress(OSError):  # busy until the last of its processes is gone
                folder.rmdir()
                break
            time.sleep(PAUSE_S)


def _make(num_bytes: int) -> Path | None:
    """Below this process's own group or beside it: groups with processes may have no children with limits."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            parent, limits = CGROUPS / path.lstrip("/"), ("memory.max", "memory.swap.max")
        elif "memory" in controllers.split(","):
            parent = CGROUPS / "memory" / path.lstrip("/")
            limits = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")
        else:
            continue
        for place in (parent, parent.parent) if path != "/" else (parent,):
            folder = place / f"tidemill-jail-{secrets.token_hex(4)}"
            try:
                folder.mkdir()
            except OSError:
                continue
            try:
                with open(folder / limits[0], "r+") as file:  # where there is such a file
                    file.write(str(num_bytes))
            except OSError:
                with contextlib.suppress(OSError):
                    folder.rmdir()
                continue
            with contextlib.suppress(OSError):  # no swap, where it is counted
                (folder / limits[1]).write_text("0" if number == "0" else str(num_bytes))
            return folder
    return None

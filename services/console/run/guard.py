"""A small process that ends the console's processes if the console itself ends first, even by SIGKILL.

This file is also that process's script, so it needs the standard library only. It reads lines from the
console over a pipe:

    watch PID service|redis      a process, the leader of its own process group
    forget PID                   it has ended
    remove FOLDER                a folder to remove at the end

When the pipe closes while processes are still watched, the services are told to stop and get GRACE_S
seconds; then their groups are killed, and Redis, which they need until then, is stopped last. After a normal
end nothing is left to watch, and the process just ends.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Literal

GRACE_S = 10.0
POLL_S = 0.1


class Guard:
    """The console's end of the pipe. `with Guard() as guard:`"""

    def __enter__(self) -> "Guard":
        # A session of its own: the terminal's Ctrl-C and hang-up are not for it.
        self._process = subprocess.Popen(
            # Isolated: nothing that the user has installed or set can keep it from starting.
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            # Else it would hold the console's output open, and a pipe behind that would see no end.
            stdout=subprocess.DEVNULL,
            # Other processes of this user can read its variables. Some Pythons need this one.
            env={name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ},
            text=True,
            start_new_session=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()

    def watch(self, pid: int, kind: Literal["service", "redis"]) -> None:
        """Stop this process group when the console has ended."""
        self._write(f"watch {pid} {kind}")

    def forget(self, pid: int) -> None:
        """The process has ended, and its number may be given to another one."""
        self._write(f"forget {pid}")

    def remove_at_end(self, folder: Path) -> None:
        """Remove this folder if the console ends without doing so."""
        self._write(f"remove {folder}")

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # a run works without its guard
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()


def main() -> None:
    """Follow the pipe to its end, then clean up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # Only the end of the pipe ends this process: a signal to it and the console must not.
        signal.signal(number, signal.SIG_IGN)
    watched: dict[int, str] = {}
    folders: list[str] = []
    for line in sys.stdin:
        verb, _, arguments = line.rstrip("\n").partition(" ")
        if verb == "watch":
            pid, _, kind = arguments.partition(" ")
            watched[int(pid)] = kind
        elif verb == "forget":
            watched.pop(int(arguments), None)
        elif verb == "remove":
            folders.append(arguments)
    for wanted in ("service", "redis"):  # services need Redis to hand back what they hold
        _stop([pid for pid, kind in watched.items() if kind == wanted])
    # With nothing left to watch the console has ended in order, and removed them itself.
    for folder in folders if watched else ():
        shutil.rmtree(folder, ignore_errors=True)


def _stop(pids: list[int]) -> None:
    """SIGTERM to each process, and after the grace SIGKILL to what is left of its group."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    while any(map(_is_running, pids)) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            # Also where the leader has ended: while its group has members, no other process gets the number.
            os.killpg(pid, signal.SIGKILL)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    # A process of another user has got the number: the one that was watched is gone.
    except (ProcessLookupError, PermissionError):
        return False
    return True


if __name__ == "__main__":
    main()

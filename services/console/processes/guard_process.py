"""Stops the processes that a console started when the console itself has ended, SIGKILL included.

Runs as a script with the standard library only. It reads lines from the console over a pipe:

    watch PID service|redis      a process, the leader of its own process group
    forget PID                   it has ended
    remove FOLDER                a folder to remove at the end

When the pipe closes while processes are still watched, the services are told to stop and get GRACE_S
seconds; then their groups are killed, and Redis, which they need until then, is stopped last. In order,
nothing is left to watch, and this process just ends.
"""

import contextlib
import os
import shutil
import signal
import sys
import time

GRACE_S = 10.0
POLL_S = 0.1


def main() -> None:
    """Follow the pipe to its end, then clean up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    watched: dict[int, str] = {}
    folders: list[str] = []
    for line in sys.stdin:
        verb, _, rest = line.rstrip("\n").partition(" ")
        if verb == "watch":
            pid, _, kind = rest.partition(" ")
            watched[int(pid)] = kind
        elif verb == "forget":
            watched.pop(int(rest), None)
        elif verb == "remove":
            folders.append(rest)
    _stop([pid for pid, kind in watched.items() if kind == "service"])
    _stop([pid for pid, kind in watched.items() if kind == "redis"])
    if watched:
        for folder in folders:
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
            os.killpg(pid, signal.SIGKILL)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


if __name__ == "__main__":
    main()

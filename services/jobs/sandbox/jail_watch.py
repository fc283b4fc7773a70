"""Follows one program in a jail until it ends or meets a limit: output, time, and what its processes use."""

import contextlib
import os
import select
import signal
import time
from pathlib import Path
from typing import Any

WATCH_S = 0.02
READ_BYTES = 1 << 16
NUM_THREADS = 17
"""Place in /proc/PID/stat, counted from behind the name."""

Buffers = dict[int, bytearray]


class Watch:
    """Follows one running program: its output, its time, the memory and number of its processes."""

    def __init__(self, child: int, order: dict[str, Any], has_own_proc: bool) -> None:
        self.child, self.order, self.has_own_proc = child, order, has_own_proc
        self.max_bytes = order["output_kb"] << 10

    def follow(
        self, fed: bytes, stdin: int, stdout: int, stderr: int, time_s: float
    ) -> tuple[str, "int | None", bytes, bytes]:
        """How it ended, its exit code, and what it wrote."""
        for end in (stdin, stdout, stderr):
            os.set_blocking(end, False)
        written = {stdout: bytearray(), stderr: bytearray()}
        deadline, looked, code = time.monotonic() + time_s, 0.0, None
        outcome = ""
        try:
            while not outcome:
                ready, free, _ = select.select(list(written), [stdin] if fed else [], [], WATCH_S)
                for end in ready:
                    _read_into(written[end], end)
                if free:
                    fed = _feed(stdin, fed)
                if not fed and stdin >= 0:
                    os.close(stdin)
                    stdin = -1
                code = code if code is not None else _exit_code(self.child)
                if sum(map(len, written.values())) > self.max_bytes:
                    outcome = "output"
                elif code is not None and not any(_read_into(*pair) for pair in _pairs(written)):
                    outcome = _ending(code)
                elif time.monotonic() > deadline:
                    outcome = "timeout"
                elif time.monotonic() - looked > 2 * WATCH_S:
                    looked = time.monotonic()
                    outcome = self._excess()
        finally:
            for end in (stdin, stdout, stderr):
                if end >= 0:
                    os.close(end)
        return (
            outcome,
            code,
            bytes(written[stdout][: self.max_bytes]),
            bytes(written[stderr][: self.max_bytes]),
        )

    def _excess(self) -> str:
        """Limits that no setrlimit has: of all processes together."""
        pids = _others() if self.has_own_proc else descendants()
        if len(pids) > self.order["max_processes"]:
            return "processes"
        return "memory" if sum(map(_used_bytes, pids)) > self.order["memory_mb"] << 20 else ""


def _pairs(written: Buffers) -> list[tuple[bytearray, int]]:
    return [(buffer, end) for end, buffer in written.items()]


def _ending(code: int) -> str:
    if code == -signal.SIGXCPU:
        return "timeout"
    if code == -signal.SIGXFSZ:
        return "file"
    return "done" if code >= 0 else "killed"


def _read_into(buffer: bytearray, end: int) -> bool:
    """Whether there was anything."""
    try:
        part = os.read(end, READ_BYTES)
    except BlockingIOError:
        return False
    buffer += part
    return bool(part)


def _feed(stdin: int, fed: bytes) -> bytes:
    try:
        return fed[os.write(stdin, fed[:READ_BYTES]) :]
    except BlockingIOError:
        return fed
    except BrokenPipeError:
        return b""


def _exit_code(child: int) -> "int | None":
    """Reap what has ended; the code of `child` if it is among them."""
    found = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        if pid == child:
            found = os.waitstatus_to_exitcode(status)


def reap(wait: bool = False) -> None:
    """Take note of the children that have ended; with `wait` until there are none."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, 0 if wait else os.WNOHANG)[0]:
            pass


def _others() -> list[int]:
    """All processes of this namespace but its first."""
    with contextlib.suppress(OSError):
        return [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"]
    return []


def descendants() -> list[int]:
    """Processes below this one, wherever they moved their session; orphans come back to it."""
    root = int(os.readlink("/proc/self"))  # its number where this /proc belongs, which may be outside
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                fields = Path("/proc", name, "stat").read_bytes().rpartition(b")")[2].split()
                # One whose first thread has ended looks like a zombie, and the others go on.
                if fields[0] != b"Z" or int(fields[NUM_THREADS]) > 1:
                    children.setdefault(int(fields[1]), []).append(int(name))
    found, heads = [], [root]
    while heads:
        heads = [pid for head in heads for pid in children.get(head, [])]
        found += heads
    return found


def _used_bytes(pid: int) -> int:
    """Memory of a process, what was moved to swap included.

    Every thread tells it; the first one has none to tell when it has ended. A status's first line holds the
    name, which the process chose: any bytes, other ends of lines among them.
    """
    with contextlib.suppress(OSError):
        for status in [Path("/proc", str(pid), "status"), *Path("/proc", str(pid), "task").glob("*/status")]:
            with contextlib.suppress(OSError):
                lines = status.read_bytes().split(b"\n")
                told = [line for line in lines if line.startswith((b"VmRSS:", b"VmSwap:"))]
                if told:
                    return sum(int(line.split()[1]) << 10 for line in told)
    return 0

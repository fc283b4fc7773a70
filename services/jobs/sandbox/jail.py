"""Runs untrusted programs, each in a jail of its own.

bubblewrap makes namespaces (processes, network, mounts), a root folder with nothing but the system's
programs, the interpreter and an empty /tmp, and installs the filter of system calls (`system_calls.py`). In
the jail, `launcher.py` sets limits, gives up root, and becomes the program. This process watches its time,
its output, and the memory and number of its processes. When bubblewrap ends, the kernel kills everything in
the jail; bubblewrap ends with the thread that started it.
"""

import contextlib
import itertools
import json
import math
import os
import select
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import IO, Any

import psutil

from tidemill.common.config.reward_kinds import SandboxConfig
from tidemill.common.errors import TidemillError
from tidemill.common.process.shortage import is_machine_fault, machine_faults
from tidemill.services.jobs.sandbox.preamble import INT_DIGITS, RECURSION_LIMIT
from tidemill.services.jobs.sandbox.system_calls import make_filter

SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/sbin", "/etc/ld.so.cache", "/etc/alternatives")
DEVICES = ("/dev/null", "/dev/urandom", "/dev/random")
"""/dev/zero is left out: a mapping of it can be memory that belongs to no process."""
LAUNCHER = Path(__file__).with_name("launcher.py").read_text(encoding="utf-8")
FETCHED = Path(sys.prefix, "bubblewrap")
"""Folder into which `make` unpacks bubblewrap on machines without it."""
MAX_FILES = 4096
MAX_PROCESSES = 16
"""Most processes and threads of one program at once."""
BUBBLEWRAPS = 2
"""Processes of bubblewrap itself in each jail."""
MAX_OUTPUT_BYTES = 256 << 10
STACK_BYTES = 100 << 20
"""Stack of a program's main thread: at Python's recursion limit, calls through C (a cached function, the key
of `sorted`, `__init__`) take up to 2 kB each, and without room they end the process. What is used counts as
its memory. Linux leaves at least 128 MiB for it to grow into."""
LOOK_S = 0.04
LOOK_SHARE = 0.1
"""Largest share of the time spent on looking at processes: large machines have many."""
NOBODY = 65534
FIRST_UID, NUM_UIDS = 200_000, 60_000
"""Under root, each program gets a user id of its own: the limit on processes counts per user, and includes
processes that have ended until they are reaped."""
NUMBERS, STRIDE = itertools.count(), 7919
CAP_SYS_ADMIN = 21
ENDINGS = {128 + signal.SIGXCPU: "timeout", 128 + signal.SIGXFSZ: "file"}
LAST_SIGNAL = 128 + 64

Result = dict[str, Any]


class SandboxError(TidemillError):
    """The jail failed, which says nothing about the code in it."""


def run_program(
    source: str, stdin: str, config: SandboxConfig, time_s: float, before: str = "", has_file: bool = False
) -> Result:
    """Run one program to its end, or to the first limit that it meets.

    Args:
        source: The program, in Python.
        stdin: Its standard input.
        config: Its limits.
        time_s: The longest time that it may take.
        before: Statements that run before it, in its globals.
        has_file: Whether it may read its standard input as the file /dev/stdin too.

    Raises:
        SandboxError: the jail could not be set up; no line of the program has run.
        MachineFaultError: this machine is short of something that a jail needs.
    """
    with machine_faults("a jail could not be set up"), contextlib.ExitStack() as stack:
        # Files, not pipes: no reader is needed while it runs, and their size says how much it has written.
        order, fed, calls, out, err = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(5))
        uid = FIRST_UID + (os.getpid() + next(NUMBERS) * STRIDE) % NUM_UIDS if _is_admin() else 0
        order.write(json.dumps(_order(source, before, config, uid)).encode())
        fed.write(stdin.encode(errors="replace"))
        try:
            calls.write(make_filter())
        except OSError as error:
            if is_machine_fault(error):
                raise
            raise SandboxError(f"no filter of system calls (Debian's libseccomp2): {error}") from None
        for file in (order, fed, calls):
            file.seek(0)
        python = [os.path.realpath(sys.executable), "-ISBc", LAUNCHER, str(order.fileno())]
        started = time.monotonic()
        inputs = []
        command = _bubblewrap(config, uid)
        if has_file:  # a copy: there is no /proc in the jail, to which /dev/stdin would lead
            inputs.append(stack.enter_context(open(f"/proc/self/fd/{fed.fileno()}", "rb")).fileno())
            command += ["--perms", "0444", "--ro-bind-data", str(inputs[0]), "/dev/stdin"]
        # The root becomes read-only last: until then bubblewrap makes folders in it.
        process = subprocess.Popen(
            [*command, "--remount-ro", "/", "--seccomp", str(calls.fileno()), "--", *python],
            stdin=fed,
            stdout=out,
            stderr=err,
            pass_fds=[order.fileno(), calls.fileno(), *inputs],
            start_new_session=True,
            env={"PATH": "/usr/bin:/bin", "HOME": "/tmp", "TMPDIR": "/tmp", "LANG": "C.UTF-8"},
        )
        try:
            outcome = _follow(process, config, started + time_s, order, (out, err))
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # not reaped yet, so the group's number is its own
            code = process.wait()
        stdout, stderr = (_written(file, MAX_OUTPUT_BYTES) for file in (out, err))
        if os.fstat(order.fileno()).st_size:  # the launcher empties it when all is in place
            raise SandboxError(stderr.strip()[-500:] or f"it ended with {code}")
        # 128 + signal, as in a shell: bubblewrap reports the program's signals in this form.
        code = code if code >= 0 else 128 - code
        return {
            "outcome": outcome or ENDINGS.get(code) or ("killed" if 128 < code <= LAST_SIGNAL else "done"),
            "code": None if outcome else code,
            "stdout": stdout,
            "stderr": stderr[-2000:],
            "wall_s": round(time.monotonic() - started, 3),
        }


def _order(source: str, before: str, config: SandboxConfig, uid: int) -> dict[str, Any]:
    """The launcher's instructions. The limits hold for each process by itself."""
    cpu_s = math.ceil(config.time_s)
    limits = {
        # The first sends SIGXCPU, which a program may ignore; the second SIGKILL.
        "CPU": (cpu_s, cpu_s + 1),
        "AS": (config.memory_mb << 20,) * 2,
        "FSIZE": (max(config.file_mb << 20, MAX_OUTPUT_BYTES),) * 2,
        "NPROC": (MAX_PROCESSES,) * 2,
        "STACK": (STACK_BYTES,) * 2,
        "NOFILE": (64, 64),  # the buffers of pipes and sockets belong to no process
        "SIGPENDING": (256, 256),
        **dict.fromkeys(("CORE", "MSGQUEUE", "MEMLOCK"), (0, 0)),
    }
    return {
        "limits": limits,
        "recursion_limit": RECURSION_LIMIT,
        "int_digits": INT_DIGITS,
        "uid": uid,
        "before": before,
        "source": source,
        "path": _packages(config),
    }


def _bubblewrap(config: SandboxConfig, uid: int) -> list[str]:
    """The command that sets up namespaces and files; what comes after them is still to be appended.

    Raises:
        SandboxError: there is no bubblewrap.
    """
    program = shutil.which("bwrap", path=f"{os.environ.get('PATH', os.defpath)}:{FETCHED}")
    if program is None:
        raise SandboxError("there is no bubblewrap (bwrap) on the PATH; Debian's package is bubblewrap")
    # Root needs no user namespace, which some kernels forbid: the launcher changes to another user.
    user = (
        ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        if uid
        else ["--unshare-user", "--uid", str(NOBODY), "--gid", str(NOBODY)]
    )
    # First, because packages may lie in the machine's /tmp: they are mounted over the jail's /tmp.
    files = ["--perms", "1777", "--size", str(config.file_mb << 20), "--tmpfs", "/tmp", "--chdir", "/tmp"]
    for path in (*SYSTEM, os.path.realpath(sys.base_prefix), *_packages(config), *DEVICES):
        if os.path.islink(path):
            files += ["--symlink", os.readlink(path), path]
        elif not path.startswith("/usr/"):
            for folder in list(Path(path).parents)[-2::-1]:  # the jail's user must be able to enter it
                files += ["--perms", "0755", "--dir", str(folder)]
            files += ["--dev-bind" if path in DEVICES else "--ro-bind-try", path, path]
    spaces = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    return [program, *spaces, *user, "--die-with-parent", *files]


def _packages(config: SandboxConfig) -> list[str]:
    """Folders of the packages that are installed beside this project; none without `config.packages`."""
    found = {os.path.realpath(sysconfig.get_path(name)) for name in ("purelib", "platlib")}
    return sorted(found) if config.packages else []


def _is_admin() -> bool:
    status = Path("/proc/self/status").read_text().splitlines()
    capabilities = next((line.split()[1] for line in status if line.startswith("CapEff:")), "0")
    return os.geteuid() == 0 and bool(int(capabilities, 16) >> CAP_SYS_ADMIN & 1)


def _follow(
    process: "subprocess.Popen[bytes]", config: SandboxConfig, deadline: float, order: IO[bytes],
    written: tuple[IO[bytes], ...],
) -> str:  # fmt: skip
    """Wait for the end or a limit. Returns the limit, or "" if it ended by itself; it is not reaped here."""
    pause_s, ended = LOOK_S, select.poll()
    with os.fdopen(os.pidfd_open(process.pid)) as pid:  # which becomes readable as the process ends
        ended.register(pid, select.POLLIN)
        while True:
            has_ended = ended.poll(1000 * min(pause_s, max(0.0, deadline - time.monotonic())))
            # Checked before the end is: a program may write too much and end between two looks.
            if sum(os.fstat(file.fileno()).st_size for file in written) > MAX_OUTPUT_BYTES:
                return "output"
            if has_ended:
                return ""
            looked = time.monotonic()
            if looked > deadline:
                return "timeout"
            if outcome := _excess(process.pid, config, is_set_up=not os.fstat(order.fileno()).st_size):
                return outcome
            pause_s = max(LOOK_S, (time.monotonic() - looked) / LOOK_SHARE)


def _excess(group: int, config: SandboxConfig, is_set_up: bool) -> str:
    """The limit over all processes together that is exceeded, or ""; setrlimit has no such limits."""
    pids = [pid for pid in psutil.pids() if _group_of(pid) == group]
    if len(pids) > MAX_PROCESSES + BUBBLEWRAPS:
        return "processes"
    if sum(map(_used_bytes, pids)) > config.memory_mb << 20:
        return "memory"
    # Before the program starts, this path may still be the machine's own /tmp.
    return "file" if is_set_up and any(_num_files(pid) > MAX_FILES for pid in pids if pid != group) else ""


def _group_of(pid: int) -> int:
    with contextlib.suppress(OSError):
        return os.getpgid(pid)
    return 0


def _used_bytes(pid: int) -> int:
    """Bytes of a process, swap included. Each thread's status shows them, unless that thread has ended."""
    with contextlib.suppress(OSError):
        for status in [Path(f"/proc/{pid}/status"), *Path(f"/proc/{pid}/task").glob("*/status")]:
            with contextlib.suppress(OSError):
                # Not `splitlines`: the first line has the name, which may be any bytes.
                lines = status.read_bytes().split(b"\n")
                told = [line for line in lines if line.startswith((b"VmRSS:", b"VmSwap:"))]
                if told:
                    return sum(int(line.split()[1]) << 10 for line in told)
    return 0


def _num_files(pid: int) -> int:
    """Files in the jail's /tmp, empty ones included: the kernel's memory for them belongs to no process."""
    with contextlib.suppress(OSError):
        found = os.statvfs(f"/proc/{pid}/root/tmp")
        return found.f_files - found.f_ffree
    return 0


def _written(file: IO[bytes], max_bytes: int) -> str:
    file.seek(0)
    return file.read(max_bytes).decode(errors="replace")

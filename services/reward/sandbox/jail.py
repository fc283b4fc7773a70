"""Runs untrusted programs, each in a jail.

bubblewrap makes namespaces (processes, network, mounts), a root folder with nothing but the system's
programs, the interpreter and an empty /tmp, and installs the filter of system calls (`system_calls.py`). In
the jail, `launcher.py` sets limits, gives up root, and becomes the program. This process watches its time,
its output, and the memory and number of its processes. When bubblewrap ends, the kernel kills everything in
the jail; bubblewrap ends with the thread that started it.

Such a jail, made for one program, is called cold. It costs more than most programs. So a worker keeps a jail
with an interpreter that is ready, a warm one (`warm.py`): it forks for each program, and gives the fork what
bubblewrap would (`template.py`). The limits are set by the same launcher. Where no warm jail can be had,
programs are run in cold ones.
"""

import contextlib
import itertools
import json
import math
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil

from tidemill.common.config.reward_kinds import SandboxConfig
from tidemill.common.process.shortage import machine_faults
from tidemill.services.reward.sandbox.bubblewrap import (
    ENVIRONMENT,
    LAUNCHER,
    PYTHON,
    SandboxError,
    find_packages,
    is_admin,
    make_command,
    read_filter,
)
from tidemill.services.reward.sandbox.preamble import INT_DIGITS, RECURSION_LIMIT
from tidemill.services.reward.sandbox.warm import UsedJailError, WarmJailError, WarmJails, can_be_warm

MAX_FILES = 4096
MAX_PROCESSES = 16
"""Most processes and threads of one program at once."""
BUBBLEWRAPS = 2
"""Processes of bubblewrap itself in each jail, which are of the program's process group."""
INITS = 1
"""Processes of bubblewrap itself in a warm jail."""
TEMPLATES = 2
"""Processes in a warm jail beside bubblewrap's and the program's, which may have the program's user."""
MAX_OUTPUT_BYTES = 256 << 10
STACK_BYTES = 100 << 20
"""Stack of a program's main thread: at Python's recursion limit, calls through C (a cached function, the key
of `sorted`, `__init__`) take up to 2 kB each, and without room they end the process. What is used counts as
its memory. Linux leaves at least 128 MiB for it to grow into."""
PROBE_S = 60.0
LOOK_S = 0.04
LOOK_SHARE = 0.1
"""Largest share of the time spent on looking at processes: large machines have many."""
FIRST_UID = 200_000
NUM_UIDS = 60_000
"""Under root, each program gets a user id of its own: the limit on processes counts per user, and includes
processes that have ended until they are reaped."""
NUMBERS = itertools.count()
STRIDE = 7919
ENDINGS = {128 + signal.SIGXCPU: "timeout", 128 + signal.SIGXFSZ: "file"}
LAST_SIGNAL = 128 + 64
SET_UP = "set up"
"""Mark in an order: all limits are in place. Its size does not say so: one that was used before is empty."""
MAX_WARM_TRIES = 2
"""A warm jail may end between two programs; a new one must not."""

Result = dict[str, Any]


class KilledJailError(SandboxError):
    """A jail or a process in it was killed from outside as a program ran, which says nothing about it."""


@dataclass(frozen=True, slots=True)
class _Program:
    """A program, its limits, and the files that carry it into a jail and its output out of it."""

    config: SandboxConfig
    uid: int
    """Its user under root; 0: the only one of its user namespace."""
    num_oom_kills: int
    """What `count_oom_kills` returned before it began."""
    order: IO[bytes]
    """Instructions, in whose place the launcher writes `SET_UP` when all is in place."""
    stdin: IO[bytes]
    stdout: IO[bytes]
    stderr: IO[bytes]

    def is_set_up(self) -> bool:
        """Whether its limits are in place; until then, no line of it has run."""
        return os.pread(self.order.fileno(), len(SET_UP), 0) == SET_UP.encode()

    def written(self) -> int:
        """Bytes that it has written."""
        return sum(os.fstat(file.fileno()).st_size for file in (self.stdout, self.stderr))


def run_program(
    source: str, stdin: str, config: SandboxConfig, time_s: float, before: str = "", has_file: bool = False,
    warm: WarmJails | None = None,
) -> Result:  # fmt: skip
    """Run one program to its end, or to the first limit that it meets.

    Args:
        source: The program, in Python.
        stdin: Its standard input.
        config: Its limits.
        time_s: The longest time that it may take.
        before: Statements that run before it, in its globals.
        has_file: Whether it may read its standard input as the file /dev/stdin too.
        warm: Jails that are ready; without them, or where they fail, it gets a jail of its own.

    Returns:
        What it has written, and how it has ended. `lost_s` is the time that warm jails took which failed: it
        is not the program's; 0 where none has failed.

    Raises:
        SandboxError: the jail could not be set up; no line of the program has run.
        KilledJailError: a program was killed with its jail.
        MachineFaultError: this machine is short of something that a jail needs.
    """
    lost_s = 0.0
    with machine_faults("a jail could not be set up"):
        if warm is not None and not warm.is_paused and not has_file and can_be_warm(config.packages):
            began = time.monotonic()
            for _ in range(MAX_WARM_TRIES):
                try:
                    # Each try with files and a user of its own: the program may have run in the one before.
                    with _program(source, stdin, config, before, TEMPLATES) as program:
                        return _run_warm(program, time_s, warm) | {"lost_s": lost_s}
                except WarmJailError as error:
                    lost_s = time.monotonic() - began
                    print(f"tidemill sandbox: a warm jail failed: {error}", file=sys.stderr, flush=True)
                    if not isinstance(error, UsedJailError):
                        break
        with _program(source, stdin, config, before) as program:
            return _run_cold(program, time_s, has_file) | {"lost_s": lost_s}


def probe_warm(warm: WarmJails, config: SandboxConfig, source: str, before: str) -> Result:
    """Run a program in a warm jail, or not at all. For the first one: it waits longer for the interpreter.

    Raises:
        SandboxError: it cannot be run there, and why.
        MachineFaultError: this machine is short of something that a jail needs.
    """
    if not can_be_warm(config.packages):
        raise SandboxError("Python or its packages lie below /tmp, over which each program gets its own")
    with (
        machine_faults("a jail could not be set up"),
        _program(source, "", config, before, TEMPLATES) as program,
    ):
        return _run_warm(program, PROBE_S, warm, PROBE_S)


@contextlib.contextmanager
def _program(
    source: str, stdin: str, config: SandboxConfig, before: str, num_companions: int = 0
) -> Iterator[_Program]:
    with contextlib.ExitStack() as stack:
        # Files, not pipes: no reader is needed while it runs, and their size says how much it has written.
        files = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(4)]
        uid = FIRST_UID + (os.getpid() + next(NUMBERS) * STRIDE) % NUM_UIDS if is_admin() else 0
        program = _Program(config, uid, count_oom_kills(), *files)
        # The limit counts the processes of a user: under root, those of the program alone.
        num_processes = MAX_PROCESSES + (0 if uid else num_companions)
        order = _order(source, before, config, uid, num_processes)
        program.order.write(json.dumps(order).encode())
        program.stdin.write(stdin.encode(errors="replace"))
        for file in (program.order, program.stdin):
            file.seek(0)
        yield program


def _run_cold(program: _Program, time_s: float, has_file: bool) -> Result:
    """Run it in a jail of its own."""
    with contextlib.ExitStack() as stack:
        calls = stack.enter_context(tempfile.TemporaryFile())
        calls.write(read_filter())
        calls.seek(0)
        order = program.order
        fed = program.stdin
        started = time.monotonic()
        inputs = []
        command = make_command(program.config)
        if has_file:  # a copy: there is no /proc in the jail, to which /dev/stdin would lead
            inputs.append(stack.enter_context(open(f"/proc/self/fd/{fed.fileno()}", "rb")).fileno())
            command += ["--perms", "0444", "--ro-bind-data", str(inputs[0]), "/dev/stdin"]
        # The root becomes read-only last: until then bubblewrap makes folders in it.
        command += ["--remount-ro", "/", "--seccomp", str(calls.fileno())]
        process = subprocess.Popen(
            [*command, "--", *PYTHON, LAUNCHER, str(order.fileno())],
            stdin=fed,
            stdout=program.stdout,
            stderr=program.stderr,
            pass_fds=[order.fileno(), calls.fileno(), *inputs],
            start_new_session=True,
            env=ENVIRONMENT,
        )
        try:
            with os.fdopen(os.pidfd_open(process.pid)) as pid:  # which becomes readable as the process ends
                ended = select.poll()
                ended.register(pid, select.POLLIN)

                def wait_for_end(timeout_s: float) -> bool:
                    return bool(ended.poll(1000 * timeout_s))

                outcome = _follow(program, wait_for_end, lambda: process.pid, BUBBLEWRAPS, started + time_s)
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # not reaped yet, so the group's number is its own
            code = process.wait()
        if not program.is_set_up():
            raise SandboxError(
                _text_of(program.stderr, MAX_OUTPUT_BYTES).strip()[-500:] or f"it ended with {code}"
            )
        # Under root no program can signal bubblewrap; without, its user is the program's, and it may.
        if code < 0 and not outcome and program.uid:
            raise KilledJailError(f"bubblewrap was killed from outside (signal {-code})")
        # 128 + signal, as in a shell: bubblewrap reports the program's signals in this form.
        return _result(program, outcome, code if code >= 0 else 128 - code, started)


def _run_warm(program: _Program, time_s: float, warm: WarmJails, answer_s: float | None = None) -> Result:
    """Run it in a jail that is ready; `answer_s` as in `WarmJails.start`.

    Raises:
        WarmJailError: it was not run to an end of its own or of a limit.
    """
    config = program.config
    streams = (program.stdin, program.stdout, program.stderr)
    running = warm.start(program.uid, config, program.order, streams, answer_s)
    try:
        started = time.monotonic()
        running.group()  # where it cannot be read, that shows with the first program already
        outcome = _follow(program, running.wait_for_end, running.group, INITS, started + time_s)
        if outcome:
            running.kill()
        ended = running.wait()
        if not program.is_set_up():
            raise WarmJailError(
                _text_of(program.stderr, MAX_OUTPUT_BYTES).strip()[-500:] or f"it ended with {ended.code}"
            )
        if ended.code < 0 and not outcome:  # no program can signal it, so it was the machine
            raise WarmJailError("its init was killed")
    except WarmJailError:
        warm.drop(config)
        raise
    finally:
        running.close()
    if ended.is_last:
        warm.finish(config)
    return _result(program, outcome, ended.code, started)


def count_oom_kills() -> int:
    """How many processes the kernel has killed for lack of memory; 0 where it does not say."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text(encoding="utf-8").splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0


def _result(program: _Program, outcome: str, code: int, started: float) -> Result:
    """Raises KilledJailError: the program failed, and meanwhile the machine was out of memory."""
    # Whatever the code: statements run in two processes, and where one is killed, the other one fails.
    if code and not outcome and count_oom_kills() > program.num_oom_kills:
        raise KilledJailError(
            "the machine was out of memory, and the kernel killed a process while the program ran: give it "
            "more memory, or run fewer sandbox.workers on it"
        )
    ending = ENDINGS.get(code) or ("killed" if 128 < code <= LAST_SIGNAL else "done")
    return {
        "outcome": outcome or ending,
        "code": None if outcome else code,
        "stdout": _text_of(program.stdout, MAX_OUTPUT_BYTES),
        "stderr": _text_of(program.stderr, MAX_OUTPUT_BYTES)[-2000:],
        "wall_s": round(time.monotonic() - started, 3),
    }


def _order(source: str, before: str, config: SandboxConfig, uid: int, num_processes: int) -> dict[str, Any]:
    """The launcher's instructions. The limits hold for each process by itself."""
    cpu_s = math.ceil(config.time_s)
    limits = {
        # The first sends SIGXCPU, which a program may ignore; the second SIGKILL.
        "CPU": (cpu_s, cpu_s + 1),
        "AS": (config.memory_mb << 20,) * 2,
        "FSIZE": (max(config.file_mb << 20, MAX_OUTPUT_BYTES),) * 2,
        "NPROC": (num_processes,) * 2,
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
        "path": find_packages(config.packages),
        "mark": SET_UP,
    }


def _follow(
    program: _Program, wait_for_end: Callable[[float], bool], group: Callable[[], int], num_others: int,
    deadline: float,
) -> str:  # fmt: skip
    """Wait for the end or a limit. Returns the limit, or "" if it ended by itself; it is not reaped here.

    `group` is its process group, in which there are `num_others` processes beside the program's."""
    pause_s = LOOK_S
    while True:
        is_over = wait_for_end(min(pause_s, max(0.0, deadline - time.monotonic())))
        # Checked before the end is: a program may write too much and end between two looks.
        if program.written() > MAX_OUTPUT_BYTES:
            return "output"
        if is_over:
            return ""
        looked = time.monotonic()
        if looked > deadline:
            return "timeout"
        outcome = _excess(group(), num_others, program)
        if outcome:
            return outcome
        pause_s = max(LOOK_S, (time.monotonic() - looked) / LOOK_SHARE)


def _excess(group: int, num_others: int, program: _Program) -> str:
    """The limit over all processes together that is exceeded, or ""; setrlimit has no such limits."""
    if not group:  # it has just ended
        return ""
    pids = [pid for pid in psutil.pids() if _group_of(pid) == group]
    if len(pids) > MAX_PROCESSES + num_others:
        return "processes"
    theirs = [pid for pid in pids if pid != group]  # the first is bubblewrap, or the jail's init
    if sum(map(_used_bytes, theirs)) > program.config.memory_mb << 20:
        return "memory"
    # Before the program starts, this path may still be the machine's own /tmp.
    return "file" if program.is_set_up() and any(_num_files(pid) > MAX_FILES for pid in theirs) else ""


def _group_of(pid: int) -> int:
    with contextlib.suppress(OSError):
        return os.getpgid(pid)
    return 0


def _used_bytes(pid: int) -> int:
    """Bytes of a process, swap included, and what it shares with others. Each thread's status shows them,
    unless that thread has ended."""
    with contextlib.suppress(OSError):
        for status in [Path(f"/proc/{pid}/status"), *Path(f"/proc/{pid}/task").glob("*/status")]:
            with contextlib.suppress(OSError):
                # Not `splitlines`: the first line has the name, which may be any bytes.
                lines = status.read_bytes().split(b"\n")
                sizes = [line for line in lines if line.startswith((b"VmRSS:", b"VmSwap:"))]
                if sizes:
                    return sum(int(line.split()[1]) << 10 for line in sizes)
    return 0


def _num_files(pid: int) -> int:
    """Files in the jail's /tmp, empty ones included: the kernel's memory for them belongs to no process."""
    with contextlib.suppress(OSError):
        files = os.statvfs(f"/proc/{pid}/root/tmp")
        return files.f_files - files.f_ffree
    return 0


def _text_of(file: IO[bytes], max_bytes: int) -> str:
    file.seek(0)
    return file.read(max_bytes).decode(errors="replace")

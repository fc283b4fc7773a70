"""Service processes that start in a tenth of a second: forked from a server that has imported what is heavy.

The processes are as real as others: own memory, own connections, signals, exit codes; only the imports are
shared. Where a process must differ in what is read while modules are imported, it is started without a fork.
"""

import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from json import dumps
from pathlib import Path

from tests.support.waiting import PATIENCE_S

REPO = Path(__file__).resolve().parent.parent.parent
TERMINAL = ("COLUMNS", "LINES")
"""pytest imports readline, which sets both for all that is started then."""
TORCHRUN = ("MASTER_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
OWN = ("TIDEMILL_", "PYTEST_", "CUBLAS_", "FLASH_ATTENTION_", *TERMINAL, *TORCHRUN)
"""Variables that are read when they are used, never while a module is imported, or not at all."""
AT_IMPORT = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "HF_HUB_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
}
"""Further variables of the server, which services set themselves, or `tidemill up` sets for them."""


ENVIRONMENT = dict(os.environ)
"""The environment of this process, before any test has changed it."""
ADDRESS = "PYTEST_FORK_SERVER"
WORKERS = "PYTEST_FORK_SERVER_OF_WORKERS"
"""Variables with the addresses of two servers: for services, and for the processes of a parallel test run."""


class Server:
    """The process to fork from, started at first use; it ends with this one. Workers share one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.environment = ENVIRONMENT
        if address := ENVIRONMENT.get(ADDRESS):
            self._control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._control.connect(f"\0{address}")
            return
        self._control, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.address, listener = _listen()
        with child_end, listener:
            descriptors = listener.fileno(), child_end.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.fork_server", "services", *map(str, descriptors)],
                cwd=REPO,
                env=ENVIRONMENT | AT_IMPORT,
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )

    def for_workers(self, arguments: Sequence[str]) -> str:
        """Fork another server, which collects the tests that `arguments` name; returns its address."""
        request = {"module": "tests.support.fork_server", "arguments": ["tests", *arguments], "code": ""}
        request |= {"environment": dict(os.environ), "folder": os.getcwd()}
        address, listener = _listen()
        with listener, open(os.devnull, "wb") as nothing:
            self._of_workers = self.fork(request, listener.fileno(), nothing.fileno(), 2)
        return address

    def fork(self, request: Mapping[str, object], *standard: int) -> socket.socket:
        """Ask for a process; returns the socket from which its id comes, and at its end its exit code."""
        parent_end, child_end = socket.socketpair()
        with self._lock, child_end:
            socket.send_fds(self._control, [dumps(request).encode()], [child_end.fileno(), *standard])
        return parent_end


def _listen() -> tuple[str, socket.socket]:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    address = f"tidemill-tests-{uuid.uuid4().hex}"
    listener.bind(f"\0{address}")
    listener.listen()
    return address, listener


server = cache(Server)


class ForkedProcess:
    """The part of `subprocess.Popen` that tests use."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        output: int,
        errors: int,
        folder: Path = REPO,
        code: str = "",
    ) -> None:
        """`output` and `errors` are file descriptors. `code` is run in place of a module."""
        request = {"module": module, "arguments": list(arguments), "environment": dict(environment)}
        request |= {"folder": str(folder), "code": code}
        self.args = module
        self.returncode: int | None = None
        self._pid = 0
        self._told = b""
        self._lock = threading.Lock()
        with open(os.devnull, "rb") as nothing:
            self._status = server().fork(request, nothing.fileno(), output, errors)
        self._status.setblocking(False)

    @property
    def pid(self) -> int:
        """Waits while the server is still importing."""
        while self.poll() is None and not self._pid:
            self._await_news(None)
        return self._pid

    def poll(self) -> int | None:
        """The exit code, or None while it runs; negative: the signal that ended it."""
        with self._lock:
            if self.returncode is not None:
                return self.returncode
            with suppress(BlockingIOError):
                news = self._status.recv(100)
                if not news:
                    raise RuntimeError("the server to fork from has ended: see its output above")
                self._told += news
            lines = self._told.split(b"\n")[:-1]  # the process id, and at the end the exit code
            if lines:
                self._pid = int(lines[0])
            if len(lines) > 1:
                self.returncode = int(lines[1])
                self._status.close()
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            left_s = None if deadline is None else deadline - time.monotonic()
            if left_s is not None and left_s <= 0:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self._await_news(left_s)
        return code

    def _await_news(self, at_most_s: float | None) -> None:
        with suppress(ValueError, OSError):  # another thread has seen the end, and closed it
            select.select([self._status], [], [], 1.0 if at_most_s is None else min(at_most_s, 1.0))

    def send_signal(self, number: int) -> None:
        """Send a signal; no effect where the process has ended."""
        pid = self.pid
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


Process = subprocess.Popen[bytes] | ForkedProcess


def start_plain(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> Process:
    """Start a command without a fork server; its output is added to `log`."""
    with open(log, "ab") as file:
        return subprocess.Popen(
            command, cwd=REPO, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file
        )


def start_module(module: str, arguments: Sequence[str], log: Path, environment: Mapping[str, str]) -> Process:
    """Start `python -m MODULE ARGUMENTS`, forked where that makes no difference; `log` gets its output."""
    if not can_fork(environment):
        return start_plain([sys.executable, "-m", module, *arguments], log, environment)
    with open(log, "ab") as file:
        return ForkedProcess(module, arguments, environment, file.fileno(), file.fileno())


def start_code(
    code: str, words: Sequence[str], output: Path, errors: Path, environment: Mapping[str, str]
) -> Process:
    """Start `python -c CODE WORDS`, forked where that makes no difference; the files get what it prints."""
    with output.open("wb") as out, errors.open("wb") as err:
        if can_fork(environment):
            return ForkedProcess("", words, environment, out.fileno(), err.fileno(), code=code)
        command = [sys.executable, "-c", code, *words]
        return subprocess.Popen(
            command, cwd=REPO, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err
        )


def tidemill(*words: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run the command `tidemill` in exactly this environment, forked where that makes no difference."""
    return run_module("tidemill.services.console", words, environment)


def run_code(code: str, environment: Mapping[str, str]) -> "subprocess.CompletedProcess[str]":
    """Run `python -c CODE` to its end, forked where that makes no difference."""
    return run_module("", (), environment, code=code)


def run_module(
    module: str, words: Sequence[str], environment: Mapping[str, str], folder: Path = REPO, code: str = ""
) -> "subprocess.CompletedProcess[str]":
    """Run `python -m MODULE WORDS` in a folder to its end, forked where that makes no difference; or the code
    in place of a module."""
    if not can_fork(environment):
        program = ["-c", code] if code else ["-m", module]
        command = [sys.executable, *program, *words]
        return subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=2 * PATIENCE_S
        )
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = ForkedProcess(module, words, environment, output.fileno(), errors.fileno(), folder, code)
        try:
            code = process.wait(2 * PATIENCE_S)
        finally:
            process.kill()
        output.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess(list(words), code, output.read(), errors.read())


def can_fork(environment: Mapping[str, str]) -> bool:
    """Whether all that this environment changes is read after the imports."""
    if not hasattr(os, "pidfd_open"):
        return False
    there = server().environment
    names = {name for name in there.keys() | environment.keys() if there.get(name) != environment.get(name)}
    return all(name.startswith(OWN) or environment.get(name) == AT_IMPORT.get(name) for name in names)


def run_check(command: Sequence[str], input: str, **_: object) -> "subprocess.CompletedProcess[str]":
    """In place of `subprocess.run` for a program that checks users' code: forked, in this one's folder. Its
    input becomes its argument, which such a program takes too."""
    module = command.index("-m") + 1
    return run_module(command[module], [*command[module + 1 :], input], os.environ, Path.cwd())

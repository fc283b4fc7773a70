"""Shortages of a machine: no process, thread, descriptor, memory or disk. They are never a sample's fault.

Whoever starts something for a sample raises `MachineFaultError` where the machine is short. The worker then
hands the message back without counting an attempt, says so, and takes no messages until a start works
(`Shortage`). What users' code raises counts only where the machine proves to be short (`find_shortage`):
code that leaks descriptors, or a program of a model that wants too much memory, raises the same exceptions.
"""

import asyncio
import contextlib
import errno
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import structlog

from tidemill.common.errors import MachineFaultError, text_of
from tidemill.common.process.failures import FailureLog, is_logged

if TYPE_CHECKING:  # processes of users' code import this module, and start sooner without Redis's client
    from tidemill.common.process.heartbeats import Heartbeat

log = structlog.get_logger(__name__)

T = TypeVar("T")

NO_THREAD = "can't start new thread"
"""The text of the RuntimeError that Python raises for EAGAIN."""
NOT_MAPPED = "failed to map segment from shared object"
"""The text of the ImportError for ENOMEM, in which the loader of libraries leaves out why."""
SHORT_OF = {
    errno.EAGAIN: "processes or threads",
    errno.EMFILE: "file descriptors of this process",
    errno.ENFILE: "file descriptors of this machine",
    errno.ENOMEM: "memory",
    errno.ENOBUFS: "memory for sockets",
    errno.ENOSPC: "disk space",
    errno.EDQUOT: "disk quota",
}
_REMEDIES = {
    errno.EAGAIN: "raise the limit of processes (ulimit -u, pids_limit of a container, TasksMax of systemd), "
    "or run fewer workers on this machine",
    errno.EMFILE: "raise the limit of open files (ulimit -n), or let the worker hold fewer samples",
    errno.ENFILE: "raise the sysctl fs.file-max, or run fewer workers on this machine",
    errno.ENOMEM: "give this machine more memory, or run fewer workers on it",
    errno.ENOBUFS: "give this machine more memory, or run fewer workers on it",
    errno.ENOSPC: "free some space on the disk of temporary files (TMPDIR)",
    errno.EDQUOT: "raise the quota of the disk of temporary files (TMPDIR)",
}
SHORT = "short"
"""Count in a heartbeat: 1 while the process takes no messages, because its machine is short of something."""
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 15.0
"""Pause before a start is tried after a shortage; it doubles while starts fail."""
FORGET_S = 60.0
"""A shortage that begins this long after the last one has ended begins with the first pause again."""
PROBE_FILE_BYTES = 64 << 10
PROBE_MEMORY_BYTES = 32 << 20
MAX_DEPTH = 20


def shortage_number(error: BaseException, depth: int = MAX_DEPTH) -> int:
    """What the machine is short of, as an `errno`, if an exception says so; 0 where it does not.

    Also where the exception was raised from another one that says so, or holds one.
    """
    if isinstance(error, MachineFaultError):
        return error.number
    if isinstance(error, OSError) and error.errno in SHORT_OF:
        return error.errno
    if isinstance(error, MemoryError):
        return errno.ENOMEM
    if isinstance(error, RuntimeError) and NO_THREAD in text_of(error):
        return errno.EAGAIN
    # torch on a CPU has no class for it.
    if isinstance(error, RuntimeError) and os.strerror(errno.ENOMEM) in text_of(error):
        return errno.ENOMEM
    if isinstance(error, ImportError):  # of a library that cannot be opened or mapped
        # With another reason behind it, such as one of a disk that runs no programs, it is none.
        text = text_of(error)
        number = errno.ENOMEM if text.endswith(NOT_MAPPED) else number_in_text(text)
        if number:
            return number
    if not depth:  # a chain may be a ring
        return 0
    inner = list(error.exceptions) if isinstance(error, BaseExceptionGroup) else []
    # httpcore raises from none, and keeps the exception as its argument.
    inner += [argument for argument in error.args if isinstance(argument, BaseException)]
    if error.__cause__ is not None:
        inner.append(error.__cause__)
    elif error.__context__ is not None and not error.__suppress_context__:
        inner.append(error.__context__)
    return next(filter(None, (shortage_number(each, depth - 1) for each in inner)), 0)


def number_in_text(text: str) -> int:
    """What a machine is short of, as an `errno`, where a program's message says so; 0 where it does not."""
    return next((number for number in SHORT_OF if os.strerror(number) in text), 0)


def is_machine_fault(error: BaseException) -> bool:
    """Whether an exception says that the machine is short of something."""
    return shortage_number(error) != 0


async def run_on_thread(function: Callable[..., T], *args: Any) -> T:
    """Like `asyncio.to_thread`, for short calls. Where the machine can start no thread, the event loop waits
    for the call: what needs it must not fail for that."""
    try:
        return await asyncio.to_thread(function, *args)
    except RuntimeError as error:
        if not is_machine_fault(error):
            raise
        return function(*args)


def make_fault(number: int, doing: str, reason: str) -> MachineFaultError:
    text = f"{doing}: {reason}. This machine is short of {SHORT_OF[number]}: {_REMEDIES[number]}"
    return MachineFaultError(text, number)


def fault_in(error: BaseException, doing: str) -> MachineFaultError | None:
    """The machine's fault in an exception of our own code, if it is one; `doing` says what failed.

    For lack of memory only where the machine is short of it now: a sample alone may want too much.
    """
    if isinstance(error, MachineFaultError):
        return error
    number = shortage_number(error)
    if not number or (number == errno.ENOMEM and find_shortage() is None):
        return None
    return make_fault(number, doing, f"{type(error).__name__}: {error}")


@contextlib.contextmanager
def machine_faults(doing: str) -> Iterator[None]:
    """Turn an exception of the block into a `MachineFaultError` where the machine is short of something.

    For our own starts only; `doing` says what failed: "the scoring process could not be started".
    """
    try:
        yield
    except MachineFaultError:
        raise
    except Exception as error:
        number = shortage_number(error)
        if not number:
            raise
        raise make_fault(number, doing, f"{type(error).__name__}: {error}") from error


def try_start() -> None:
    """Start a process and a thread, write a temporary file, and take some memory: what samples need.

    It takes some milliseconds.

    Raises:
        MachineFaultError: one of them cannot be had.
    """
    with machine_faults("a process could not be started"):
        process = subprocess.Popen(
            ["/bin/sh", "-c", ":"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        process.wait()
    with machine_faults("a thread could not be started"):
        thread = threading.Thread(target=int, name="probe")
        thread.start()
        thread.join()
    with machine_faults("a temporary file could not be written"), tempfile.TemporaryFile() as file:
        file.write(bytes(PROBE_FILE_BYTES))
        file.flush()
    with machine_faults("no memory could be taken"):
        bytearray(PROBE_MEMORY_BYTES)


def find_shortage() -> MachineFaultError | None:
    """The machine's shortage, if it is short now: what users' code said about it is true then."""
    try:
        try_start()
    except MachineFaultError as fault:
        return fault
    except OSError:  # there is no shell, say
        return None
    return None


class Shortage:
    """What a worker process knows about shortages of its machine; its lanes share it.

    Open as a service begins. `note` closes it, and `until_over` opens it as soon as a start works.
    """

    def __init__(self, name: str, probe: Callable[[], MachineFaultError | None] = find_shortage) -> None:
        self._probe = probe
        self._log = FailureLog()
        self._machine = f"the machine of {name}"
        self._pause_s = FIRST_PAUSE_S
        self._ended_at = float("-inf")
        self._trying: asyncio.Task[None] | None = None
        self.num_faults = 0
        self.checks: list[Callable[[], Awaitable[MachineFaultError | None]]] = []
        """What else has to be there before messages are taken again, such as room for containers."""
        self.reason = ""
        """Why no messages are taken; empty while they are."""

    @property
    def is_short(self) -> bool:
        return bool(self.reason)

    def note(self, fault: MachineFaultError) -> None:
        """Record that something for a sample could not be started; logged at the 1st, the 2nd, the 4th..."""
        self.num_faults += 1
        self._log.note(self._machine, SHORT, str(fault))
        if is_logged(self.num_faults):
            log.error(
                "this machine is short of something: samples are handed back, and none are taken until a "
                "start works",
                problem=str(fault),
                so_far=self.num_faults,
            )
        if not self.reason and time.monotonic() - self._ended_at > FORGET_S:
            self._pause_s = FIRST_PAUSE_S
        self.reason = str(fault)

    def end(self) -> None:
        """Record that a start works again."""
        if self.is_short:
            log.info("a start works again: samples are taken", was_short=self.reason)
            self.reason = ""
            self._ended_at = time.monotonic()

    async def until_over(self) -> None:
        """Return as soon as a start works. All lanes wait for the same tries."""
        if not self.is_short:
            return
        if self._trying is None or self._trying.done():
            self._trying = asyncio.create_task(self._try_again(), name="shortage")
        # A lane that stops must not end the tries for the others.
        await asyncio.shield(self._trying)

    def report(self, beat: "Heartbeat") -> None:
        """Say in a heartbeat what the machine was short of, and whether it is still."""
        beat.counts[SHORT] = float(self.is_short)
        beat.failures += self._log.failures
        if self.is_short:
            text = f"takes no samples: {self.reason}"
            beat.detail = f"{text}; {beat.detail}" if beat.detail else text

    async def _try_again(self) -> None:
        while self.is_short:
            await asyncio.sleep(self._pause_s)
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            # On the loop: a thread is one of the things that may be missing.
            fault = self._probe()
            for check in self.checks:
                fault = fault or await check()
            if fault is None:
                self.end()
            else:
                self.reason = str(fault)

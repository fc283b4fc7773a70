"""Warm jails: interpreters that wait in a jail, and fork for each program (`template.py`).

A worker keeps at most two: one whose jail has the installed packages, and one whose jail has none, as far as
its run needs them. The process of a job inherits them, and starts one of its own where the worker's has
ended. An interpreter serves few programs, because they share the seed of its hashes. One that dies, hangs or
cannot do its work is replaced; where they fail in a row, the worker does without for a pause that doubles.
"""

import contextlib
import functools
import json
import marshal
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tidemill.common.config.reward_kinds import SandboxConfig
from tidemill.common.process.programs import ending_in_words
from tidemill.services.reward.sandbox.bubblewrap import (
    ENVIRONMENT,
    LAUNCHER,
    PYTHON,
    SandboxError,
    find_packages,
    make_command,
    read_filter,
)
from tidemill.services.reward.sandbox.preamble import MODULES

TEMPLATE = Path(__file__).with_name("template.py").read_text(encoding="utf-8")
READY_MODULES = (
    *MODULES, "_sitebuiltins", "builtins", "collections.abc", "ctypes", "decimal", "fractions", "importlib",
    "numbers", "os", "resource", "socket", "types", "typing",
)  # fmt: skip
"""What an interpreter has imported: the preamble's modules, and those of the launcher, `calls.py` and
`statements.py`."""
MAX_PROGRAMS = 64
"""Programs of one interpreter: more share the cost of its start, and the seed of its hashes."""
ANSWER_S = 10.0
"""Longest start of an interpreter, and longest end of a program that is killed. A job loses at most two to
interpreters that do not start, and one to a program that does not end: the margin that it has
(`JOB_MARGIN_S`)."""
ENDING_S = 1.0
"""Longest time from the end of an interpreter to that of its bubblewrap."""
MAX_MESSAGE_BYTES = 4096
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 300.0
"""How long a worker does without warm jails after one has failed; it doubles while they fail."""


class WarmJailError(SandboxError):
    """A warm jail failed, which says nothing about the program in it: it can be run in a jail of its own."""


class UsedJailError(WarmJailError):
    """So did one whose interpreter was there before: it may have ended between two programs."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a program has ended."""

    code: int
    """Its exit code, as in a shell: 128 + signal where one has killed it. Negative where a signal has killed
    its init: because it has met a limit, or from outside."""
    is_last: bool
    """Whether the interpreter serves no further program."""


class WarmProgram:
    """A program that runs in a warm jail."""

    def __init__(self, answers: socket.socket, init: int) -> None:
        """`init` is a descriptor (pidfd) of the first process of the program's namespace."""
        self._answers = answers
        self._init = init
        self._poll = select.poll()
        self._poll.register(answers, select.POLLIN)

    def wait_for_end(self, timeout_s: float) -> bool:
        """Wait for its end, or that of its jail; returns whether it has come."""
        return bool(self._poll.poll(1000 * timeout_s))

    def group(self) -> int:
        """Its process group, which is the process id of its init; 0 once it has ended.

        Raises:
            WarmJailError: the kernel does not say it.
        """
        try:
            lines = Path(f"/proc/self/fdinfo/{self._init}").read_text().splitlines()
        except OSError as error:  # before Linux 5.14 it is root's, after `hide_memory`
            raise WarmJailError(f"its process id cannot be read: {error}") from None
        for line in lines:
            if line.startswith("Pid:"):
                return max(0, int(line.split()[1]))
        return 0

    def kill(self) -> None:
        """Kill all of its processes."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._init, signal.SIGKILL)

    def wait(self) -> Ended:
        """Wait until nothing of it is left.

        Raises:
            WarmJailError: the jail ended without an answer.
        """
        message = self._answers.recv(MAX_MESSAGE_BYTES) if self.wait_for_end(ANSWER_S) else b""
        if not message:
            raise WarmJailError("it ended, or hung, while a program ran in it")
        answer = json.loads(message)
        return Ended(answer["code"], answer["is_last"])

    def close(self) -> None:
        """Let go of it: the template kills what still runs."""
        self._answers.close()
        os.close(self._init)


class Template:
    """One warm interpreter."""

    def __init__(self, command: Sequence[str], setup: bytes) -> None:
        """Start it; does not wait until it is ready."""
        self._starter = os.getpid()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed with this object)
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Files, as programs have them: Python chooses the buffers of its streams at its start.
        with theirs, tempfile.TemporaryFile() as file, tempfile.TemporaryFile() as stdin:
            file.write(setup)
            file.seek(0)
            descriptors = (file.fileno(), theirs.fileno())
            self._process = subprocess.Popen(
                [*command, *map(str, descriptors)],
                stdin=stdin,
                stdout=self._errors,
                stderr=self._errors,
                pass_fds=descriptors,
                start_new_session=True,
                env=ENVIRONMENT,
            )

    def takes_requests(self) -> bool:
        """Whether its interpreter has not ended."""
        return not self._wait_for_end(0.0)

    def has_failed(self) -> bool:
        """Of one that takes no requests: whether it was killed or could not go on. Only its starter knows."""
        try:
            return self._process.wait(ENDING_S) != 0
        except subprocess.TimeoutExpired:
            return True

    @property
    def exit_code(self) -> int:
        """Of one that `has_failed`: negative for a signal, which is SIGKILL where it has yet to end."""
        code = self._process.returncode
        return -signal.SIGKILL if code is None else code

    def reap(self, pid: int) -> bool:
        """Reap a child that has ended, if it is this one; `has_failed` then says how it ended.
        Returns whether it is this one."""
        # Not one that was reaped before: its number may be another child's by now.
        is_this = self._process.returncode is None and self._process.pid == pid
        return is_this and self._process.poll() is not None

    def finish(self) -> None:
        """Let an interpreter that has served its last program end by itself; its starter sees that it was not
        killed."""
        has_ended = self._wait_for_end(ANSWER_S)
        if has_ended and self._starter == os.getpid():
            # What is around it has to end as well.
            try:
                self._process.wait(ENDING_S)
            except subprocess.TimeoutExpired:
                has_ended = False
        if not has_ended:
            self.close()
            return
        self._requests.close()
        self._errors.close()

    def run(
        self, uid: int, file_bytes: int, order: IO[bytes], streams: Sequence[IO[bytes]], answer_s: float
    ) -> WarmProgram:
        """Start a program.

        Args:
            uid: Its user; 0: that of the jail.
            file_bytes: The size of its /tmp.
            order: The launcher's instructions.
            streams: Its standard input, output and error.
            answer_s: The longest time until it has started.

        Raises:
            WarmJailError: the interpreter has not said that it has started it, so it may run or have run.
        """
        answers, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        request = json.dumps({"uid": uid, "file_bytes": file_bytes}).encode()
        try:
            answers.settimeout(answer_s)
            with theirs:
                descriptors = [theirs.fileno(), order.fileno(), *(stream.fileno() for stream in streams)]
                socket.send_fds(self._requests, [request], descriptors)
            _, received, _, _ = socket.recv_fds(answers, MAX_MESSAGE_BYTES, 1)
            if not received:
                raise ConnectionResetError
        except (ConnectionError, TimeoutError) as error:
            answers.close()
            raise WarmJailError(self._reason() or f"it did not start a program ({error!r})") from None
        except OSError:
            answers.close()
            raise
        return WarmProgram(answers, received[0])

    def close(self) -> None:
        """End it, and all that runs in it."""
        self._requests.close()
        self._errors.close()
        is_starter = self._starter == os.getpid()
        # Never after it was reaped: the number may be another group's by then. A process of a job cannot
        # know, for it is no parent of it, but its parent reaps nothing while a job runs.
        if not is_starter or self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        # For bubblewrap's outer process alone. What is in the jail was killed with it, and ends soon after.
        if is_starter:
            self._process.wait()

    def _wait_for_end(self, timeout_s: float) -> bool:
        """Wait until its interpreter ends: nothing else has the other end of this socket."""
        poll = select.poll()
        poll.register(self._requests, 0)
        return bool(poll.poll(1000 * timeout_s))

    def _reason(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1][-500:] if lines else ""


class WarmJails:
    """The warm jails of one worker. One ends with the thread that has started it."""

    def __init__(self, sources: Sequence[str] = ()) -> None:
        """`sources` are programs that many orders have: they are compiled once."""
        self._sources = tuple(sources)
        self._templates: dict[bool, Template] = {}
        """By whether its jail has the installed packages."""
        self._pause_s = FIRST_PAUSE_S
        """After the next failure; it doubles while interpreters fail in a row."""
        self._paused_until = 0.0

    @property
    def is_paused(self) -> bool:
        """Whether programs get jails of their own, because warm ones have just failed."""
        return time.monotonic() < self._paused_until

    def note_failure(self) -> None:
        """Do without warm jails for a while."""
        self._paused_until = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def prepare(self, configs: Sequence[SandboxConfig]) -> None:
        """Let there be one for each of these; does not wait until they are ready. None during a pause.

        Raises:
            SandboxError: there is no bubblewrap, or no filter of system calls.
            OSError: the machine is short of something.
        """
        for template in self._templates.values():
            if template.takes_requests():
                continue
            if template.has_failed():
                self.note_failure()
                pause_s = self._paused_until - time.monotonic()
                ending = ending_in_words(template.exit_code)
                print(
                    f"tidemill sandbox: a warm jail died ({ending}); programs get jails of their own for "
                    f"{pause_s:.0f} s",
                    file=sys.stderr,
                    flush=True,
                )
            else:
                self._pause_s = FIRST_PAUSE_S
        if self.is_paused:
            self.close()
            return
        for config in configs:
            if can_be_warm(config.packages):
                self._template(config)

    def reap(self, pid: int) -> bool:
        """Reap a child that has ended, if it is one of these; the next `prepare` then knows how it ended.
        Returns whether it is."""
        return any(template.reap(pid) for template in self._templates.values())

    def start(
        self,
        uid: int,
        config: SandboxConfig,
        order: IO[bytes],
        streams: Sequence[IO[bytes]],
        answer_s: float | None = None,
    ) -> WarmProgram:
        """Start a program (`Template.run`; at most `ANSWER_S`, unless `answer_s` says otherwise).

        After a failure it may have run: whoever tries again gives it another order and other streams.

        Raises:
            UsedJailError: the warm jail that was there failed; a new one may not.
            WarmJailError: a new one failed.
        """
        is_used = config.packages in self._templates
        longest_s = ANSWER_S if answer_s is None else answer_s
        try:
            return self._template(config).run(uid, config.file_mb << 20, order, streams, longest_s)
        except WarmJailError as error:
            self.drop(config)
            if is_used:
                raise UsedJailError(str(error)) from None
            raise

    def drop(self, config: SandboxConfig) -> None:
        """End the jail for such programs, and what runs in it. The next program gets another one."""
        template = self._templates.pop(config.packages, None)
        if template is not None:
            template.close()

    def finish(self, config: SandboxConfig) -> None:
        """Let go of the jail for such programs, whose interpreter has served its last one."""
        template = self._templates.pop(config.packages, None)
        if template is not None:
            template.finish()

    def close(self) -> None:
        """End all of them."""
        for template in self._templates.values():
            template.close()
        self._templates.clear()

    def _template(self, config: SandboxConfig) -> Template:
        template = self._templates.get(config.packages)
        if template is not None and template.takes_requests():
            return template
        self.drop(config)
        setup = {
            "launcher": LAUNCHER,
            "filter": read_filter().hex(),
            "modules": READY_MODULES,
            "compiled": _compile(self._sources),
            "max_programs": MAX_PROGRAMS,
        }
        command = [*make_command(config, is_template=True), "--remount-ro", "/", "--", *PYTHON, TEMPLATE]
        template = Template(command, json.dumps(setup).encode())
        self._templates[config.packages] = template
        return template


@functools.cache
def _compile(sources: tuple[str, ...]) -> dict[str, str]:
    """The code of each source, for an interpreter of the same version."""
    return {
        source: marshal.dumps(compile(source, "<string>", "exec", dont_inherit=True)).hex()
        for source in sources
    }


@functools.cache
def can_be_warm(has_packages: bool) -> bool:
    """Whether nothing that a program needs lies below /tmp, over which a warm jail mounts another one."""
    paths = (os.path.realpath(sys.base_prefix), *find_packages(has_packages))
    return not any(Path(path).is_relative_to("/tmp") for path in paths)

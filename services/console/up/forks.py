"""The console's end of the fork server, from which a run's trainer and rollout workers are forked.

They share its imports of torch and transformers, so a process that died starts again at once. Where the
server has ended, or cannot fork, processes are started without it.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tidemill.common.process.fork_server import FAILED
from tidemill.common.process.gpus import count_gpus
from tidemill.common.process.programs import Program, run_own
from tidemill.services.console.run.guard import Guard

if TYPE_CHECKING:  # the config takes half a second to import, and the server is started before
    from tidemill.services.console.up.specs import ServiceSpec


class Forked:
    """The part of `asyncio.subprocess.Process` that the supervisor uses."""

    def __init__(self, pid: int, end: "asyncio.Future[int]") -> None:
        self.pid = pid
        self._end = end

    async def wait(self) -> int:
        return await asyncio.shield(self._end)


class ForkServer:
    def __init__(self) -> None:
        self._control, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        with child_end:
            self.process = subprocess.Popen(
                run_own(Program.FORK_SERVER, str(child_end.fileno())),
                pass_fds=[child_end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                # Read when libraries are imported. Threads do not survive a fork, so none are started.
                env={
                    "OMP_WAIT_POLICY": "PASSIVE",
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "PYTHONUNBUFFERED": "1",
                },
                start_new_session=True,
            )
        self._starting: deque[asyncio.Future[Forked]] = deque()
        self._ends: dict[int, asyncio.Future[int]] = {}
        self._reading: asyncio.Task[None] | None = None

    @classmethod
    def where_it_works(cls) -> "ForkServer | None":
        """A server if there are no GPUs: imports may use CUDA, and a process that does must not fork."""
        return cls() if hasattr(os, "pidfd_open") and count_gpus() == 0 else None

    @contextlib.contextmanager
    def watched(self, guard: Guard) -> Iterator[None]:
        """In the block the guard ends the server with the console: else it would fork pending requests."""
        guard.watch(self.process.pid, "service")
        try:
            yield
        finally:
            guard.forget(self.process.pid)

    def close(self) -> None:
        """End the server, after all processes that were forked."""
        self._control.close()
        self.process.kill()
        self.process.wait()

    async def start(self, spec: "ServiceSpec", env: Mapping[str, str], log: Path) -> Forked | None:
        """Fork a service, with its output appended to `log`; None: it cannot be forked."""
        self._reading = self._reading or asyncio.create_task(self._read(), name="fork server")
        if not spec.loads_torch or self._reading.done():
            return None
        module, *arguments = spec.command[spec.command.index("-m") + 1 :]
        request = {"module": module, "arguments": arguments, "log": str(log)}
        started: asyncio.Future[Forked] = asyncio.get_running_loop().create_future()
        try:
            # Fails where the server has ended, or the variables do not fit into a message.
            self._control.send(json.dumps(request | {"environment": {**env, **spec.env}}).encode())
        except OSError:
            return None
        self._starting.append(started)
        try:
            return await started
        # It has ended, or this machine is short of processes: whoever starts without it finds out.
        except OSError:
            return None

    async def _read(self) -> None:
        """Read the server's reports of starts and ends of processes, until it ends."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            while report := await loop.sock_recv(self._control, 100):
                word, *numbers = report.decode().split()
                code = [int(number) for number in numbers]
                if word == FAILED:
                    started = self._starting.popleft()
                    if not started.done():
                        started.set_exception(OSError(*code, os.strerror(*code)))
                    continue
                pid = int(word)
                if code:
                    self._ends.pop(pid).set_result(*code)
                else:
                    self._ends[pid] = loop.create_future()
                    started = self._starting.popleft()
                    if started.cancelled():
                        os.kill(pid, signal.SIGKILL)  # its start was cancelled
                    else:
                        started.set_result(Forked(pid, self._ends[pid]))
        for started in self._starting:
            if not started.done():
                started.set_exception(ChildProcessError())
        # Their ends can no longer be seen: the tasks that wait for them kill what is left of their groups.
        for end in self._ends.values():
            end.set_result(-signal.SIGKILL)

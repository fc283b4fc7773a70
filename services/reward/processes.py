"""A pool of processes for plain reward functions.

Every process has a socket of its own and works on one request at a time, so that killing one, which happens
at the limit of time and when the lease is lost, cannot disturb another. SIGKILL goes to its whole process
group: what the function started dies with it. A killed or crashed process is replaced by the next call.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from typing import Any

import msgpack

from common import metrics
from common.own_modules import ROOT
from services.reward.child import LENGTH
from services.reward.outcome import AttemptError, Outcome
from services.reward.request import Request

START_TIMEOUT_S = 120.0
"""Longest time a process may take to import its function."""

# The child imports from where its parent does, without a variable that would reach what it starts in turn.
_BOOTSTRAP = (
    "import sys; fd, parent = int(sys.argv[1]), int(sys.argv[2]); sys.path[:] = sys.argv[3:]; "
    "import common, services; del sys.path[0]; from services.reward.child import main; main(fd, parent)"
)


class ScoringProcess:
    """One process with one function. It is sound while every question has been answered whole."""

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-c", _BOOTSTRAP, str(theirs.fileno()), str(os.getpid())]
            command += [str(ROOT), *sys.path]  # our own first, until they are there
            # A session of its own: Ctrl-C must not reach it, and its group can be killed as a whole.
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
            )
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self.is_sound = False

    @property
    def pid(self) -> int:
        """Its process id, which is that of its group too."""
        return self._process.pid

    async def load(self, spec: dict[str, Any]) -> None:
        """Have it import the function, once; `spec` says which.

        Raises:
            AttemptError: it cannot, or not in time.
        """
        self._streams = await asyncio.open_connection(sock=self._channel)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                answer = await self._ask(spec)
        except TimeoutError:
            raise AttemptError(f"importing the function took longer than {START_TIMEOUT_S:g} s") from None
        if "error" in answer:
            self.is_sound = False
            raise AttemptError(answer["error"])

    async def run(self, request: Request, timeout_s: float) -> list[Outcome]:
        """Answer one request.

        Raises:
            AttemptError: the function failed, the process died, or the time ran out.
        """
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._ask(request.to_wire())
        except TimeoutError:
            message = f"no result within {timeout_s:g} s (timeout_s); its process was killed"
            raise AttemptError(message, is_timeout=True) from None
        if "error" in answer:
            raise AttemptError(answer.pop("error"), **answer)
        return [Outcome(*parts) for parts in answer["outcomes"]]

    def kill(self) -> None:
        """Kill it with all that it started, whatever it is doing."""
        self.is_sound = False
        if self._process.returncode is None:  # not reaped yet, so the number is still its own
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        if self._streams is not None:
            self._streams[1].transport.abort()
        else:
            self._channel.close()

    async def wait(self) -> int:
        """Reap it after `kill`; returns its exit code, negative for a signal."""
        return await asyncio.to_thread(self._process.wait)

    async def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._streams is not None
        reader, writer = self._streams
        self.is_sound = False
        body = msgpack.packb(request)
        try:
            writer.write(LENGTH.pack(len(body)) + body)
            await writer.drain()
            (num_bytes,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
            answer: dict[str, Any] = msgpack.unpackb(await reader.readexactly(num_bytes))
        except (asyncio.IncompleteReadError, ConnectionError):
            self.kill()  # it is ending already, and its exit code stands; what it started may linger
            code = await self.wait()
            reason = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            raise AttemptError(f"the process of the reward function died ({reason})") from None
        self.is_sound = True
        return answer


class ProcessPool:
    """At most `size` processes, started when first needed. A call that ends, in any way, frees a slot."""

    def __init__(self, spec: dict[str, Any], size: int) -> None:
        self._spec = spec
        self._slots = asyncio.Semaphore(size)
        self._idle: list[ScoringProcess] = []
        self._reapers: set[asyncio.Task[int]] = set()

    async def run(self, request: Request, timeout_s: float) -> list[Outcome]:
        """Answer a request in the next free process. Waiting for one does not count as its time.

        Raises:
            AttemptError: see `ScoringProcess.run`.
        """
        async with self._slots:
            is_new = not self._idle
            process = ScoringProcess() if is_new else self._idle.pop()
            try:
                if is_new:
                    await process.load(self._spec)
                return await process.run(request, timeout_s)
            finally:  # also where this call was cancelled
                if process.is_sound:
                    self._idle.append(process)
                else:
                    metrics.SCORING_PROCESSES_KILLED.inc()
                    self._discard(process)

    async def close(self) -> None:
        """Kill all processes and wait until they are gone."""
        while self._idle:
            self._discard(self._idle.pop())
        await asyncio.gather(*self._reapers)

    def _discard(self, process: ScoringProcess) -> None:
        process.kill()
        reaper = asyncio.create_task(process.wait())
        self._reapers.add(reaper)
        reaper.add_done_callback(self._reapers.discard)

"""A process that runs users' code for a service: start, requests with deadlines, kill as a group.

Guarantee: every request ends: with its answer, at its deadline, or with the reason why the process ended.
The process ends with the service.
"""

import asyncio
import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

from tidemill.common.process.children import frame_of, kill_group, receive, spawn
from tidemill.common.process.programs import Child, ending_in_words
from tidemill.common.process.shortage import machine_faults

START_TIMEOUT_S = 120.0
"""Longest time a process may take to import users' code."""

FIRST_LOOK_S = 0.002
LONGEST_LOOK_S = 0.1
"""Pause between two looks at whether a killed process has ended; doubles each time."""

Frame = dict[str, Any]
Answer = asyncio.Future[Frame]


class StartupError(Exception):
    """The process could not load users' code; the text says why. `shortage`: the `errno` of what its machine
    was short of, in which case nothing is wrong with the code; 0 where it was not."""

    def __init__(self, message: str, shortage: int = 0) -> None:
        super().__init__(message)
        self.shortage = shortage


class ProcessEndedError(Exception):
    """The process ended before it answered; the text says how."""


class WorkerProcess:
    """The service's side of one process: requests carry a number, and their answers the same one."""

    def __init__(self, child: Child, subject: str) -> None:
        """`subject` names the code that it runs, for messages.

        Raises:
            MachineFaultError: the machine is short of processes, descriptors or memory.
        """
        self._what = subject
        self._process, self._channel = spawn(child)
        self._writer: asyncio.StreamWriter | None = None
        self._starting: asyncio.Task[None] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._numbers = itertools.count(1)
        self._end_reason = ""
        self.waiting: dict[int, Answer] = {}
        self.is_sound = True
        """Whether it may get further requests."""

    @property
    def pid(self) -> int:
        """Its process id, which is also its group's id."""
        return self._process.pid

    async def start(self, spec: Frame) -> None:
        """Have it load what `spec` describes; further callers wait for the same start.

        Raises:
            StartupError: it cannot, or not in time.
            MachineFaultError: this process is short of descriptors or memory.
        """
        if self._starting is None:
            self._starting = asyncio.create_task(self._start(spec))
            # Retrieves the error: if every caller was cancelled, asyncio would log it as never retrieved.
            self._starting.add_done_callback(lambda starting: starting.cancelled() or starting.exception())
        # A caller that is cancelled must not end the start for the others.
        await asyncio.shield(self._starting)

    @contextlib.contextmanager
    def request(self, frame: Frame) -> Iterator[tuple[int, Answer]]:
        """Send a request; yields its number and the future of its answer."""
        number = next(self._numbers)
        answer = asyncio.get_running_loop().create_future()
        self.waiting[number] = answer
        try:
            self.send({"id": number, **frame})
            if self._end_reason:  # the process had ended before: `fail` has missed this request
                self.fail(self._end_reason)
            yield number, answer
        finally:
            self.waiting.pop(number, None)
            answer.cancel()

    async def ask(self, frame: Frame, timeout_s: float) -> Frame:
        """The answer to a request.

        Raises:
            ProcessEndedError: the process ended.
            TimeoutError: there is no answer in time.
        """
        with self.request(frame) as (_, answer):
            await asyncio.wait({answer}, timeout=timeout_s)
            if not answer.done():
                raise TimeoutError
            return answer.result()

    def send(self, frame: Frame) -> None:
        """Send a frame, without waiting for an answer."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(frame_of(frame))

    async def drain(self) -> None:
        """Wait until the process has taken most of what was sent."""
        if self._writer is not None:
            with contextlib.suppress(ConnectionError):  # the next request says why it ended
                await self._writer.drain()

    def kill(self) -> None:
        """Kill it with all that it started."""
        self.is_sound = False
        kill_group(self._process)
        if self._writer is not None:
            self._writer.transport.abort()
        else:
            self._channel.close()

    async def wait(self) -> int:
        """Reap it after `kill`; returns its exit code, negative for a signal."""
        code = await self._reap()
        if self._reading is not None:
            await asyncio.gather(self._reading, return_exceptions=True)
        return code

    async def end(self, grace_s: float) -> None:
        """Give it `grace_s` to end by itself; then kill it."""
        self.is_sound = False
        if self._starting is not None:
            self._starting.cancel()
        if self._reading is not None and self._writer is not None and not self._writer.is_closing():
            with contextlib.suppress(OSError):
                self._writer.write_eof()
            await asyncio.wait({self._reading}, timeout=grace_s)  # it kills the rest of the group
        self.kill()
        await self.wait()

    def receive(self, frame: Frame) -> None:
        """Handle a frame that came from the process."""
        answer = self.waiting.get(frame["id"])
        if answer is not None and not answer.done():
            answer.set_result(frame)

    def fail(self, reason: str) -> None:
        """Fail all waiting requests: the process has ended."""
        for answer in self.waiting.values():
            if not answer.done():
                answer.set_exception(ProcessEndedError(reason))

    async def _start(self, spec: Frame) -> None:
        with machine_faults(f"no connection to the process of {self._what}"):
            reader, self._writer = await asyncio.open_connection(sock=self._channel)
        self.send(spec)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                answer = await receive(reader)
        except TimeoutError:
            self.kill()
            raise StartupError(f"importing {self._what} took longer than {START_TIMEOUT_S:g} s") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            raise StartupError(await self._exit_reason()) from None
        if "error" in answer:
            self.kill()
            raise StartupError(answer["error"], int(answer.get("shortage", 0)))
        self._reading = asyncio.create_task(self._read_for_ever(reader))

    async def _read_for_ever(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                self.receive(await receive(reader))
        self._end_reason = await self._exit_reason()
        # After the reason is set: requests made from now on find it.
        self.fail(self._end_reason)

    async def _exit_reason(self) -> str:
        self.kill()  # it is ending, and keeps its exit code; processes that it started may still run
        code = await self._reap()
        return f"the process of {self._what} died ({ending_in_words(code)})"

    async def _reap(self) -> int:
        """Wait for the end of the killed process. Not on a thread: where none can be started, requests that
        wait for the reason of this end would wait for ever."""
        pause_s = FIRST_LOOK_S
        while self._process.poll() is None:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_LOOK_S)
        return int(self._process.returncode)

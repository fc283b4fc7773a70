"""A process that runs users' code for a service: start, requests with deadlines, kill as a group.

Guarantee: every request ends: with its answer, at its deadline, or with the reason why the process ended.
The process ends with the service.
"""

import asyncio
import contextlib
import errno
import itertools
import signal
from collections.abc import Callable
from typing import Any, Protocol

from tidemill.common.process.children import FrameDecoder, frame_of, kill_group, spawn
from tidemill.common.process.programs import Child, ending_in_words
from tidemill.common.process.shortage import machine_faults

START_TIMEOUT_S = 120.0
"""Longest time a process may take to import users' code."""

FIRST_LOOK_S = 0.002
LONGEST_LOOK_S = 0.1
"""Pause between two looks at whether a killed process has ended; doubles each time."""

Frame = dict[str, Any]


class Answer(Protocol):
    """Gets the answer to a request: a future, or an object with its methods that acts on the answer at
    once."""

    def done(self) -> bool: ...

    def set_result(self, frame: Frame, /) -> None: ...

    def set_exception(self, error: BaseException, /) -> None: ...

    def cancel(self) -> object: ...


class StartupError(Exception):
    """The process could not load users' code; the text says why.

    `shortage` is 0, or the `errno` of what its machine was short of, such as `errno.ENOMEM`: then nothing is
    wrong with the code.
    """

    def __init__(self, message: str, shortage: int = 0) -> None:
        super().__init__(message)
        self.shortage = shortage


class ProcessEndedError(Exception):
    """The process ended before it answered; the text says how."""


class _Channel(asyncio.Protocol):
    """The service's end of the socket. All frames of a loop iteration are sent in one write, and all that
    have come are read at once: with hundreds of requests under way, each costs a share of a system call."""

    def __init__(self, on_frame: Callable[[Frame], None], on_lost: Callable[[], object]) -> None:
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._decoder = FrameDecoder()
        self._unsent: list[bytes] = []
        self._transport: asyncio.Transport | None = None
        self._may_send = asyncio.Event()
        self._may_send.set()

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        for frame in self._decoder.feed(data):
            self._on_frame(frame)

    def connection_lost(self, _: Exception | None) -> None:
        self._may_send.set()
        self._on_lost()

    def pause_writing(self) -> None:
        self._may_send.clear()

    def resume_writing(self) -> None:
        self._may_send.set()

    def send(self, frame: Frame) -> None:
        data = frame_of(frame)
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent.append(data)

    async def drain(self) -> None:
        """Wait until the process has taken most of what was sent."""
        self._flush()
        await self._may_send.wait()

    def finish(self) -> None:
        """Send what is there, and that no more will come."""
        self._flush()
        if self._transport is not None:
            self._transport.write_eof()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _flush(self) -> None:
        frames = self._unsent
        self._unsent = []
        if frames and self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(frames))


class WorkerProcess:
    """The service's side of one process: requests carry a number, and their answers the same one."""

    def __init__(self, child: Child, subject: str) -> None:
        """`subject` names the code that it runs, for messages.

        Raises:
            MachineFaultError: the machine is short of processes, descriptors or memory.
        """
        self._subject = subject
        self._process, self._socket = spawn(child)
        self._channel: _Channel | None = None
        """Open once the process is being started."""
        self._starting: asyncio.Task[None] | None = None
        self._first_frame: asyncio.Future[Frame] | None = None
        """The answer to the start: the first frame that the process sends."""
        self._lost = asyncio.Event()
        """Set once the socket is closed, from either side."""
        self._ending: asyncio.Task[None] | None = None
        """Waits for the end of a process that has started, and fails what it did not answer."""
        self._numbers = itertools.count(1)
        self._end_reason = ""
        self._has_started = False
        self.waiting: dict[int, Answer] = {}
        """Requests that have not been ended yet, by number."""
        self.is_sound = True
        """Whether it may get further requests."""

    @property
    def pid(self) -> int:
        """Its process id, which is also its group's id."""
        return self._process.pid

    @property
    def end_reason(self) -> str:
        """How it ended, in words; empty while it runs."""
        return self._end_reason

    async def start(self, spec: Frame) -> None:
        """Have it load what `spec` describes; further callers wait for the same start.

        Raises:
            StartupError: it cannot, or not in time.
            MachineFaultError: this process is short of descriptors or memory.
        """
        if self._has_started:
            return
        if self._starting is None:
            self._starting = asyncio.create_task(self._start(spec))
            # Retrieves the error: if every caller was cancelled, asyncio would log it as never retrieved.
            self._starting.add_done_callback(lambda starting: starting.cancelled() or starting.exception())
        # A caller that is cancelled must not end the start for the others.
        await asyncio.shield(self._starting)

    def begin_request(self, frame: Frame, answer: Answer) -> int:
        """Send a request; returns its number, for `end_request`. `answer` gets the frame that answers it."""
        number = next(self._numbers)
        # First: a frame that cannot be sent must leave nothing behind.
        self.send({"id": number, **frame})
        self.waiting[number] = answer
        if self._end_reason:  # the process had ended before: `fail` has missed this request
            self.fail(self._end_reason)
        return number

    def end_request(self, number: int) -> None:
        """Forget a request, answered or not."""
        self.waiting.pop(number).cancel()

    async def ask(self, frame: Frame, timeout_s: float) -> Frame:
        """The answer to a request.

        Raises:
            ProcessEndedError: the process ended.
            TimeoutError: there is no answer in time.
        """
        answer: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        number = self.begin_request(frame, answer)
        try:
            await asyncio.wait({answer}, timeout=timeout_s)
            if not answer.done():
                raise TimeoutError
            return answer.result()
        finally:
            self.end_request(number)

    def send(self, frame: Frame) -> None:
        """Send a frame with the others of this loop iteration, without waiting for an answer."""
        if self._channel is not None and self._channel.is_open:
            self._channel.send(frame)

    async def drain(self) -> None:
        """Wait until the process has taken most of what was sent."""
        if self._channel is not None:
            await self._channel.drain()

    def kill(self) -> None:
        """Kill it with all that it started."""
        self.is_sound = False
        kill_group(self._process)
        if self._channel is not None:
            self._channel.abort()
        else:
            self._socket.close()

    async def wait(self) -> int:
        """Reap it after `kill`; returns its exit code, negative for a signal."""
        code = await self._reap()
        if self._ending is not None:
            await asyncio.gather(self._ending, return_exceptions=True)
        return code

    async def end(self, grace_s: float) -> None:
        """Give it `grace_s` to end by itself; then kill it."""
        self.is_sound = False
        if self._starting is not None:
            self._starting.cancel()
        if self._ending is not None and self._channel is not None and self._channel.is_open:
            with contextlib.suppress(OSError):
                self._channel.finish()
            await asyncio.wait({self._ending}, timeout=grace_s)  # it kills the rest of the group
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
        loop = asyncio.get_running_loop()
        self._first_frame = loop.create_future()
        try:
            with machine_faults(f"no connection to the process of {self._subject}"):
                _, self._channel = await loop.create_connection(
                    lambda: _Channel(self._take, self._lose), sock=self._socket
                )
        except Exception:
            # No later call of `start` tries again: each gets this error.
            self.kill()
            raise
        self.send(spec)
        await asyncio.wait({self._first_frame}, timeout=START_TIMEOUT_S)
        if not self._first_frame.done():
            self.kill()
            raise StartupError(f"importing {self._subject} took longer than {START_TIMEOUT_S:g} s")
        if self._first_frame.cancelled():  # by `_lose`: the socket was closed before the first frame
            is_ended_by_us = not self.is_sound
            reason = await self._exit_reason()
            # What kills a process that has only begun to start is the kernel, which needs its memory.
            is_killed = self._process.returncode == -signal.SIGKILL and not is_ended_by_us
            raise StartupError(reason, errno.ENOMEM if is_killed else 0)
        answer = self._first_frame.result()
        if "error" in answer:
            self.kill()
            raise StartupError(answer["error"], int(answer.get("shortage", 0)))
        self._has_started = True
        self._ending = asyncio.create_task(self._await_end())

    def _take(self, frame: Frame) -> None:
        """Handle a frame: the first one is the answer to the start."""
        assert self._first_frame is not None
        if self._first_frame.done():
            self.receive(frame)
        else:
            self._first_frame.set_result(frame)

    def _lose(self) -> None:
        """Note that the socket is closed, from either side."""
        assert self._first_frame is not None
        self._first_frame.cancel()
        self._lost.set()

    async def _await_end(self) -> None:
        await self._lost.wait()
        self._end_reason = await self._exit_reason()
        # After the reason is set: requests made from now on find it.
        self.fail(self._end_reason)

    async def _exit_reason(self) -> str:
        # It is ending by itself, and keeps its exit code. The processes that it started may still run.
        self.kill()
        code = await self._reap()
        return f"the process of {self._subject} died ({ending_in_words(code)})"

    async def _reap(self) -> int:
        """Wait for the end of the killed process. Not on a thread: where none can be started, requests that
        wait for the reason of this end would wait for ever."""
        pause_s = FIRST_LOOK_S
        while self._process.poll() is None:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_LOOK_S)
        return int(self._process.returncode)

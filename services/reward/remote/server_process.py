"""A model server as a child process: started, watched, and ended for certain.

Guarantee: when this process ends, however it ends, so does the server with all its processes. The server
has a process group of its own, and a guard kills that group when the pipe from here closes.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence

STOP_S = 15.0
"""For the server to end by itself; then its group is killed."""
_GUARD = 'cat > /dev/null; kill -s KILL -- "-$0" 2> /dev/null'
"""Waits for the end of its input, which is the end of whoever holds the other end."""


class ServerProcess:
    """One start of one server. Its output goes where this process's goes."""

    def __init__(self, process: asyncio.subprocess.Process, guard: asyncio.subprocess.Process) -> None:
        self._process, self._guard = process, guard

    @classmethod
    async def start(cls, command: Sequence[str], env: Mapping[str, str]) -> "ServerProcess":
        """Start the server, and its guard."""
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, env=dict(env), start_new_session=True
        )
        guard = await asyncio.create_subprocess_exec(
            "sh", "-c", _GUARD, str(process.pid), stdin=asyncio.subprocess.PIPE, start_new_session=True
        )
        return cls(process, guard)

    @property
    def pid(self) -> int:
        """Its process id, and the id of its process group."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.returncode

    async def wait(self) -> int:
        """Wait for its end; returns the exit code."""
        return await self._process.wait()

    async def stop(self) -> None:
        """Ask it to end, and end it with all that it started."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await self._process.wait()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        await self._process.wait()
        with contextlib.suppress(ProcessLookupError):
            self._guard.kill()  # before its input closes: the group's number may be another one's by then
        await self._guard.wait()

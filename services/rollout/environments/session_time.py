"""The time that a session has left. It stands still while the session's pictures are stored or read: a store
that is away is waited for, and is neither the environment's fault nor the policy's."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator

from tidemill.services.rollout.sessions.parts import Recording


class SessionTime:
    def __init__(self, seconds: float, recording: Recording) -> None:
        """`recording` keeps, for a worker that goes on with the session, how much of its time is used up."""
        self._deadline = time.monotonic() + seconds
        self._recording = recording
        self._limit: asyncio.Timeout | None = None
        """Of the call under way."""

    @property
    def left_s(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    @contextlib.asynccontextmanager
    async def limiting(self) -> AsyncIterator[None]:
        """Raises TimeoutError: the block takes longer than the time that is left."""
        async with asyncio.timeout(self.left_s) as limit:
            self._limit = limit
            try:
                yield
            finally:
                self._limit = None

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """The block takes none of the time."""
        begun = time.monotonic()
        if self._limit is not None:
            self._limit.reschedule(None)
        try:
            yield
        finally:
            waited_s = time.monotonic() - begun
            self._deadline += waited_s
            self._recording.leave_out(waited_s)
            if self._limit is not None:
                self._limit.reschedule(asyncio.get_running_loop().time() + self.left_s)

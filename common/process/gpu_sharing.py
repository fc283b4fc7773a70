"""GPUs that processes share, one at a time: the holder of the locks may use them, the others sleep.

Guarantees: at most one process holds a GPU; when a process dies, the kernel frees its locks and its place in
line (flock); a process that gives a GPU back does not get it again before one that already waits for it.
Several GPUs are locked in one order, so that no two processes wait for each other. This holds on one machine:
processes in containers need a common folder, named by TIDEMILL_TURNS_DIR.
"""

import asyncio
import contextlib
import fcntl
import os
import tempfile
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

import structlog

from tidemill.common.errors import ConfigError, TidemillError
from tidemill.common.telemetry import metrics

log = structlog.get_logger(__name__)

LOCKS_DIR_VARIABLE = "TIDEMILL_TURNS_DIR"
DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"
POLL_S = 0.01
"""Pause between two tries of a lock. Waiting in the kernel would block a thread that cannot be cancelled."""

_open_locks: "weakref.WeakSet[_Lock]" = weakref.WeakSet()


def lock_files() -> list[Path]:
    """One file for each device this process may use, the same ones in every process of this machine."""
    default = Path(tempfile.gettempdir()) / f"tidemill-turns-{os.getuid()}"
    folder = Path(os.environ.get(LOCKS_DIR_VARIABLE) or default)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot make the folder of GPU locks {folder}: {error.strerror}. Set {LOCKS_DIR_VARIABLE}."
        ) from None
    devices = os.environ.get(DEVICES_VARIABLE) or "0"
    return [folder / f"device-{name.strip()}" for name in sorted(devices.split(","))]


class GpuSharingError(TidemillError):
    """This process takes no more turns, because leaving or entering the GPU failed."""


class _Lock:
    """An exclusive lock on a file, held from `take` to `drop`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = -1

    def take(self) -> bool:
        """Try to lock, without waiting; returns whether it succeeded."""
        if self._file < 0:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            _open_locks.add(self)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def drop(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _forget_locks() -> None:
    """A forked child must not keep the locks of its parent."""
    for lock in list(_open_locks):
        lock.drop()


os.register_at_fork(after_in_child=_forget_locks)


class GpuLock:
    """The lock on all of `files` together."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._held = [_Lock(file.with_suffix(".turn")) for file in sorted(files)]
        self._lines = [_Lock(file.with_suffix(".next")) for file in sorted(files)]

    async def acquire(self) -> None:
        """Stand in line, then wait until the holder gives the lock back or dies."""
        try:
            for line, lock in zip(self._lines, self._held, strict=True):
                # The holder hands the lock over when a process stands in line. The place in line is given up
                # only with the lock in hand, or the next process could be served first.
                await _taken(line)
                await _taken(lock)
                line.drop()
        except BaseException:
            self.release()
            raise

    def is_wanted(self) -> bool:
        """Whether another process stands in line."""
        for line in self._lines:
            # Held for a moment only: a process that tries just then tries again after POLL_S.
            is_free = line.take()
            line.drop()
            if not is_free:
                return True
        return False

    def release(self) -> None:
        for lock in (*self._held, *self._lines):
            lock.drop()


async def _taken(lock: _Lock) -> None:
    while not lock.take():  # noqa: ASYNC110 (no event crosses processes)
        await asyncio.sleep(POLL_S)


class GpuGate:
    """Lets work through while this process holds the lock; `wake` and `sleep` enter and leave the GPU.

    The lock is kept while no other process wants it. When one does, it is handed over as soon as there is no
    work here, and after `turn_s` in any case: running work is finished, new work waits for the next lock.
    With `stands_still` running work is not finished: `sleep` suspends it, and `wake` resumes it.
    """

    def __init__(
        self,
        lock: GpuLock,
        wake: Callable[[], Awaitable[object]],
        sleep: Callable[[], Awaitable[object]],
        turn_s: float,
        *,
        stands_still: bool = False,
    ) -> None:
        self._lock = lock
        self._wake = wake
        self._sleep = sleep
        self._turn_s = turn_s
        self._stands_still = stands_still
        self._changed = asyncio.Condition()
        self._is_open = False
        self._num_waiting = 0
        self._num_users = 0
        self._keeper: asyncio.Task[None] | None = None

    @property
    def is_open(self) -> bool:
        return self._is_open

    def start(self) -> "asyncio.Task[None]":
        """Begin to share; the task ends by `close`, or with the error of `wake` or `sleep`."""
        self._keeper = asyncio.create_task(self._keep(), name="device turns")
        self._keeper.add_done_callback(lambda _: asyncio.ensure_future(self._notify()))
        return self._keeper

    @contextlib.asynccontextmanager
    async def use(self) -> AsyncIterator[None]:
        """Use the GPU inside the block; waits until this process holds it.

        Raises:
            GpuSharingError: `wake` or `sleep` failed with another error, or `close` ended the sharing.
            TidemillError: the error of `wake` or `sleep`.
        """
        async with self._changed:
            self._num_waiting += 1
            self._changed.notify_all()
            try:
                await self._changed.wait_for(lambda: self._is_open or self._is_over())
            finally:
                self._num_waiting -= 1
            if not self._is_open:
                self._raise_ended()
            # Nothing is awaited since the check: `_hold` sees this user, or had closed the gate before.
            self._num_users += 1
        try:
            yield
        finally:
            self._num_users -= 1
            # Also where the user was cancelled, or `_hold` would wait for a user that has left.
            await asyncio.shield(self._notify())

    def stay(self) -> Callable[[], None]:
        """Within `use`: count as work until the returned function is called, also after the block."""
        self._num_users += 1

        def leave() -> None:
            self._num_users -= 1

        return leave

    async def close(self) -> None:
        """Give the GPU back. Work that is still inside would go on without the lock: end it first."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)

    async def _keep(self) -> None:
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._num_waiting > 0 or self._num_users > 0)
            asked = time.monotonic()
            await self._lock.acquire()
            metrics.DEVICE_TURN_WAIT_SECONDS.observe(time.monotonic() - asked)
            try:
                await self._wake()
                await self._hold()
                await self._sleep()
            finally:
                self._is_open = False  # first: no work may enter once another process may have the GPU
                self._lock.release()

    async def _hold(self) -> None:
        """Stay open until the lock has to be handed over, then wait until no user is inside."""
        self._is_open = True
        opened = time.monotonic()
        await self._notify()
        while True:
            await asyncio.sleep(POLL_S)
            is_idle = self._num_users == 0 and self._num_waiting == 0
            is_over = time.monotonic() - opened >= self._turn_s
            if (is_idle or is_over) and self._lock.is_wanted():
                break
        # Before the wait: no new user may enter while those inside end.
        self._is_open = False
        async with self._changed:
            await self._changed.wait_for(lambda: self._stands_still or self._num_users == 0)
        log.debug("handing the device over", held_s=round(time.monotonic() - opened, 3))

    def _raise_ended(self) -> None:
        keeper = self._keeper
        cause = keeper.exception() if keeper and keeper.done() and not keeper.cancelled() else None
        if isinstance(cause, TidemillError):
            raise cause
        raise GpuSharingError(f"the device's turns have ended ({cause!r}); restart this process") from cause

    def _is_over(self) -> bool:
        return self._keeper is None or self._keeper.done()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

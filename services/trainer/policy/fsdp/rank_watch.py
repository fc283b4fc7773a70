"""Notices within seconds that another rank has ended, names it, and ends this one.

Collective calls on GPUs do not notice: they wait for minutes. So rank 0 watches the processes that it has
started. Between hosts, where torchrun starts them, each rank counts in the store that they met in: rank 0
looks at all others, and they at rank 0. Who has lost a rank kills those that it started, and ends: by the
error that the call under way raises, or, where that call waits on, without it.
"""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol

import structlog

from tidemill.common.process.programs import ending_in_words

log = structlog.get_logger(__name__)

GRACE_S = 10.0
"""For the call that is under way to raise, and the trainer to end as it does after errors."""
EXPLANATION_S = 2.0
"""A broken connection may be noticed before the process that broke it."""
BEAT_S, SILENT_S = 2.0, 60.0
"""Between two counts, and after how long without one a rank is lost: loading may hold up all threads."""
SHUTDOWN_TIMEOUT_S = 60.0
EXIT_CODE = 1


class Counters(Protocol):
    """Torch's store: numbers by name."""

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which is 0 at first; returns the sum."""


class RankWatch:
    """What one process knows of the other ranks, until the run is over."""

    def __init__(self, started: Mapping[int, "subprocess.Popen[bytes]"] | None = None) -> None:
        """Watch the processes that this one has started, by rank."""
        self._started = dict(started or {})
        self._is_over, self._lost = threading.Event(), threading.Event()
        self._lock, self._reason, self._exit_code = threading.Lock(), "", EXIT_CODE
        self._explains = bool(started)
        for rank in self._started:
            self._run(self._wait_for, rank)

    def follow(self, beats: "Heartbeats") -> None:
        """Count, and look whether others do."""
        self._explains = True
        self._run(self._count, beats)
        self._run(self._guard, beats)

    def loss(self) -> tuple[str, int]:
        """Which rank is lost and why, and the exit code for it; empty where none is known to be."""
        if self._explains:
            self._lost.wait(EXPLANATION_S)
        return self._reason, self._exit_code

    def stop(self) -> None:
        """The run is over: who ends from now on is not lost."""
        self._is_over.set()

    def join(self) -> None:
        """Wait for those that this process has started."""
        deadline = time.monotonic() + (0.0 if self._lost.is_set() else SHUTDOWN_TIMEOUT_S)
        for process in self._started.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _run(self, work: Callable[..., None], *args: object) -> None:
        threading.Thread(target=work, args=args, daemon=True, name="ranks").start()

    def _wait_for(self, rank: int) -> None:
        code = self._started[rank].wait()
        self._lose(f"rank {rank} has ended with {ending_in_words(code)}; see its output above", code)

    def _count(self, beats: "Heartbeats") -> None:
        num_failed, reason = 0, ""
        while not reason and not self._is_over.wait(BEAT_S):
            try:
                reason, num_failed = beats.look(), 0
            except RuntimeError as error:  # once, it may be that rank 0 has just ended, as this one will
                num_failed += 1
                reason = f"rank 0 cannot be reached any more ({error})" if num_failed > 1 else ""
        if reason:
            self._lose(reason)

    def _guard(self, beats: "Heartbeats") -> None:
        """A host without power does not even refuse: a count would wait for it."""
        while not self._is_over.wait(BEAT_S):
            if beats.is_stuck():
                self._lose(f"the host of rank 0 has not answered for {SILENT_S:.0f} s")
                return

    def _lose(self, reason: str, code: int = EXIT_CODE) -> None:
        with self._lock:
            # The first loss is the cause: ranks that it takes along are not named.
            if self._is_over.is_set() or self._lost.is_set():
                return
            # A rank that was killed has a negative code, which no process can exit with.
            self._reason, self._exit_code = reason, code if code > 0 else EXIT_CODE
            self._lost.set()
        log.error("a rank of the trainer is lost", reason=reason)
        for process in self._started.values():
            process.kill()
        if not self._is_over.wait(GRACE_S):
            print(f"tidemill trainer: {reason}", file=sys.stderr, flush=True)
            # The main thread waits in a call that never returns, and would not see an exception.
            os._exit(self._exit_code)


class Heartbeats:
    """What one rank counts, and whose numbers it looks at."""

    def __init__(
        self, store: Counters, rank: int, size: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store, self._rank, self._clock = store, rank, clock
        others = range(1, size) if rank == 0 else range(1)
        self._looked_at = clock()
        self._seen = {other: (0, clock()) for other in others}
        """The last number of each, and since when it has been that."""

    def look(self) -> str:
        """Count once; returns which rank has not counted for too long, as a sentence; empty where none."""
        self._store.add(_key(self._rank), 1)
        for other, (before, since) in self._seen.items():
            # Adding 0 reads it: `get` would wait for a number that is not there yet.
            number = self._store.add(_key(other), 0)
            if number != before:
                self._seen[other] = number, self._clock()
            elif self._clock() - since > SILENT_S:
                return (
                    f"rank {other} has been silent for {SILENT_S:.0f} s: it, its host or the network is gone"
                )
        self._looked_at = self._clock()
        return ""

    def is_stuck(self) -> bool:
        """Whether a look takes too long."""
        return self._clock() - self._looked_at > SILENT_S


def _key(rank: int) -> str:
    return f"tidemill/beat/{rank}"

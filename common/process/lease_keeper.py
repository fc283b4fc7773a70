"""Renews leases in place of a blocked event loop, and reports what blocks it.

A service whose loop is blocked is slow, not dead: without renewal others would take over its messages, and in
the end dead-letter them. A thread with its own loop and connection renews late leases, for `PATIENCE_LEASES`
leases: a loop that never runs again must not keep its messages for ever. Otherwise the thread does nothing
and has no connection.
"""

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import structlog

from tidemill.common.process.failures import is_logged
from tidemill.common.process.heartbeats import BLOCKING, STARVED, STARVED_S, Heartbeat
from tidemill.common.redis.broker import Broker

log = structlog.get_logger(__name__)

LOOK_S = 0.2
BLOCKED_S = 1.0
"""Seconds without an iteration after which a loop counts as blocked."""
SHOWN_S = 60.0
"""Seconds for which heartbeats report a blocked loop."""
PATIENCE_LEASES = 40
"""Leases for which a loop that does not run has its messages renewed."""
LATE = 0.5
"""Share of a lease after which a renewal is late; a loop that is not blocked renews at a third."""


WAITING_FILES = ("/selectors.py",)
"""Where the event loop waits for something to do."""


class Leases(Protocol):
    """The leases of one consumer."""

    lease_s: float
    renewed_at: float
    """When its own loop renewed last, on the monotonic clock."""

    async def renew_by(self, broker: Broker) -> None:
        """Renew all of them through `broker`, from another thread."""


class LeaseKeeper:
    """Watches the loop of the thread that creates it: `start`, then `turned` from that loop often, `stop`."""

    def __init__(self, connect: Callable[[], Broker], is_loading: Callable[[], bool] = lambda: False) -> None:
        """Loops that imports block while `is_loading()` are not reported."""
        self._connect = connect
        self._leases = list[Leases]()
        self._is_loading = is_loading
        self._watched = threading.get_ident()
        self._turned_at = time.monotonic()
        """When the watched loop has run last."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True, name="lease-keeper")
        self._broker: Broker | None = None
        self._is_blocked = False
        self._num_blocked = 0
        self._longest_s = 0.0
        self._where = ""
        """What blocked the loop the last time."""
        self._seen_at = float("-inf")
        """When the loop was last seen blocked."""
        self._is_starved = False
        self._num_starved = 0
        self._longest_starved_s = 0.0

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(timeout=5.0)

    def turned(self) -> None:
        """Note that the watched loop runs."""
        self._turned_at = time.monotonic()

    def add(self, leases: Leases) -> None:
        """Renew these leases when they are late, from now on."""
        self._leases = [*self._leases, leases]  # the thread reads the list: it is replaced, never changed

    def remove(self, leases: Leases) -> None:
        self._leases = [kept for kept in self._leases if kept is not leases]

    def report(self, beat: Heartbeat) -> None:
        """Add to a heartbeat what blocked the loop, and how often it was short of CPU."""
        if self._num_starved:
            beat.counts[STARVED] = self._num_starved
            beat.counts[STARVED_S] = round(self._longest_starved_s, 1)
        if time.monotonic() - self._seen_at < SHOWN_S:
            beat.counts[BLOCKING] = beat.counts.get(BLOCKING, 0) + 1
            note = f"the event loop was blocked for {self._longest_s:.1f} s: {self._where}"
            beat.detail = f"{beat.detail}; {note}" if beat.detail else note

    def _serve(self) -> None:
        with asyncio.Runner() as runner:
            runner.run(self._run())

    async def _run(self) -> None:
        try:
            # This wait blocks the thread's own loop, on which nothing else runs.
            while not self._stopping.wait(LOOK_S):
                self._look(time.monotonic() - self._turned_at)
                await self._renew_late()
        finally:
            if self._broker is not None:
                await self._broker.close()

    async def _renew_late(self) -> None:
        for leases in self._leases:
            since_renewal_s = time.monotonic() - leases.renewed_at
            if LATE * leases.lease_s < since_renewal_s < PATIENCE_LEASES * leases.lease_s:
                if self._broker is None:
                    self._broker = self._connect()
                await leases.renew_by(self._broker)
                await asyncio.sleep(0)

    def _look(self, blocked_s: float) -> None:
        """Note what the watched thread is doing while its loop is blocked; a loop that waits in `select` had
        nothing to do or gets no CPU to go on, which is the machine's affair and no code's."""
        if blocked_s < BLOCKED_S or self._is_loading():
            self._is_blocked = False
            self._is_starved = False
            return
        if not self._is_blocked and is_waiting(self._watched):
            self._longest_starved_s = max(self._longest_starved_s, blocked_s)
            if not self._is_starved:
                self._is_starved = True
                self._num_starved += 1
                if is_logged(self._num_starved):
                    log.info("short of CPU: the event loop was not run in time", times=self._num_starved)
            return
        if time.monotonic() - self._seen_at > SHOWN_S:
            self._longest_s = 0.0
        if not self._is_blocked or not self._where:
            self._where = _innermost_lines(self._watched)
        self._longest_s = max(self._longest_s, blocked_s)
        self._seen_at = time.monotonic()
        if not self._is_blocked:
            self._is_blocked = True
            self._num_blocked += 1
            if is_logged(self._num_blocked):
                log.warning("the event loop is blocked; leases are renewed in its place", where=self._where)


def is_waiting(thread: int) -> bool:
    """Whether a thread is in the wait of its event loop for something to do."""
    frame = sys._current_frames().get(thread)
    return frame is not None and frame.f_code.co_filename.endswith(WAITING_FILES)


def _innermost_lines(thread: int) -> str:
    """The innermost lines of a thread, the last one first."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return "unknown"
    lines = traceback.extract_stack(frame)[-3:]
    return ", called by ".join(
        f"{line.name} ({Path(line.filename).name}, line {line.lineno})" for line in reversed(lines)
    )

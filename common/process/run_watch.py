"""Notices for a worker that its run has ended.

A worker leaves a finished run at once. A run that was stopped, has failed, or has lost its trainer or its
Redis may go on: the worker waits for that `TIDEMILL_RESUME_WAIT_S`, and then leaves too, in order and with
exit code 0. So no worker that was started by hand keeps a GPU for a run that nobody continues.
"""

import asyncio
import os
import time
from collections.abc import Mapping
from typing import Any

import structlog

from tidemill.common.errors import BrokerError
from tidemill.common.process.heartbeats import read_heartbeats
from tidemill.common.process.shutdown import TRAINER
from tidemill.common.redis.broker import Broker
from tidemill.common.run.state import FAILED, FINISHED, RUNNING, STOPPED, read_state
from tidemill.common.wire.keys import Keys

log = structlog.get_logger(__name__)

RESUME_WAIT_VARIABLE = "TIDEMILL_RESUME_WAIT_S"
"""Seconds for which a worker waits for a run that has stopped to go on."""
RESUME_WAIT_S = 1800.0
"""Default of it."""
LOOK_S = 1.0
"""Interval at which a worker looks whether its run has ended. A run's own Redis stops soon after that."""
SILENT_S = 5.0
"""A Redis that takes longer than this for an answer is away."""


class RunWatch:
    """Notices for a worker that its run has ended."""

    def __init__(self, broker: Broker, keys: Keys, steps: int, wait_s: float | None = None) -> None:
        self.broker = broker
        self.keys = keys
        self.steps = steps
        default_s = float(os.environ.get(RESUME_WAIT_VARIABLE, RESUME_WAIT_S))
        self.wait_s = default_s if wait_s is None else wait_s
        self.trouble = ""
        """Why the run does not go on, in words; empty while it does."""
        self.alive_at = time.monotonic()
        """When it was last seen to go on."""

    async def until_over(self) -> str:
        """Wait for the end of the run; returns the reason to leave it, in words."""
        while True:
            looking = asyncio.create_task(self.look())
            try:
                reason = await self._reason_to_leave(looking)
            finally:
                looking.cancel()
                await asyncio.gather(looking, return_exceptions=True)
            if reason:
                return reason
            await asyncio.sleep(LOOK_S)

    async def _reason_to_leave(self, looking: "asyncio.Task[bool]") -> str:
        """Wait for one look; returns the reason to leave, or an empty string."""
        asked_at = time.monotonic()
        while True:
            # Not awaited without a limit: while Redis is away the look gets no answer, and its time counts.
            await asyncio.wait({looking}, timeout=LOOK_S)
            if looking.done() and looking.result():
                return "the run is finished"
            if not looking.done() and time.monotonic() - asked_at > SILENT_S:
                self.trouble = "its Redis has not answered"  # the connection logs that it waits
            if self.trouble and time.monotonic() - self.alive_at >= self.wait_s:
                return f"{self.trouble}, and that for {self.wait_s:g} s ({RESUME_WAIT_VARIABLE})"
            if looking.done():
                return ""

    async def look(self) -> bool:
        """Look once; returns whether the run is finished."""
        try:
            state = await read_state(self.broker, self.keys)
            # One that is continued for more steps stays `finished` until its trainer has begun.
            if state.get("status") == FINISHED and int(state.get("version", 0)) >= self.steps:
                return True
            trouble = await self._find_trouble(state)
        except BrokerError:
            # The worker's user in Redis may not read this: then its operator ends the process.
            trouble = ""
        if trouble and trouble != self.trouble:
            log.warning("waiting for the run to go on", why=trouble, at_most_s=self.wait_s)
        if self.trouble and not trouble:
            log.info("the run goes on", run=self.keys.run_id)
        if not trouble:
            self.alive_at = time.monotonic()
        self.trouble = trouble
        return False

    async def _find_trouble(self, state: Mapping[str, Any]) -> str:
        """Why the run does not go on, in words; empty while it does."""
        status = state.get("status")
        # A run that only scores has a field `kind`, and no trainer.
        only_scores = status == RUNNING and "kind" in state
        if status not in (RUNNING, FAILED, STOPPED) or only_scores or await self._has_trainer():
            return ""
        return f"the run is {status} and has no trainer"

    async def _has_trainer(self) -> bool:
        return any(beat.is_alive for beat in await read_heartbeats(self.broker, self.keys, (TRAINER,)))

"""The disk on which the containers of this node write: all of them share it, and one may fill it.

Guarantees: it is looked at once a second while sessions begin, so that what fails for want of room is known.
"""

import asyncio
import os
import time
from pathlib import Path

import structlog

from tidemill.services.rollout.containers.command import ContainerCommand, EngineAwayError

log = structlog.get_logger(__name__)

LOOK_S = 1.0
FULL_BYTES = 16 << 20
"""With less room than this for programs that are not root, writes of containers may have failed."""


class EngineDisk:
    def __init__(self, command: ContainerCommand) -> None:
        self.full_at = float("-inf")
        """When it was last seen full, in monotonic time."""
        self._command = command
        self._folder: Path | None = None
        self._watching: asyncio.Task[None] | None = None

    def __str__(self) -> str:
        return f"less than {FULL_BYTES >> 20} MiB are free in {self._folder}"

    async def is_full(self) -> bool:
        """Whether it is full now. From the first call on it is watched."""
        if self._watching is None:
            try:
                folder = await self._command.read_data_folder()
            except EngineAwayError:
                return False  # asked again when the next session begins
            if self._watching is None:  # sessions begin at the same time
                self._folder = folder
                self._watching = asyncio.create_task(self._watch(), name="disk of the containers")
        return self._look()

    async def close(self) -> None:
        """Watch it no longer."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait({self._watching})

    async def _watch(self) -> None:
        while True:
            self._look()
            await asyncio.sleep(LOOK_S)

    def _look(self) -> bool:
        if self._folder is None:
            return False
        try:
            disk = os.statvfs(self._folder)
        except FileNotFoundError:  # the engine is on another machine
            return False
        except OSError as error:
            log.warning("the disk of the containers cannot be looked at", error=str(error))
            return False
        is_full = disk.f_bavail * disk.f_frsize < FULL_BYTES
        if is_full:
            self.full_at = time.monotonic()
        return is_full

"""The disk on which the containers of this node write: all of them share it, and one may fill it.

Guarantees: it is looked at once a second while sessions begin, so that what fails for want of room is known.
Where it cannot be looked at, as with an engine on another machine, the log says so once, and sessions begin.
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
FULL_FILES = 1000
"""With room for fewer further files than this, too, where the file system has a number of them."""
ASK_AGAIN_S = 60.0
"""Time between questions to an engine that does not say where its data are."""


class EngineDisk:
    def __init__(self, command: ContainerCommand) -> None:
        self._command = command
        self._folder: Path | None = None
        self._watching: asyncio.Task[None] | None = None
        self._asking = asyncio.Lock()
        self._asked_at = float("-inf")
        self._full_at = float("-inf")
        """When it was last seen full, in monotonic time."""
        self._lack = ""
        """What it lacked then, as a sentence."""
        self._noted = ""
        """Why it cannot be looked at, as the log has it."""

    async def find_lack(self) -> str:
        """What it lacks now, as a sentence; empty where it has room. From the first call on it is watched."""
        async with self._asking:  # sessions begin at the same time
            if self._watching is None and time.monotonic() - self._asked_at >= ASK_AGAIN_S:
                await self._begin()
        return self._look()

    def find_lack_since(self, since: float) -> str:
        """What it lacked at a moment since `since`, in monotonic time; empty where it was not seen full."""
        self._look()
        return self._lack if self._full_at >= since else ""

    async def close(self) -> None:
        """Watch it no longer."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait({self._watching})

    async def _begin(self) -> None:
        try:
            self._folder = await self._command.read_data_folder()
        except EngineAwayError as error:
            # Not asked for each session: an engine may refuse this, or hang, and yet start containers.
            self._asked_at = time.monotonic()
            self._note(str(error))
            return
        self._watching = asyncio.create_task(self._watch(), name="disk of the containers")

    async def _watch(self) -> None:
        while True:
            self._look()
            await asyncio.sleep(LOOK_S)

    def _look(self) -> str:
        if self._folder is None:
            return ""
        try:
            disk = os.statvfs(self._folder)
        except FileNotFoundError:
            self._note(f"this machine has no {self._folder}: the engine is on another one")
            return ""
        except OSError as error:
            self._note(str(error))
            return ""
        lack = ""
        if disk.f_bavail * disk.f_frsize < FULL_BYTES:
            lack = f"less than {FULL_BYTES >> 20} MiB are free in {self._folder}"
        elif disk.f_files and disk.f_favail < FULL_FILES:  # btrfs has no number of files
            lack = f"fewer than {FULL_FILES} files can be made in {self._folder}"
        if lack:
            self._lack = lack
            self._full_at = time.monotonic()
        return lack

    def _note(self, reason: str) -> None:
        if reason != self._noted:
            self._noted = reason
            log.warning("the disk of the containers is not watched", reason=reason)

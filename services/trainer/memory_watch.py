"""Makes room in Redis before it is full, so that nobody waits for memory that trimming could free.

Guarantees: between two steps, beyond `CHECKPOINT_SHARE` of maxmemory, a checkpoint is taken and the streams
are trimmed to it. Beyond `FULL_SHARE`, at any time, older checkpoints are given up and the streams trimmed to
the newest one. What remains is needed; if that is too much, the log says what to change. Nothing is dropped.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog

from common import metrics
from common.service import ServiceContext
from services.trainer.checkpointing import Checkpointer

log = structlog.get_logger(__name__)

CHECKPOINT_SHARE = 0.7
"""Of maxmemory. A commit frees what its step has trained, so the rest has to hold what one step adds."""
FULL_SHARE = 0.9
"""Of maxmemory: writers are about to be refused."""
LOOK_EVERY_S = 2.0
SAY_EVERY_S = 30.0
HOLDS_WHAT_IS_NEEDED = (
    "Redis is full and holds only what is still needed; writers wait and nothing is lost. Raise its "
    "maxmemory (CONFIG SET maxmemory), or resume with a lower trainer.groups_per_step or "
    "trainer.max_staleness, or with streams.trim on"
)
WAITS_FOR_ARCHIVE = (
    "Redis is full, and what could be trimmed is not archived yet; writers wait and nothing is lost. If this "
    "does not pass by itself, look into the log of the jobs worker, free some room on the disk of the run's "
    "folder, or resume with streams.archive.enabled: false"
)


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """What Redis uses of what it may use."""

    used_bytes: int
    max_bytes: int

    @property
    def share(self) -> float:
        """Between 0 and 1, or a little more; 0 where there is no limit."""
        return self.used_bytes / self.max_bytes if self.max_bytes else 0.0


class MemoryWatch:
    """Looks at Redis's memory after each step, and every two seconds beside that."""

    def __init__(self, context: ServiceContext, checkpointer: Checkpointer) -> None:
        self.context, self.checkpointer = context, checkpointer
        self._said_at = float("-inf")

    async def after_step(self, save: Callable[[], Awaitable[None]]) -> bool:
        """Checkpoint with `save` and trim, where memory runs low; returns whether that was needed."""
        use = await self._use()
        if use.share < CHECKPOINT_SHARE or not self.context.config.streams.trim:
            return False
        log.warning(
            "Redis runs low on memory: checkpointing and trimming ahead of time", used=f"{use.share:.0%}"
        )
        await save()
        await self.checkpointer.keep_newest_only()
        return True

    async def watch(self) -> None:
        """Free what can be freed while others wait for memory; for ever."""
        while True:
            if (await self._use()).share > FULL_SHARE:
                await self._make_room()
            await asyncio.sleep(LOOK_EVERY_S)

    async def _make_room(self) -> None:
        if self.context.config.streams.trim:
            await self.checkpointer.keep_newest_only()
        use = await self._use()
        if use.share > FULL_SHARE and time.monotonic() - self._said_at > SAY_EVERY_S:
            self._said_at = time.monotonic()
            is_waiting = self.checkpointer.trimmer.is_waiting
            log.error(
                WAITS_FOR_ARCHIVE if is_waiting else HOLDS_WHAT_IS_NEEDED,
                used_bytes=use.used_bytes,
                maxmemory_bytes=use.max_bytes,
            )

    async def _use(self) -> MemoryUse:
        """As Redis itself counts it: buffers of the AOF and of replicas are beside the limit."""
        info = await self.context.broker.info("memory")
        counted = int(info["used_memory"]) - int(info.get("mem_not_counted_for_evict", 0))
        use = MemoryUse(counted, int(info["maxmemory"]))
        metrics.REDIS_MEMORY_SHARE.set(use.share)
        return use

"""Makes room in Redis before it is full, so that no process waits for memory that trimming could free.

Beyond `CHECKPOINT_SHARE` of maxmemory, between two steps, what may go is archived at once, in files of any
size. Without an archive, a checkpoint is taken and the streams are trimmed to it. Beyond `FULL_SHARE` that
is done at any time; without an archive, older checkpoints are given up and streams trimmed to the newest one.
What remains is needed; if that is too much, the log says what to change. It also says within seconds if Redis
may evict keys.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable

import structlog

from tidemill.common.process.service import ServiceContext
from tidemill.common.redis.broker import NO_EVICTION, MemoryUse
from tidemill.common.telemetry import metrics
from tidemill.services.trainer.durable.checkpointing import Checkpointer

log = structlog.get_logger(__name__)

CHECKPOINT_SHARE = 0.7
"""Share of maxmemory. A commit frees what its step has trained: the rest has to hold what one step adds."""
FULL_SHARE = 0.9
"""Share of maxmemory: writers are about to be refused."""
LOOK_EVERY_S = 2.0
SAY_EVERY_S = 30.0
HOLDS_WHAT_IS_NEEDED = (
    "Redis is full and holds only what is still needed; writers wait and nothing is lost. Raise its "
    "maxmemory (CONFIG SET maxmemory), or resume with a lower trainer.groups_per_step or "
    "trainer.max_staleness, or with streams.trim on"
)
WAITS_FOR_ARCHIVE = (
    "Redis is full, and what could be trimmed is not archived yet; writers wait and nothing is lost. If this "
    "does not pass by itself, look into the log of the trainer, free some room on the disk of the run's "
    "folder, or resume with streams.archive.enabled: false"
)
EVICTS = (
    "Redis may delete entries that this run needs: its maxmemory-policy was changed. Set it back now (CONFIG "
    "SET maxmemory-policy noeviction, and in redis.conf)"
)
HAS_EVICTED = (
    "Redis has deleted keys to make room: entries of this run may be lost. Set maxmemory-policy noeviction; "
    "if the run does not go on by itself, stop it and resume it, or restore Redis from its backup"
)


class MemoryWatch:
    """Checks Redis's memory after each step, and every two seconds beside the steps."""

    def __init__(self, context: ServiceContext, checkpointer: Checkpointer) -> None:
        self.context = context
        self.checkpointer = checkpointer
        self._said_full_at = float("-inf")
        self._said_eviction_at = float("-inf")
        self._num_evicted: int | None = None
        """Keys that the server had evicted at the last look; None before the first."""

    async def after_step(self, save: Callable[[], Awaitable[None]]) -> bool:
        """Trim where memory runs low. Without an archive a `save` comes first; returns whether it did."""
        use = await self._use()
        if use.share < CHECKPOINT_SHARE or not self.context.config.streams.trim:
            return False
        needs_save = not self.checkpointer.trimmer.archives
        log.warning("Redis runs low on memory: trimming ahead of time", used=f"{use.share:.0%}")
        if needs_save:
            await save()
        await self.checkpointer.keep_newest_only()
        return needs_save

    async def watch(self) -> None:
        """Free what can be freed while others wait for memory; for ever."""
        while True:
            use = await self._use()
            await self._watch_evictions(use.policy)
            if use.share > FULL_SHARE:
                await self._make_room()
            await asyncio.sleep(LOOK_EVERY_S)

    async def _watch_evictions(self, policy: str) -> None:
        """Log that Redis evicts keys, or may: the run's guarantees do not hold then."""
        total = int((await self.context.broker.info("stats")).get("evicted_keys", 0))
        before = self._num_evicted
        self._num_evicted = total
        if before is None:  # what was evicted before this process started is not reported
            before = total
        is_new_server = total < before  # which counts from 0
        num_new = total if is_new_server else total - before
        metrics.REDIS_MAY_EVICT.set(policy != NO_EVICTION)
        if num_new:
            metrics.REDIS_EVICTED_KEYS.inc(num_new)
            log.error(HAS_EVICTED, keys=num_new, policy=policy)
        elif policy != NO_EVICTION and time.monotonic() - self._said_eviction_at > SAY_EVERY_S:
            self._said_eviction_at = time.monotonic()
            log.error(EVICTS, policy=policy)

    async def _make_room(self) -> None:
        if self.context.config.streams.trim:
            await self.checkpointer.keep_newest_only()
        # Measured again: what was just trimmed may have been enough.
        use = await self._use()
        if (
            use.policy == NO_EVICTION
            and use.share > FULL_SHARE
            and time.monotonic() - self._said_full_at > SAY_EVERY_S
        ):
            self._said_full_at = time.monotonic()
            is_waiting = self.checkpointer.trimmer.is_waiting
            log.error(
                WAITS_FOR_ARCHIVE if is_waiting else HOLDS_WHAT_IS_NEEDED,
                used_bytes=use.used_bytes,
                maxmemory_bytes=use.max_bytes,
            )

    async def _use(self) -> MemoryUse:
        use = await self.context.broker.memory()
        metrics.REDIS_MEMORY_SHARE.set(use.share)
        return use

"""Follows the `weights` stream: the engine computes with the newest announced version.

Guarantees: versions only go up, unless the run itself went back: a trainer that was started after the one
whose version the engine holds stands at an older version, or at other weights of the same one, because Redis
and trainer have lost what came after. Bytes are verified before the engine sees them; `reach(v)` returns only
when the engine holds version `v` or a newer one, which is what keeps tickets from starting too early.

A delta is applied to what the engine holds, where its parent is that; all deltas since then are merged and
applied at once. A worker that holds anything else gets the full version before it and the deltas since. Where
an engine finds that it does not hold what the manifest says, it says so and gets the full version too.
"""

import asyncio
import random
import time

import structlog

from tidemill.common.errors import DamagedWeightsError, WeightsError, WeightsMismatchError
from tidemill.common.process.service import ServiceContext
from tidemill.common.streams import Entry, Garbled, OffsetReader, id_before, read_newest
from tidemill.common.telemetry import metrics
from tidemill.common.weights.remote import open_remote
from tidemill.common.wire.messages import WeightManifest
from tidemill.services.rollout.engines.engine import Engine, WeightUpdate
from tidemill.services.rollout.weight_versions import LocalVersions, WeightDownload, find_route

log = structlog.get_logger(__name__)

POLL_S = 3.0
"""Newer versions come at once; that the stream has become shorter is looked for so often."""
RETRY_S = 1.0
SPREAD_S_PER_GROUP, LONGEST_SPREAD_S = 0.001, 1.0
"""All workers hear of a version at once. They begin within so long for each group of a step (there are hardly
more workers than groups), so that a thousand do not ask the folder or the trainer's server in one moment."""
REPORT_AFTER = 3
"""Reads in a row that find a version damaged: fewer may be a file system that shows a file late."""
REPAIR_S = 60.0
"""The trainer hears of it and writes the version again within so long."""
GIVE_UP_LEASES = 2.0
"""For so many leases weights may be unreadable before the worker ends and others take its tickets."""


class WeightFollower:
    """Loads announced versions into one engine; `run` goes on until it is cancelled."""

    def __init__(self, context: ServiceContext, engine: Engine) -> None:
        """Raises ConfigError: the address of weights is of no known kind, or needs a library."""
        self.context, self.engine, run_id = context, engine, context.keys.run_id
        remote = open_remote(context.config.weights.url, run_id)
        self._versions = WeightDownload(remote, run_id) if remote else LocalVersions(context.run_dir)
        spread_s = SPREAD_S_PER_GROUP * context.config.trainer.groups_per_step
        self._spread_s = min(LONGEST_SPREAD_S, spread_s)
        self._arrived = asyncio.Condition()
        self.num_waiting = 0
        """Groups that wait for a version to arrive."""
        self._held: WeightManifest | None = None
        self.history = 0
        """Counts up when the engine leaves a history that is lost: what it generated until then is too."""
        self._failing_since: float | None = None
        self._num_damaged = 0
        self.damaged_version = -1
        """A version whose bytes are not those that were announced, which the trainer has to write again; -1
        without one."""
        self.last_update: WeightUpdate | None = None
        self.num_mismatches = 0
        """Updates after which the engine did not hold what the manifest says."""

    async def run(self) -> None:
        """Load the newest version whenever one is announced."""
        reader = OffsetReader(self.context.broker, self.context.keys.weights, WeightManifest)
        while True:
            read = await reader.read(block_s=POLL_S)
            entries = [entry for entry in read if isinstance(entry, Entry)]
            if read and isinstance(read[-1], Garbled):
                log.warning("an unexpected entry among the weights is skipped", entry=read[-1].entry_id)
            # Where nothing came, there may still be something to load: the stream may have become shorter.
            newest = entries[-1] if entries else await self._newest()
            if newest is None:
                continue
            if self._is_to_load(newest.message):
                await self._load(newest.message, reader)
            elif self._held is not None and newest.message.version == self.engine.version:
                self._held = newest.message  # the same weights, announced by another trainer

    async def reach(self, version: int) -> int:
        """Wait until the engine holds `version` or a newer one; returns the one it holds."""
        self.num_waiting += 1
        try:
            async with self._arrived:
                await self._arrived.wait_for(lambda: self.engine.version >= version)
                return self.engine.version
        finally:
            self.num_waiting -= 1

    def _is_to_load(self, manifest: WeightManifest) -> bool:
        """A newer version, the same one with other bytes, or any that a later trainer stands at."""
        held = self._held
        if manifest.version > self.engine.version or held is None:
            return manifest.version > self.engine.version
        if manifest.version < self.engine.version:
            return manifest.term > held.term
        return manifest.digest != held.digest

    async def _newest(self) -> Entry[WeightManifest] | None:
        return await read_newest(self.context.broker, self.context.keys.weights, WeightManifest)

    async def _load(self, manifest: WeightManifest, reader: OffsetReader[WeightManifest]) -> None:
        """Verify and load one version; a torn one is tried again unless a newer one is there."""
        # Of another trainer: then the weights held now may be no ancestor of these.
        is_other_history = self._held is not None and manifest.term != self._held.term
        self.history += is_other_history  # what ends from now on was begun with weights that are gone
        await asyncio.sleep(random.random() * self._spread_s)
        try:
            update = await self._update(manifest)
        except WeightsError as error:
            self._count_failure(manifest, error)
            newest = await self._newest()
            if newest and newest.message.version == manifest.version:
                reader.position = id_before(newest.entry_id)
                # Where a server failed, all workers failed at the same moment.
                await asyncio.sleep(RETRY_S * (0.5 + random.random()))
            return
        if is_other_history:
            log.warning(
                "left weights of a history that is lost", version=manifest.version, term=manifest.term
            )
            self.history += 1  # and what was begun while the new ones were loaded
        # Only now: `_held` is what later deltas build on, so it never names what the engine may not hold.
        self._failing_since, self._held, self.last_update = None, manifest, update
        self._num_damaged, self.damaged_version = 0, -1
        metrics.WEIGHT_LOAD_SECONDS.observe(update.load_s)
        metrics.WEIGHT_PAUSE_SECONDS.observe(update.paused_s)
        metrics.WEIGHT_DELAY_SECONDS.observe(max(0.0, time.time() - manifest.announced_at))
        metrics.ENGINE_VERSION.set(update.version)
        log.debug("weights loaded", version=update.version, load_s=update.load_s, paused_s=update.paused_s)
        # Last: who waits in `reach` starts to generate at once, with what was loaded.
        async with self._arrived:
            self._arrived.notify_all()

    async def _update(self, manifest: WeightManifest) -> WeightUpdate:
        """Bring the engine to a version, by deltas from what it holds where that is proven and possible."""
        held = self._held if self.engine.can_patch else None
        try:
            return await self._follow(manifest, held)
        except WeightsMismatchError as error:
            self.num_mismatches += 1
            metrics.WEIGHT_MISMATCHES.inc()
            log.error("the engine holds other weights", version=manifest.version, error=str(error))
        # The engine's own weights are in doubt: nothing that builds on them.
        self._held = None
        return await self._follow(manifest, None)

    async def _follow(self, manifest: WeightManifest, held: WeightManifest | None) -> WeightUpdate:
        route = await asyncio.to_thread(find_route, self._versions, manifest, held)
        return await self.engine.load(manifest.version, route.files, route.deltas, manifest.digest)

    def _count_failure(self, manifest: WeightManifest, error: WeightsError) -> None:
        """End this worker rather than hold tickets that it will never be able to start."""
        metrics.WEIGHT_FAILURES.inc()
        log.warning("weights cannot be used yet", version=manifest.version, error=str(error))
        self._num_damaged = self._num_damaged + 1 if isinstance(error, DamagedWeightsError) else 0
        self.damaged_version = manifest.version if self._num_damaged >= REPORT_AFTER else -1
        now = time.monotonic()
        self._failing_since = self._failing_since or now
        leases_s = GIVE_UP_LEASES * self.context.config.streams.lease_s
        if now - self._failing_since > max(leases_s, REPAIR_S if self._num_damaged else 0.0):
            raise error

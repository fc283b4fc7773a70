"""Writes a version again, in full, where rollout workers find its files damaged.

A damaged delta is refused by every worker that needs it, and tickets of later steps wait for that version: a
run would stand still. The weights are still here until the next update; later ones go out in full by then.
"""

import asyncio

import structlog

from tidemill.common.process.heartbeats import DAMAGED_VERSION, read_heartbeats
from tidemill.common.process.service import ServiceContext
from tidemill.common.wire.messages import WeightManifest
from tidemill.services.trainer.durable.disk_retry import until_stored
from tidemill.services.trainer.trainer import Trainer

log = structlog.get_logger(__name__)

LOOK_S = 5.0
DAMAGED = (
    "a rollout worker finds the files of a version damaged: it is written again in full, or the next one is. "
    "Look at the disk of the run's folder, and at the way from there to the worker"
)


class WeightRepair:
    """Repairs each version once at most: what is damaged again is not a matter of its files."""

    def __init__(self, context: ServiceContext, trainer: Trainer) -> None:
        self.context, self.trainer = context, trainer
        self._repaired = -1

    async def watch(self) -> None:
        """Look at what the workers report; for ever."""
        while True:
            await asyncio.sleep(LOOK_S)
            manifest = self.trainer.reconciler.manifest
            if manifest is not None and manifest.version > self._repaired:
                beats = await read_heartbeats(self.context.broker, self.context.keys, ("rollout",))
                workers = [one.name for one in beats if one.counts.get(DAMAGED_VERSION) == manifest.version]
                if workers:
                    self._repair(manifest, workers[0])

    def _repair(self, manifest: WeightManifest, worker: str) -> None:
        """Begin, where the trainer still stands at that version. Nothing is awaited here: from one look to
        the next a step may go on."""
        trainer = self.trainer
        version = manifest.version
        is_current = trainer.trained_version == trainer.version == version
        if not (is_current and trainer.reconciler.manifest is manifest and trainer.weights_work.is_done):
            return
        self._repaired = version
        trainer.outputs.weights.distrust()
        has_moved = trainer.runner.has_begun
        log.error(DAMAGED, version=version, worker=worker, written_in_full=version + has_moved)
        if not has_moved:
            # The policy's thread takes calls in order: this comes before the update that moves the weights.
            trainer.weights_work.follow(self._write_again(manifest), f"version {version}, again")

    async def _write_again(self, manifest: WeightManifest) -> None:
        weights, runner = self.trainer.outputs.weights, self.trainer.runner

        async def write() -> WeightManifest:
            begun = await runner.thread.call(weights.begin_again, manifest, runner.policy)
            runner.thread.release()
            return await asyncio.to_thread(weights.finish, begun)

        written = await until_stored(self.context, write, self.trainer.weights_work.during)
        self.trainer.reconciler.change_manifest(written)
        await self.trainer.reconciler.announce()

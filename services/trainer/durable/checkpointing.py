"""Saves checkpoints, and has what the streams no longer need trimmed after each.

Without an archive, an entry is trimmed only when no whole checkpoint on the disk needs it, and not before
there are `keep_checkpoints` of them; checkpoints of earlier processes count too. A checkpoint counts when it
has its name, which may be some steps after its state was taken: until then the ones before it do. Commits are
in the journal as well; the newest of them, and of the dead letters, stay in Redis for people who watch.
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

import structlog
from prometheus_client import Histogram

from tidemill.common.archive import stream_folder
from tidemill.common.archive.manifest import note_needed
from tidemill.common.process.service import ServiceContext, StoppedError
from tidemill.common.run.journal import journal_steps
from tidemill.common.streams import START, Trail, entry_id_of, id_after, id_order, read_raw
from tidemill.common.streams.log import KEPT_COMMITS, newest_begin
from tidemill.common.telemetry import metrics
from tidemill.common.wire.keys import StreamName
from tidemill.services.trainer.batch.batch_assembler import Dropped
from tidemill.services.trainer.batch.reconciler import RunStreams
from tidemill.services.trainer.batch.stream_join import DEAD, SCORES, STREAMS, TRAJECTORIES
from tidemill.services.trainer.durable.archived_history import ALIGNED
from tidemill.services.trainer.durable.checkpoint import CheckpointStore, TrainerState
from tidemill.services.trainer.durable.trimming import Trimmer
from tidemill.services.trainer.durable.waiting import BackgroundWork, on_disk, until_stored
from tidemill.services.trainer.metrics.recorder import Recorder
from tidemill.services.trainer.step import StepRunner

log = structlog.get_logger(__name__)

CHECKPOINT = "checkpoint"
"""The activity while a checkpoint is copied or waited for."""


class Checkpointer:
    """Takes the state of the trainer's parts between two steps."""

    def __init__(
        self,
        context: ServiceContext,
        store: CheckpointStore,
        runner: StepRunner,
        streams: RunStreams,
        recorder: Recorder,
        trimmer: Trimmer,
    ) -> None:
        self.context = context
        self.store = store
        self.runner = runner
        self.streams = streams
        self.recorder = recorder
        self.trimmer = trimmer
        self._epochs: dict[int, int] = {}
        """For each checkpoint of this process, by version, the epoch that its positions are valid in."""
        self._changing = asyncio.Lock()
        """Held while the folder of checkpoints changes."""
        self._writing = BackgroundWork(context, CHECKPOINT)
        self.seconds: dict[str, float] = {}
        """Seconds of the newest checkpoint: `wait` for the one before, `copy`, `write` (beside training)."""

    async def save(self, version: int, dropped: Sequence[Dropped]) -> None:
        """`begin`, and wait until the checkpoint is durable and what it frees is trimmed."""
        await self.begin(version, dropped)
        await self.finish()

    async def begin(self, version: int, dropped: Sequence[Dropped]) -> None:
        """Take the state of `version`, between two steps, and start to write it; then trim what no kept
        checkpoint needs. Waits for the one before. `dropped` is what the next commit has to report."""
        with self._timed("wait", metrics.CHECKPOINT_WAIT_SECONDS):
            # The policy has room for one copy of its state, which the write before still reads.
            await self.finish()
        with self.context.activity.during(CHECKPOINT), self._timed("copy", metrics.CHECKPOINT_COPY_SECONDS):
            # Positions and weights of one moment: the next step moves both.
            state = self._state(version, dropped)
            # Also where another process has the GPU now: the policy waits in host memory then.
            await self.runner.thread.call_anywhere(self.runner.policy.stage_state)
        self._writing.start(self._write(state), f"checkpoint of version {version}")

    async def finish(self) -> None:
        """Wait until what is being written is durable. Raises StoppedError: it could not be written."""
        await self._writing.finish(to_the_end=True)

    async def close(self) -> None:
        """After an error of the trainer: wait for a write in progress, but not for a disk that refuses it."""
        if self._writing.is_pending:
            # A write to a full disk is tried until the service stops: that would be for ever.
            self.context.stopping.set()
            with suppress(StoppedError):
                await self.finish()

    @contextmanager
    def _timed(self, name: str, histogram: Histogram) -> Iterator[None]:
        started_at = time.monotonic()
        yield
        self.seconds[name] = time.monotonic() - started_at
        histogram.observe(self.seconds[name])

    def _state(self, version: int, dropped: Sequence[Dropped]) -> TrainerState:
        """The state of all parts at one moment; it does not change with them."""
        scheduler = self.streams.scheduler
        join = self.streams.join
        # No await in here: meanwhile a reader could move positions away from tickets and epoch.
        self._epochs[version] = join.epoch
        return TrainerState(
            version=version,
            positions=join.positions(),
            scheduler=scheduler.state(),
            intake=join.state() | {"dropped": [list(item) for item in dropped]},
            data=scheduler.prompts.state(scheduler.next_ticket),
        )

    async def keep_newest_only(self) -> None:
        """Archive at once what may then be trimmed; without an archive, remove all checkpoints but the newest
        whole one, and trim what only they needed."""
        if not self.store.kept:
            return await self.trimmer.release({}, self.trimmer.epoch, is_urgent=True)
        if self.trimmer.archives:
            return await self._trim(self.store.kept[0], is_urgent=True)
        async with self._changing:
            if len(self.store.kept) > 1:
                if not await self.context.outside.run(self.store.keep_newest_only):
                    return
                kept = self.store.kept[0].version
                log.warning("gave up older checkpoints to make room in Redis", kept=kept)
            await self._trim(self.store.kept[0], is_urgent=True)

    async def trim_settled(self, version: int) -> None:
        """Between two steps: trim what no outstanding group needs, as far as it is archived."""
        join = self.streams.join
        epoch = self.trimmer.epoch
        # Not while a checkpoint is due for what Redis has lost, and by positions of this epoch only.
        is_sure = join.epoch == epoch and not self.streams.reconciler.needs_checkpoint
        if self.context.config.streams.trim and self.trimmer.archives and is_sure:
            positions = join.positions()
            scheduler = self.streams.scheduler
            below = {
                TRAJECTORIES: positions[TRAJECTORIES],
                SCORES: positions[SCORES],
                StreamName.PROMPTS: entry_id_of(min(scheduler.outstanding, default=scheduler.next_ticket)),
                StreamName.COMMITS: entry_id_of(max(0, version - KEPT_COMMITS)),
            }
            # As Redis loses the newest first, a server that has this trim has the commits before it.
            await self.trimmer.release(below, epoch)

    async def _write(self, state: TrainerState) -> None:
        async with self._changing:
            with self._timed("write", metrics.CHECKPOINT_SECONDS):
                write = partial(self.context.outside.run, self._store, state)
                await until_stored(self.context, write, self._writing.during)
            # Only now, when the rename is on the disk: what is trimmed cannot be read by an older checkpoint.
            await self._trim_to_kept()

    def _store(self, state: TrainerState) -> None:
        """Runs in a thread of its own; the policy's thread only begins to write."""
        thread = self.runner.thread
        policy = self.runner.policy
        # Before the checkpoint: a trainer that restores it does not train these steps again, nor record them.
        self.recorder.sync()
        self.store.save(state, lambda folder: thread.submit(policy.begin_saving, folder).result().result())

    async def _trim_to_kept(self) -> None:
        """Trim what the checkpoints that are there now do not need."""
        kept = self.store.kept
        # With fewer whole ones, a restart may have to replay the run from its start: nothing is trimmed yet.
        oldest = kept[0] if len(kept) == self.store.keep else None
        if self.trimmer.archives:
            # Retention leaves what a restart from the oldest kept checkpoint would replay, or from the start.
            for stream, last in settled_positions(oldest).items():
                folder = stream_folder(self.context.run_dir, stream)
                await on_disk(self.context, note_needed, folder, id_after(last))
        if oldest is not None:
            self.trimmer.first_ticket = _first_open_ticket(oldest)
            if self.context.config.streams.trim:
                await self._trim(oldest)
            await self.trimmer.collect_claims()
        await self.trimmer.departed.forget()

    async def _trim(self, oldest: TrainerState, is_urgent: bool = False) -> None:
        """Remove entries below the positions of the oldest checkpoint that could be restored."""
        # Before the positions: if another server takes over meanwhile, the trimmer refuses this epoch.
        epoch = self.trimmer.epoch
        positions = await self._positions(oldest, epoch)
        keep_from = max(0, oldest.version - self.context.config.trainer.keep_weights)
        below = {
            TRAJECTORIES: positions[TRAJECTORIES],
            SCORES: positions[SCORES],
            StreamName.PROMPTS: entry_id_of(_first_open_ticket(oldest)),
            StreamName.WEIGHTS: entry_id_of(keep_from),
        }
        dead = positions.get(DEAD, START)
        if not self.trimmer.archives:
            below[StreamName.COMMITS] = await self._journalled(oldest.version - KEPT_COMMITS)
            dead = min(dead, await newest_begin(self.context.broker, self.context.keys.dead), key=id_order)
        below[DEAD] = dead
        await self.trimmer.release(below, epoch, is_urgent)

    async def _journalled(self, wanted: int) -> str:
        """The id of step `wanted`, where the journal holds all that Redis has below it; `START` where not:
        after damage it may begin later."""
        held = await self.context.outside.run(journal_steps, self.context.run_dir)
        first = await read_raw(self.context.broker, self.context.keys.commits, count=1)
        is_held = bool(first) and id_order(entry_id_of(held.start)) <= id_order(first[0][0])
        return entry_id_of(wanted) if is_held and 0 < wanted <= held.stop else START

    async def _positions(self, state: TrainerState, epoch: int) -> dict[StreamName, str]:
        """Where this checkpoint would begin to read: below its positions if Redis has lost its tail since."""
        # Taken by this process, and no other server has answered since: ids stand for the same entries.
        if self._epochs.get(state.version) == epoch:
            return state.positions
        positions = dict(state.positions)
        trails = state.intake["trails"]
        for stream in STREAMS:
            key = stream.key(self.context.keys)
            trail = Trail(trails.get(stream))
            standing = await trail.last_standing(self.context.broker, key)
            positions[stream] = min(positions.get(stream, START), standing, key=id_order)
        return positions


def settled_positions(state: TrainerState | None) -> dict[StreamName, str]:
    """Up to these ids, a run that continues from a checkpoint (or from its start) replays nothing."""
    if state is None:
        return dict.fromkeys(ALIGNED, START)
    return {
        StreamName.PROMPTS: entry_id_of(_first_open_ticket(state) - 1),
        TRAJECTORIES: state.positions[TRAJECTORIES],
        SCORES: state.positions[SCORES],
        StreamName.COMMITS: entry_id_of(state.version - 1),
    }


def _first_open_ticket(state: TrainerState) -> int:
    """The lowest ticket that was not settled at the checkpoint."""
    outstanding = [item[0] for item in state.scheduler["outstanding"]]
    return int(min(outstanding, default=state.scheduler["next_ticket"]))

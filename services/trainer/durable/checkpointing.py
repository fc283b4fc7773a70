"""Saves checkpoints, and trims the streams.

Where the run archives, what no outstanding group needs goes as soon as it is archived and its step committed:
a restart replays it from the archive. Dead letters go below the oldest kept checkpoint. Without
an archive all does: an entry goes only when every whole checkpoint on the disk can do without it, and not
before there are `keep_checkpoints` of them; checkpoints of earlier processes count too. A checkpoint counts
when it has its name, which may be some steps after its state was taken: until then the ones before it do.
Commits are in the journal as well, and the newest stay for people who watch, as the newest dead letters do.
"""

import asyncio
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial

import structlog
from prometheus_client import Histogram

from tidemill.common.archive import stream_folder
from tidemill.common.archive.manifest import Manifest, note_needed, note_trim
from tidemill.common.errors import ArchiveError
from tidemill.common.files import StorageError
from tidemill.common.history.journal import journal_steps
from tidemill.common.process.service import ServiceContext, StoppedError
from tidemill.common.streams import (
    START,
    Mark,
    MarkLostError,
    Trail,
    entry_id_of,
    id_after,
    id_before,
    id_order,
    read_raw,
    trim_before,
)
from tidemill.common.streams.log import KEPT_COMMITS, newest_begin
from tidemill.common.streams.selection import StreamName
from tidemill.common.telemetry import metrics
from tidemill.common.wire.keys import ROLLOUT_GROUP
from tidemill.services.trainer.batch.batch_assembler import Dropped
from tidemill.services.trainer.batch.reconciler import TRIMMING, Reconciler, RunStreams
from tidemill.services.trainer.batch.stream_join import DEAD, SCORES, TRAJECTORIES
from tidemill.services.trainer.durable.archive_requests import ArchiveJobs
from tidemill.services.trainer.durable.archived_history import ALIGNED, ArchivedHistory
from tidemill.services.trainer.durable.background_work import BackgroundWork
from tidemill.services.trainer.durable.checkpoint import CheckpointStore, TrainerState
from tidemill.services.trainer.durable.claim_files import ClaimFiles
from tidemill.services.trainer.durable.departed import Departed
from tidemill.services.trainer.durable.disk_retry import on_disk, until_stored
from tidemill.services.trainer.metrics.recorder import Recorder
from tidemill.services.trainer.step import StepRunner

log = structlog.get_logger(__name__)

CHECKPOINT = "checkpoint"
"""The activity while a checkpoint is copied or waited for."""


class Trimmer:
    """Trims unneeded entries; archived ones only, if archiving is on.

    What may go is decided by the ids of one epoch (`Reconciler.epoch`), and goes in that one only: another
    server may have given these ids to other entries.
    """

    def __init__(self, context: ServiceContext, reconciler: Reconciler | None = None) -> None:
        self.context, self.reconciler = context, reconciler
        self.archives = context.config.streams.archive.enabled
        self.archived = ArchivedHistory(context)
        self.jobs, self.claims = ArchiveJobs(context, self._trim_archived), ClaimFiles(context)
        self._below: dict[StreamName, str] = {}
        """Entries below these ids may go, and some are still there."""
        self._decided_in = self._aligned_in = 0
        self._changing = asyncio.Lock()

    @property
    def epoch(self) -> int:
        """That of the ids which are looked up now."""
        return self.reconciler.epoch if self.reconciler else 0

    async def release(self, below: Mapping[StreamName, str], epoch: int, is_urgent: bool = False) -> None:
        """Trim what lies below these ids of an epoch, now or when it is archived. `is_urgent`: memory runs
        low."""
        if epoch != self._decided_in:
            self._below.clear()
            self._decided_in = epoch
        for stream, entry_id in below.items():
            known = self._below.get(stream, START)
            self._below[stream] = max(entry_id, known, key=id_order)
        await self.trim()
        if self._below:
            await self.jobs.ask({stream: id_before(end) for stream, end in self._below.items()}, is_urgent)

    async def trim(self) -> int:
        """Trim as far as that is allowed by now; returns how many entries went."""
        removed = 0
        async with self._changing:
            mark = await self._mark() if self._below else None
            if self._below and not await self._is_aligned():
                return 0  # the next step, or the archiver that writes just now, calls again
            for stream, wanted in list(self._below.items()):
                allowed = await asyncio.to_thread(self._allowed, stream)
                first = wanted if allowed is None else min(wanted, allowed, key=id_order)
                broker, key = self.context.broker, stream.key(self.context.keys)
                tickets = (ROLLOUT_GROUP, self.context.keys.progress_prefix)
                if allowed is not None and first != START:
                    await on_disk(self.context, note_trim, stream_folder(self.context.run_dir, stream), first)
                try:
                    held = tickets if stream is StreamName.PROMPTS else ()
                    removed += await trim_before(broker, key, first, mark, held)
                except MarkLostError:
                    self._below.clear()
                    break
                if first == wanted or not await read_raw(broker, key, last=id_before(wanted), count=1):
                    self._below.pop(stream, None)
        if removed:
            log.debug("streams trimmed", entries=removed)
        return removed

    async def _trim_archived(self) -> None:
        """As the archiver gets on, which may be long after the checkpoint that asked for it."""
        if await self.trim():
            await self.claims.collect()

    async def _mark(self) -> Mark | None:
        # First the mark, then the question which epoch this is. The other way round, Redis could restart in
        # between, and the mark would stand on a server that the ids are not of.
        if self.reconciler is None:
            return None
        mark = await self.reconciler.mark(TRIMMING)
        await self.reconciler.check_server()
        if self.epoch != self._decided_in:
            self._below.clear()  # the next checkpoint will tell what may go
        return mark

    async def _is_aligned(self) -> bool:
        """Whether the archive is a beginning of what this server holds. Another one may have lost entries,
        and given their ids to others: those would pass for archived."""
        if self.archives and self._aligned_in != self._decided_in:
            try:
                if await self.archived.align():
                    self._aligned_in = self._decided_in
            except (ArchiveError, StorageError) as error:
                log.error("nothing is trimmed: the archive cannot be held against Redis", problem=str(error))
        return not self.archives or self._aligned_in == self._decided_in

    @property
    def is_waiting(self) -> bool:
        """Whether something may go that is not archived yet."""
        return bool(self._below)

    async def close(self) -> None:
        """Ask for nothing any more."""
        await self.jobs.close()

    def _allowed(self, stream: StreamName) -> str | None:
        """Entries below this id are archived; None where nothing has to be."""
        if not self.archives:
            return None
        try:
            last_id = Manifest.load(stream_folder(self.context.run_dir, stream)).last_id
        except ArchiveError as error:
            log.error("nothing is trimmed: the archive's manifest is damaged", problem=str(error))
            return START
        return START if last_id == START else id_after(last_id)


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
        version: int,
    ) -> None:
        """`version` is that of the checkpoint which was restored, 0 where there was none."""
        self.context, self.store, self.runner = context, store, runner
        self.streams, self.recorder, self.trimmer = streams, recorder, trimmer
        # Those above the restored one are not whole; the store removes them when it saves.
        known = [state for state in store.states() if state.version <= version]
        self._kept: deque[TrainerState] = deque(known, maxlen=context.config.trainer.keep_checkpoints)
        self._epochs: dict[int, int] = {}
        """Per version of a checkpoint of this process, the epoch that its positions are valid in."""
        self._departed = Departed(context)
        self._changing = asyncio.Lock()
        """Held while the folder of checkpoints changes."""
        self._writing = BackgroundWork(context, CHECKPOINT)
        self.seconds: dict[str, float] = {}
        """What the newest checkpoint took: `wait` for the one before, `copy`, and beside training `write`."""

    async def save(self, version: int, dropped: Sequence[Dropped]) -> None:
        """`begin`, and wait until the checkpoint is durable and what it frees is trimmed."""
        await self.begin(version, dropped)
        await self.finish()

    async def begin(self, version: int, dropped: Sequence[Dropped]) -> None:
        """Take the state of `version`, between two steps, and start to write it; then trim what no kept
        checkpoint needs. Waits for the one before. `dropped` is what the next commit will have to tell."""
        with self._timed("wait", metrics.CHECKPOINT_WAIT_SECONDS):
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
        """Where the trainer ends with an error: let a write end, and wait for no disk that refuses it."""
        if self._writing.is_pending:
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
        """Of all parts at one moment: nothing in it moves on with them."""
        scheduler, join = self.streams.scheduler, self.streams.join
        trails = {stream: [list(rung) for rung in rungs] for stream, rungs in join.trails().items()}
        self._epochs[version] = join.epoch
        return TrainerState(
            version=version,
            positions=join.positions(),
            scheduler=scheduler.state(),
            intake={
                "high_water": join.high_water(),
                "trails": trails,
                "dropped": [list(item) for item in dropped],
            },
            data=scheduler.prompts.state(scheduler.next_ticket),
            counters={"trajectories": join.num_trajectories},
        )

    async def keep_newest_only(self) -> None:
        """Have what may go archived at once; without an archive, give up all checkpoints but the newest whole
        one, and trim what only they needed."""
        if not self._kept:
            return await self.trimmer.release({}, self.trimmer.epoch, is_urgent=True)
        if self.trimmer.archives:
            return await self._trim(self._kept[0], is_urgent=True)
        async with self._changing:
            newest = self._kept[-1]
            if len(self._kept) > 1:
                if not await asyncio.to_thread(self.store.keep_only, newest.version):
                    return
                self._kept = deque([newest], self._kept.maxlen)
                log.warning("gave up older checkpoints to make room in Redis", kept=newest.version)
            await self._trim(newest, is_urgent=True)

    async def trim_settled(self, version: int) -> None:
        """Between two steps: trim what no outstanding group needs, as far as it is archived.

        Not while a checkpoint is due for what Redis has lost, and by positions of this epoch only. As Redis
        loses the newest first, a server that has this trim has the commits before it.
        """
        join, epoch = self.streams.join, self.trimmer.epoch
        is_sure = join.epoch == epoch and not self.streams.reconciler.needs_checkpoint
        if self.context.config.streams.trim and self.trimmer.archives and is_sure:
            positions, scheduler = join.positions(), self.streams.scheduler
            below = {
                StreamName.TRAJECTORIES: positions[TRAJECTORIES],
                StreamName.SCORES: positions[SCORES],
                StreamName.PROMPTS: entry_id_of(min(scheduler.outstanding, default=scheduler.next_ticket)),
                StreamName.COMMITS: entry_id_of(max(0, version - KEPT_COMMITS)),
            }
            await self.trimmer.release(below, epoch)

    async def _write(self, state: TrainerState) -> None:
        async with self._changing:
            with self._timed("write", metrics.CHECKPOINT_SECONDS):
                write = partial(asyncio.to_thread, self._store, state)
                await until_stored(self.context, write, self._writing.during)
            # Only now, when the rename is on the disk: what is trimmed cannot be read by an older checkpoint.
            await self._trim_to_kept()

    def _store(self, state: TrainerState) -> None:
        """In a thread of its own: the policy's is asked to begin, and goes on."""
        thread, policy = self.runner.thread, self.runner.policy
        # Before the checkpoint: a trainer that restores it does not train these steps again, nor record them.
        self.recorder.sync()
        self.store.save(state, lambda folder: thread.submit(policy.begin_saving, folder).result().result())

    async def _trim_to_kept(self) -> None:
        """Trim what the checkpoints that are there now do not need."""
        self._kept.clear()
        self._kept.extend(self.store.kept)
        if self.trimmer.archives:
            await self._note_needed(self._kept[0] if len(self._kept) == self._kept.maxlen else None)
        if len(self._kept) == self._kept.maxlen:
            self.trimmer.claims.first_ticket = _first_open_ticket(self._kept[0])
            if self.context.config.streams.trim:
                await self._trim(self._kept[0])
            await self.trimmer.claims.collect()
        await self._departed.forget()

    async def _trim(self, oldest: TrainerState, is_urgent: bool = False) -> None:
        """Remove entries below the positions of the oldest checkpoint that could be restored."""
        epoch = self.trimmer.epoch
        positions = await self._positions(oldest, epoch)
        keep_from = max(0, oldest.version - self.context.config.trainer.keep_weights)
        below = {
            StreamName.TRAJECTORIES: positions[TRAJECTORIES],
            StreamName.SCORES: positions[SCORES],
            StreamName.PROMPTS: entry_id_of(_first_open_ticket(oldest)),
            StreamName.WEIGHTS: entry_id_of(keep_from),
        }
        dead = positions.get(DEAD, START)
        if not self.trimmer.archives:
            below[StreamName.COMMITS] = await self._journalled(oldest.version - KEPT_COMMITS)
            dead = min(dead, await newest_begin(self.context.broker, self.context.keys.dead), key=id_order)
        below[StreamName.DEAD] = dead
        await self.trimmer.release(below, epoch, is_urgent)

    async def _journalled(self, wanted: int) -> str:
        """The id of step `wanted`, where the journal holds all that Redis has below it; `START` where not:
        after damage it may begin later."""
        held = await asyncio.to_thread(journal_steps, self.context.run_dir)
        first = await read_raw(self.context.broker, self.context.keys.commits, count=1)
        is_held = bool(first) and id_order(entry_id_of(held.start)) <= id_order(first[0][0])
        return entry_id_of(wanted) if is_held and 0 < wanted <= held.stop else START

    async def _positions(self, state: TrainerState, epoch: int) -> dict[str, str]:
        """From where this checkpoint would read: below its positions, where Redis has lost its tail since."""
        if self._epochs.get(state.version) == epoch:
            return state.positions
        positions, trails = dict(state.positions), state.intake["trails"]
        for stream in (StreamName.TRAJECTORIES, StreamName.SCORES, StreamName.DEAD):
            key, trail = stream.key(self.context.keys), Trail(trails.get(stream))
            standing = await trail.last_standing(self.context.broker, key)
            positions[stream] = min(positions.get(stream, START), standing, key=id_order)
        return positions

    async def _note_needed(self, oldest: TrainerState | None) -> None:
        """Retention leaves what a restart from the oldest kept checkpoint would replay, or from the start."""
        needed = settled_positions(oldest)
        for stream, last in needed.items():
            folder = stream_folder(self.context.run_dir, stream)
            await on_disk(self.context, note_needed, folder, id_after(last))


def settled_positions(state: TrainerState | None) -> dict[StreamName, str]:
    """Up to these ids, a run that continues from a checkpoint (or from its start) replays nothing."""
    if state is None:
        return dict.fromkeys(ALIGNED, START)
    first_ticket = _first_open_ticket(state)
    return {
        StreamName.PROMPTS: entry_id_of(first_ticket - 1) if first_ticket else START,
        StreamName.TRAJECTORIES: state.positions[TRAJECTORIES],
        StreamName.SCORES: state.positions[SCORES],
        StreamName.COMMITS: entry_id_of(state.version - 1) if state.version else START,
    }


def _first_open_ticket(state: TrainerState) -> int:
    """All below it were settled then."""
    outstanding = [item[0] for item in state.scheduler["outstanding"]]
    return int(min(outstanding, default=state.scheduler["next_ticket"]))

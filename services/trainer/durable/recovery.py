"""Recovery: restores the last checkpoint, and takes over what came after it. `retraining.py` replays commits.

The order of a restart, with its numbers, is in docs/architecture.md ("The order of recovery"); `service.py`
calls the parts. Each one can fail, and leaves all that the next start needs.
"""

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial

import structlog

from tidemill.common.command_line import command_line
from tidemill.common.errors import ArchiveError, TidemillError
from tidemill.common.process.service import ServiceContext, StoppedError
from tidemill.common.wire.keys import StreamName
from tidemill.common.wire.messages import Commit
from tidemill.services.trainer.batch.batch_assembler import Dropped
from tidemill.services.trainer.batch.reconciler import RunStreams
from tidemill.services.trainer.durable.archived_history import ArchivedHistory
from tidemill.services.trainer.durable.checkpoint import CheckpointStore, NoneWholeError, TrainerState
from tidemill.services.trainer.durable.checkpointing import settled_positions
from tidemill.services.trainer.durable.commits import CommitJournal, read_commits, restore_commits
from tidemill.services.trainer.durable.waiting import on_disk, until_stored
from tidemill.services.trainer.metrics.recorder import Recorder
from tidemill.services.trainer.step import StepRunner

log = structlog.get_logger(__name__)

PAUSE_S = 0.2


class Replayer:
    """Trains committed steps again, after a crash: `take_over`, start the readers, `replay`."""

    def __init__(
        self, context: ServiceContext, runner: StepRunner, streams: RunStreams, journal: CommitJournal
    ) -> None:
        self.context = context
        self.runner = runner
        self.streams = streams
        self.journal = journal
        self.version = 0
        """The run's version: that of the checkpoint, plus the commits after it."""
        self.archived = ArchivedHistory(context)
        self._positions: Mapping[StreamName, str] = {}
        """Where a replay begins to read: looked up before the readers move on."""
        self.scheduler = streams.scheduler
        self.join = streams.join
        self.reconciler = streams.reconciler
        self.pending_drops: list[Dropped] = []
        """Replacements that no commit has reported yet: the next one must."""
        self.skipped: list[int] = []
        """Outstanding tickets that no worker will ever be given: they have to be replaced."""

    async def take_over(self, store: CheckpointStore) -> list[Commit]:
        """Restore the newest checkpoint, and take in what an earlier process did after it: its commits, which
        are returned, and the tickets it issued (parts 2 to 7).

        Raises:
            TidemillError: there are commits that cannot be replayed. Nothing was trained yet.
        """
        try:
            state = await self.runner.thread.call(self._restore_checkpoint, store)
        except NoneWholeError as error:
            # Every commit can be replayed from the starting model.
            if not await self.archived.begins_at_start():
                raise
            log.error("no checkpoint is whole; replaying the run from its start", problem=str(error))
            state = None
        version = state.version if state else 0
        needed = settled_positions(state)
        # Which server answers is noted before anything is read from it: a later restart is noticed then.
        await self.reconciler.take_restart()
        self.join.epoch = self.reconciler.epoch
        await self.reconciler.mark()
        await self.reconciler.remove_unexpected()
        await until_stored(self.context, partial(self._align, needed))
        if state is None and not self.journal.steps and await self.archived.is_empty():
            return []  # the run begins: there is neither a commit nor a ticket to take over
        await self._restore_commits(version)
        history = self.archived.read()
        commits = await read_commits(history, version)
        if commits:
            problems = await self.archived.missing(needed)
            if problems:
                raise TidemillError(
                    f"steps {commits[0].step} to {commits[-1].step} came after the checkpoint and have to be "
                    "trained again, but what they were trained on is not all there:\n  "
                    + "\n  ".join(problems)
                    + f"\nNothing was changed. Restore {self.archived.folder} from its backup, then start "
                    "again; without one, start a new run from the last version's weights "
                    f"(`{command_line('export')}`)."
                )
            # Before the readers move on, and while the archive and Redis are known to fit each other.
            self._positions = await self.join.standing_positions()
        for commit in commits:
            # To append what the journal holds would cut off the commits behind it, perhaps their only copy.
            if not self.journal.has(commit):
                await on_disk(self.context, self.journal.append, commit)
            # Before the tickets are adopted: a curriculum has drawn them from the outcomes of these steps.
            self.scheduler.prompts.take_commit(commit)
        # Only now, after everything that can fail and that an operator could repair with the old journal.
        await on_disk(self.context, self.journal.cut, version + len(commits))
        adopted = await self.scheduler.adopt_issued(history)
        self.join.expect(self.scheduler.outstanding.values())
        reported = {ticket for commit in commits for ticket, index, _ in commit.dropped if index == -1}
        # After the tickets: adopting one notes what it replaced as unreported, even if a commit reported it.
        self.scheduler.prompts.forget_reported(reported)
        dropped = state.intake["dropped"] if state else []
        unreported = [(ticket, index, reason) for ticket, index, reason in dropped]
        for ticket in [ticket.replaces for ticket in adopted if ticket.replaces >= 0]:
            # Open at the checkpoint and replaced after it: what still arrives for it must complete no group.
            self.join.close(ticket)
            unreported.append((ticket, -1, "replaced before a restart"))
        self.pending_drops = [item for item in unreported if item[0] not in reported]
        trained = {ticket for commit in commits for ticket in commit.groups}
        self.skipped = [t for t in await self.scheduler.find_skipped() if t not in trained]
        self.version = version + len(commits)
        return commits

    def _restore_checkpoint(self, store: CheckpointStore) -> TrainerState | None:
        """Put every part into the state of the newest whole checkpoint; None where there is none. Raises
        NoneWholeError: all are damaged; nothing was changed."""
        checkpoint = store.load_latest()
        if checkpoint is None:
            return None
        state = checkpoint.state
        # Prompts first: the tickets of the state are made from them.
        self.scheduler.prompts.restore(state.data)
        self.scheduler.restore(state.scheduler)
        self.join.restore(state.positions, state.intake)
        self.join.expect(self.scheduler.outstanding.values())
        self.runner.policy.load_state(checkpoint.folder)
        log.info("checkpoint restored", version=state.version)
        return state

    async def _restore_commits(self, version: int) -> None:
        """Give Redis back the commits that the checkpoint of `version` covers."""
        broker = self.context.broker
        keys = self.context.keys
        first = self.journal.steps.stop
        if first < version:  # it is damaged: Redis may have the missing ones
            try:
                missing = await read_commits(self.archived.read(), first)
            except TidemillError as error:
                log.error("the run's history has a hole, which the journal cannot fill", problem=str(error))
                missing = []
            for commit in missing:
                if commit.step < version:
                    await on_disk(self.context, self.journal.append, commit)
        is_trimmed = self.context.config.streams.trims_commits
        await restore_commits(broker, keys, self.journal, version, is_trimmed=is_trimmed)

    async def _align(self, needed: Mapping[StreamName, str]) -> None:
        """Have the archive forget what Redis has lost above the checkpoint, once its writer, which takes
        seconds, has released it. Raises StoppedError: the service must stop first."""
        try:
            while not await self.archived.align(needed):
                if await self.context.unless_stopping(asyncio.sleep(PAUSE_S, result=True)) is None:
                    raise StoppedError
        except ArchiveError as error:
            log.error("the archive cannot be held against Redis", problem=str(error))

    async def replay(self, commits: Sequence[Commit], recorder: Recorder) -> None:
        """Train every commit again. Raises StoppedError: the service must stop; nothing was changed."""
        if not commits:
            return
        from tidemill.services.trainer.durable.retraining import Retrainer

        retrainer = Retrainer(self.context, self.runner, self.streams)
        await retrainer.train(commits, self.archived.read(), self._positions, recorder)

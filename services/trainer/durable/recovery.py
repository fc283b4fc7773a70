"""Back to where the run was: the last checkpoint, then the commits after it, replayed from the streams.

Replaying takes the recorded groups in the recorded micro-batches, so on the same hardware in deterministic
mode the weights come out bit by bit; the digest in each commit proves it, and a difference is said.
"""

import asyncio
from base64 import b64decode
from collections.abc import Callable, Sequence
from functools import partial

import structlog

from common.errors import TidemillError
from common.process.service import ServiceContext
from common.redis.broker import Broker
from common.streams import entry_id_of, read_raw
from common.telemetry import metrics
from common.wire import codec
from common.wire.keys import Keys
from common.wire.messages import Commit
from services.trainer.batch.batch_assembler import QUIET_S, Dropped, StoppedError
from services.trainer.batch.reconciler import Reconciler
from services.trainer.batch.scheduler import Scheduler
from services.trainer.batch.stream_join import Intake
from services.trainer.durable.checkpoint import CheckpointStore, NoneWholeError
from services.trainer.durable.commits import read_commits
from services.trainer.durable.disk_retry import until_stored
from services.trainer.groups.group_filter import CompleteGroup
from services.trainer.metrics.recorder import Recorder
from services.trainer.metrics.step_metrics import step_metrics
from services.trainer.policy.policy import Policy, PolicyThread
from services.trainer.replay.comparison import check_replay
from services.trainer.step import StepRunner

log = structlog.get_logger(__name__)

GIVE_UP_S = 60.0
"""Where it cannot be told that all was read: after this long without news a committed group is lost."""


async def begins_at_start(broker: Broker, keys: Keys) -> bool:
    """Whether the streams go back to the first ticket and the first commit, so that nothing was trimmed."""
    firsts = [await read_raw(broker, key, count=1) for key in (keys.prompts(), keys.commits)]
    return all(found and found[0][0] == entry_id_of(0) for found in firsts)


def restore_checkpoint(
    store: CheckpointStore,
    policy: Policy,
    scheduler: Scheduler,
    intake: Intake,
    reconciler: Reconciler,
    can_start_over: bool = False,
) -> tuple[int, list[Dropped]]:
    """Put every part into the state of the newest whole checkpoint.

    Returns its version (0 where there is none), and the dropped groups that the next commit must tell of.
    Where all are damaged and `can_start_over`, that is the starting model: every commit is replayed.

    Raises:
        CheckpointError: there are checkpoints, but none to continue from.
    """
    try:
        checkpoint = store.load_latest()
    except NoneWholeError as error:
        if not can_start_over:
            raise
        log.error("no checkpoint is whole; replaying the run from its start", problem=str(error))
        checkpoint = None
    if checkpoint is None:
        return 0, []
    state = checkpoint.state
    scheduler.prompts.check_fingerprint(state.data["fingerprint"])
    scheduler.restore(state.scheduler)
    intake.restore(state.positions, state.intake["high_water"], state.intake.get("trails", {}))
    intake.num_trajectories = int(state.counters["trajectories"])
    intake.expect(list(scheduler.outstanding.values()))
    for text in state.commits:  # of an older release, which kept no journal
        commit = codec.decode_payload(b64decode(text), Commit)
        if commit.step not in reconciler.journal.steps:
            reconciler.journal.append(commit)
    policy.load_state(checkpoint.folder)
    log.info("checkpoint restored", version=state.version)
    return state.version, [(ticket, index, reason) for ticket, index, reason in state.intake["dropped"]]


class Replayer:
    """Trains committed steps again, after a crash: `adopt`, start the readers, `replay`."""

    def __init__(
        self,
        context: ServiceContext,
        policy: Policy,
        thread: PolicyThread,
        runner: StepRunner,
        scheduler: Scheduler,
        intake: Intake,
        reconciler: Reconciler,
    ) -> None:
        self.context, self.policy, self.thread, self.runner = context, policy, thread, runner
        self.scheduler, self.intake, self.reconciler = scheduler, intake, reconciler
        self.pending_drops: list[Dropped] = []
        """Replacements that no commit tells of yet: the next one must."""

    async def adopt(self, version: int, dropped: list[Dropped]) -> list[Commit]:
        """Take in what an earlier process did after `version`: the tickets it issued, and its commits.

        Before the readers start, which do not keep what belongs to no outstanding ticket.
        """
        await self.reconciler.has_restarted()
        await self.reconciler.move_strays_aside()
        await self._restore_commits(version)
        adopted = await self.scheduler.adopt_issued()
        self.intake.expect(list(self.scheduler.outstanding.values()))
        commits = await read_commits(self.context.broker, self.context.keys, version)
        for commit in commits:
            await self._keep(commit)
        told = {ticket for commit in commits for ticket, index, _ in commit.dropped if index == -1}
        replaced = [ticket.replaces for ticket in adopted if ticket.replaces >= 0]
        for ticket in replaced:
            self.intake.close(ticket)
        untold = [*dropped, *((ticket, -1, "replaced before a restart") for ticket in replaced)]
        self.pending_drops = [item for item in untold if item[0] not in told]
        return commits

    async def _restore_commits(self, version: int) -> None:
        """Give Redis back the commits that the checkpoint of `version` covers.

        Those above it that only the journal has are forgotten: the records they were trained on may be gone.
        """
        journal, broker, keys = self.reconciler.journal, self.context.broker, self.context.keys
        await self._store(partial(journal.cut, version))
        if journal.next_step < version:  # of an older release, or damaged: Redis may have them all
            try:
                known = await read_commits(broker, keys, journal.next_step)
            except TidemillError as error:
                log.error("the run's history has a hole, which the journal cannot fill", problem=str(error))
                known = []
            for commit in known:
                if commit.step < version:
                    await self._keep(commit)
        await self.reconciler.restore_commits(below=version)

    async def _keep(self, commit: Commit) -> None:
        await self._store(partial(self.reconciler.journal.append, commit))

    async def _store(self, write: Callable[[], None]) -> None:
        await until_stored(self.context, partial(asyncio.to_thread, write))

    async def replay(self, commits: Sequence[Commit], recorder: Recorder) -> None:
        """Train every commit again.

        Raises:
            StoppedError: the service must stop; nothing was changed.
        """
        for commit in commits:
            await self._replay_one(commit)
            record = partial(recorder.step, commit.step, commit.metrics)
            await until_stored(self.context, partial(asyncio.to_thread, record))

    async def _replay_one(self, commit: Commit) -> None:
        with self.context.activity.during("recover", f"replaying step {commit.step}"):
            groups = await self._gather(commit)
            result = await self.runner.replay(commit, groups)
            now = step_metrics(commit.step, result, 0, 0.0)
            context = self.context
            await self.thread.call(check_replay, self.policy, commit, now, context.config, context.run_dir)
        metrics.REPLAYED_STEPS.inc()
        for ticket in commit.groups:
            self.scheduler.settle(ticket)
            self.intake.close(ticket)

    async def _gather(self, commit: Commit) -> dict[int, CompleteGroup]:
        """Wait until the streams have delivered every group of the commit."""
        quiet_s = 0.0
        while missing := [t for t in commit.groups if t not in self.intake.complete]:
            has_news = await self.context.unless_stopping(self.intake.wait(QUIET_S))
            if has_news is None:
                raise StoppedError
            quiet_s = 0.0 if has_news else quiet_s + QUIET_S
            if quiet_s > GIVE_UP_S or (not has_news and await self.intake.has_read_all()):
                raise TidemillError(
                    f"step {commit.step} was committed, but the streams hold no complete group for "
                    f"{len(missing)} of its tickets (first: {missing[0]}). Restore Redis from its backup, "
                    "or continue from a later checkpoint."
                )
        return {ticket: self.intake.groups[ticket].complete() for ticket in commit.groups}

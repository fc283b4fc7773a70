"""Back to where the run was: the last checkpoint, then the commits after it, replayed from the streams.

Replaying takes the recorded groups in the recorded micro-batches, so on the same hardware in deterministic
mode the weights come out bit by bit; the digest in each commit proves it, and a difference is said.
"""

import structlog

from common.errors import TidemillError
from common.messages import Commit
from common.service import ServiceContext
from services.trainer.checkpoint import CheckpointStore
from services.trainer.collector import QUIET_S, StoppedError
from services.trainer.commits import read_commits
from services.trainer.intake import Intake
from services.trainer.judgement import CompleteGroup
from services.trainer.policy import Policy
from services.trainer.reconciler import Reconciler
from services.trainer.recorder import Recorder
from services.trainer.scheduler import Scheduler
from services.trainer.step import PolicyThread, StepRunner

log = structlog.get_logger(__name__)

GIVE_UP_S = 60.0
"""A committed group that the streams have not delivered after this long without news is lost."""


def restore_checkpoint(store: CheckpointStore, policy: Policy, scheduler: Scheduler, intake: Intake) -> int:
    """Put every part into the state of the newest whole checkpoint; returns its version (0: none)."""
    checkpoint = store.load_latest()
    if checkpoint is None:
        return 0
    state = checkpoint.state
    scheduler.prompts.check_fingerprint(state.data["fingerprint"])
    scheduler.restore(state.scheduler)
    intake.restore(state.positions, state.intake["high_water"])
    intake.num_trajectories = int(state.counters["trajectories"])
    intake.expect(list(scheduler.outstanding.values()))
    policy.load_state(checkpoint.folder)
    log.info("checkpoint restored", version=state.version)
    return state.version


class Replayer:
    """Trains committed steps again, after a crash."""

    def __init__(
        self,
        context: ServiceContext,
        policy: Policy,
        thread: PolicyThread,
        runner: StepRunner,
        scheduler: Scheduler,
        intake: Intake,
        reconciler: Reconciler,
        recorder: Recorder,
    ) -> None:
        self.context, self.policy, self.thread, self.runner = context, policy, thread, runner
        self.scheduler, self.intake, self.reconciler = scheduler, intake, reconciler
        self.recorder = recorder
        self.pending_drops: list[tuple[int, int, str]] = []
        """Replacements that no commit tells of yet: the next one must."""

    async def replay(self, version: int) -> int:
        """Adopt tickets and replay commits from `version` on; returns the version reached."""
        adopted = await self.scheduler.adopt_issued()
        self.intake.expect(list(self.scheduler.outstanding.values()))
        commits = await read_commits(self.context.broker, self.context.keys, version)
        told = {ticket for commit in commits for ticket, index, _ in commit.dropped if index == -1}
        for ticket in adopted:
            if ticket.replaces >= 0:
                self.intake.close(ticket.replaces)
                if ticket.replaces not in told:
                    self.pending_drops.append((ticket.replaces, -1, "replaced before a restart"))
        for commit in commits:
            await self._replay_one(commit)
            version = commit.version
        return version

    async def _replay_one(self, commit: Commit) -> None:
        with self.context.activity.during("recover", f"replaying step {commit.step}"):
            groups = await self._gather(commit)
            await self.runner.replay(commit, groups)
            digest = await self.thread.call(self.policy.digest)
        if digest == commit.digest:
            log.info("step replayed, same weights", step=commit.step)
        else:
            log.warning("step replayed, but the weights differ", step=commit.step, digest=digest)
        for ticket in commit.groups:
            self.scheduler.settle(ticket)
            self.intake.close(ticket)
        self.recorder.step(commit.step, commit.metrics)
        self.reconciler.commits.append(commit)

    async def _gather(self, commit: Commit) -> dict[int, CompleteGroup]:
        """Wait until the streams have delivered every group of the commit."""
        quiet_s = 0.0
        while missing := [t for t in commit.groups if t not in self.intake.complete]:
            has_news = await self.context.unless_stopping(self.intake.wait(QUIET_S))
            if has_news is None:
                raise StoppedError
            quiet_s = 0.0 if has_news else quiet_s + QUIET_S
            if quiet_s > GIVE_UP_S:
                raise TidemillError(
                    f"step {commit.step} was committed, but the streams hold no complete group for "
                    f"{len(missing)} of its tickets (first: {missing[0]}). Restore Redis from its backup, "
                    "or continue from a later checkpoint."
                )
        return {ticket: self.intake.groups[ticket].complete() for ticket in commit.groups}

"""Back to where the run was: the last checkpoint, then the commits after it, replayed from the streams.

Replaying takes the recorded groups in the recorded micro-batches, so on the same hardware in deterministic
mode the weights come out bit by bit. The digest in each commit shows it; a difference is logged.
"""

from base64 import b64decode
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import structlog
import torch
from safetensors import SafetensorError, safe_open

from tidemill.common.config import RunConfig
from tidemill.common.errors import TidemillError, WeightsError
from tidemill.common.process.service import ServiceContext, StoppedError
from tidemill.common.redis.broker import Broker
from tidemill.common.run.weight_files import WEIGHTS_FOLDER, read_manifest, version_name
from tidemill.common.streams import entry_id_of, read_raw
from tidemill.common.telemetry import metrics
from tidemill.common.wire import codec
from tidemill.common.wire.keys import Keys
from tidemill.common.wire.messages import Commit
from tidemill.services.trainer.batch.batch_assembler import QUIET_S, Dropped
from tidemill.services.trainer.batch.reconciler import RunStreams
from tidemill.services.trainer.durable.checkpoint import CheckpointStore, NoneWholeError
from tidemill.services.trainer.durable.checkpointing import on_disk
from tidemill.services.trainer.durable.commits import CommitJournal, read_commits, restore_commits
from tidemill.services.trainer.groups.group_filter import CompleteGroup
from tidemill.services.trainer.metrics.recorder import Recorder
from tidemill.services.trainer.metrics.step_metrics import step_metrics
from tidemill.services.trainer.policy.model_loading import pick_device
from tidemill.services.trainer.policy.policy import Policy
from tidemill.services.trainer.step import StepRunner
from tidemill.services.trainer.weights.store import WEIGHTS_FILE

log = structlog.get_logger(__name__)

GIVE_UP_S = 60.0
"""Where it cannot be told that all was read: after this long without news a committed group is lost."""
COMPARED_METRICS = ("loss", "grad_norm", "entropy")


async def begins_at_start(broker: Broker, keys: Keys) -> bool:
    """Whether the streams go back to the first ticket and the first commit, so that nothing was trimmed."""
    firsts = [await read_raw(broker, key, count=1) for key in (keys.prompts(), keys.commits)]
    return all(found and found[0][0] == entry_id_of(0) for found in firsts)


def restore_checkpoint(
    store: CheckpointStore,
    policy: Policy,
    streams: RunStreams,
    journal: CommitJournal,
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
    state, scheduler, join = checkpoint.state, streams.scheduler, streams.join
    scheduler.prompts.restore(state.data)
    scheduler.restore(state.scheduler)
    join.restore(state.positions, state.intake["high_water"], state.intake.get("trails", {}))
    join.num_trajectories = int(state.counters["trajectories"])
    join.expect(list(scheduler.outstanding.values()))
    for text in state.commits:  # of an older release, which kept no journal
        commit = codec.decode_payload(b64decode(text), Commit)
        if commit.step not in journal.steps:
            journal.append(commit)
    policy.load_state(checkpoint.folder)
    log.info("checkpoint restored", version=state.version)
    return state.version, [(ticket, index, reason) for ticket, index, reason in state.intake["dropped"]]


class Replayer:
    """Trains committed steps again, after a crash: `adopt`, start the readers, `replay`."""

    def __init__(
        self, context: ServiceContext, runner: StepRunner, streams: RunStreams, journal: CommitJournal
    ) -> None:
        self.context, self.runner, self.journal = context, runner, journal
        self.scheduler, self.join, self.reconciler = streams.scheduler, streams.join, streams.reconciler
        self.pending_drops: list[Dropped] = []
        """Replacements that no commit tells of yet: the next one must."""
        self.passed_over: list[int] = []
        """Outstanding tickets that no worker will ever be given: they have to be replaced."""

    async def adopt(self, version: int, dropped: list[Dropped]) -> list[Commit]:
        """Take in what an earlier process did after `version`: the tickets it issued, and its commits. Before
        the readers start, which do not keep what belongs to no outstanding ticket."""
        await self.reconciler.has_restarted()
        await self.reconciler.mark()
        await self.reconciler.move_strays_aside()
        await self._restore_commits(version)
        commits = await read_commits(self.context.broker, self.context.keys, version)
        for commit in commits:
            await on_disk(self.context, self.journal.append, commit)
            # A curriculum has drawn the tickets that are adopted now from what these steps came to.
            self.scheduler.prompts.take_commit(commit)
        adopted = await self.scheduler.adopt_issued()
        self.join.expect(list(self.scheduler.outstanding.values()))
        told = {ticket for commit in commits for ticket, index, _ in commit.dropped if index == -1}
        self.scheduler.prompts.forget_told(told)
        replaced = [ticket.replaces for ticket in adopted if ticket.replaces >= 0]
        for ticket in replaced:
            self.join.close(ticket)
        untold = [*dropped, *((ticket, -1, "replaced before a restart") for ticket in replaced)]
        self.pending_drops = [item for item in untold if item[0] not in told]
        trained = {ticket for commit in commits for ticket in commit.groups}
        self.passed_over = [t for t in await self.scheduler.passed_over() if t not in trained]
        return commits

    async def _restore_commits(self, version: int) -> None:
        """Give Redis back the commits that the checkpoint of `version` covers. Those above it that only the
        journal has are forgotten: the records they were trained on may be gone."""
        broker, keys = self.context.broker, self.context.keys
        await on_disk(self.context, self.journal.cut, version)
        if self.journal.next_step < version:  # of an older release, or damaged: Redis may have them all
            try:
                known = await read_commits(broker, keys, self.journal.next_step)
            except TidemillError as error:
                log.error("the run's history has a hole, which the journal cannot fill", problem=str(error))
                known = []
            for commit in known:
                if commit.step < version:
                    await on_disk(self.context, self.journal.append, commit)
        await restore_commits(broker, keys, self.journal, below=version)

    async def replay(self, commits: Sequence[Commit], recorder: Recorder) -> None:
        """Train every commit again. Raises StoppedError: the service must stop; nothing was changed."""
        for commit in commits:
            await self._replay_one(commit)
            await on_disk(self.context, recorder.step, commit.step, commit.metrics)

    async def _replay_one(self, commit: Commit) -> None:
        context, runner = self.context, self.runner
        with context.activity.during("recover", f"replaying step {commit.step}"):
            groups = await self._gather(commit)
            result = await runner.replay(commit, groups)
            now = step_metrics(commit.step, result, 0, 0.0)
            await runner.thread.call(
                check_replay, runner.policy, commit, now, context.config, context.run_dir
            )
        metrics.REPLAYED_STEPS.inc()
        for ticket in commit.groups:
            self.scheduler.settle(ticket)
            self.join.close(ticket)

    async def _gather(self, commit: Commit) -> dict[int, CompleteGroup]:
        """Wait until the streams have delivered every group of the commit."""
        quiet_s = 0.0
        while missing := [t for t in commit.groups if t not in self.join.complete]:
            has_news = await self.context.unless_stopping(self.join.wait(QUIET_S))
            if has_news is None:
                raise StoppedError
            quiet_s = 0.0 if has_news else quiet_s + QUIET_S
            if quiet_s > GIVE_UP_S or (not has_news and await self.join.has_read_all()):
                raise TidemillError(
                    f"step {commit.step} was committed, but the streams hold no complete group for "
                    f"{len(missing)} of its tickets (first: {missing[0]}). Restore Redis from its backup, "
                    "or continue from a later checkpoint."
                )
        return {ticket: self.join.groups[ticket].complete() for ticket in commit.groups}


def check_replay(
    policy: Policy, commit: Commit, metrics: dict[str, float], config: RunConfig, run_dir: Path
) -> bool:
    """Hold the policy's weights against the commit's digest; returns whether they are the same. `metrics` are
    those of the replay. Runs in the policy's thread."""
    digest = policy.digest()
    if digest == commit.digest:
        log.info("step replayed, same weights", step=commit.step)
        return True
    size = weight_difference(policy, run_dir, commit) or metric_difference(commit.metrics, metrics)
    is_promised = config.trainer.deterministic and pick_device(config.trainer.device).type == "cpu"
    say = log.error if is_promised else log.warning
    say(
        "step replayed, but the weights differ",
        step=commit.step,
        digest=digest,
        committed=commit.digest,
        **(size or {"size": "unknown: neither its weights nor its metrics can be compared"}),
    )
    return False


def weight_difference(policy: Policy, run_dir: Path, commit: Commit) -> dict[str, Any] | None:
    """Greatest and mean absolute difference to the commit's weights on the disk; None without them. In the
    dtype in which they were written, so that a difference too small for it shows as 0."""
    path = run_dir / WEIGHTS_FOLDER / version_name(commit.version) / WEIGHTS_FILE
    greatest, total, count = 0.0, 0.0, 0
    unlike: list[str] = []
    try:
        manifest = read_manifest(run_dir, commit.version)
        if manifest is None or manifest.digest != commit.digest:
            return None  # a training that was replayed has written this version since
        with safe_open(path, framework="pt") as stored:
            names = set(stored.keys())
            # To the end in any case: where the policy is sharded, its other ranks take part in every tensor.
            for name, tensor in policy.named_parameters_for_export():
                if name not in names or stored.get_slice(name).get_shape() != list(tensor.shape):
                    unlike.append(name)
                    continue
                own, other = tensor.detach().to("cpu", torch.float64), stored.get_tensor(name)
                apart = (own - other.to(torch.float64)).abs()
                greatest = max(greatest, float(apart.max())) if apart.numel() else greatest
                total, count = total + float(apart.sum()), count + apart.numel()
    except (OSError, SafetensorError, WeightsError):
        return None
    if unlike:
        return {"size": f"not comparable: {path} has no {unlike[0]} of the same shape"}
    return {"max_abs_difference": greatest, "mean_abs_difference": total / max(count, 1)}


def metric_difference(committed: dict[str, float], replayed: dict[str, float]) -> dict[str, Any] | None:
    """How loss, gradient norm and entropy came out then and now; None where the commit tells of none."""
    names = [name for name in COMPARED_METRICS if name in committed and name in replayed]
    return {name: f"{committed[name]:.9g} then, {replayed[name]:.9g} now" for name in names} or None

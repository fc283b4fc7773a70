"""Recovery: restores the last checkpoint, and replays the commits after it from archive and streams.

Replaying takes the recorded groups in the recorded micro-batches, so on the same hardware in deterministic
mode the weights come out bit by bit. The digest in each commit shows it; a difference is logged.

The order of a restart, with its numbers, is in docs/architecture.md ("The order of recovery"); `service.py`
calls the parts. Each one can fail, and leaves all that the next start needs.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import structlog
import torch
from safetensors import SafetensorError, safe_open

from tidemill.common.command_line import command_line
from tidemill.common.config import RunConfig
from tidemill.common.errors import ArchiveError, TidemillError, WeightsError
from tidemill.common.files import StorageError, aside_folder
from tidemill.common.history import GroupCursor, History, MissingRecordsError, StreamName
from tidemill.common.process.service import ServiceContext, StoppedError
from tidemill.common.run.weight_files import read_chain, read_manifest, verified_files
from tidemill.common.telemetry import metrics
from tidemill.common.weights.delta import write_whole
from tidemill.common.wire.messages import Commit, fault_of
from tidemill.services.trainer.batch.batch_assembler import Dropped
from tidemill.services.trainer.batch.reconciler import RunStreams
from tidemill.services.trainer.durable.archived_history import ArchivedHistory
from tidemill.services.trainer.durable.checkpoint import CheckpointStore, NoneWholeError, TrainerState
from tidemill.services.trainer.durable.checkpointing import settled_positions
from tidemill.services.trainer.durable.commits import CommitJournal, read_commits, restore_commits
from tidemill.services.trainer.durable.waiting import on_disk, until_stored
from tidemill.services.trainer.groups.group import Group
from tidemill.services.trainer.groups.group_filter import GREEDY
from tidemill.services.trainer.metrics.recorder import Recorder
from tidemill.services.trainer.metrics.step_metrics import step_metrics
from tidemill.services.trainer.policy.model_loading import pick_device
from tidemill.services.trainer.policy.policy import Policy
from tidemill.services.trainer.step import StepRunner, check_processor, samples_digest

log = structlog.get_logger(__name__)

PAUSE_S = 0.2


class LostPayloadError(TidemillError):
    """A sample that a committed step was trained on is in the streams, but the payload that it claims is
    lost."""


class OtherSamplesError(TidemillError):
    """The streams have the groups of a committed step, with other tokens or rewards than were trained."""


class Replayer:
    """Trains committed steps again, after a crash: `take_over`, start the readers, `replay`."""

    def __init__(
        self, context: ServiceContext, runner: StepRunner, streams: RunStreams, journal: CommitJournal
    ) -> None:
        self.context = context
        self.runner = runner
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
        can_start_over = await self.archived.begins_at_start()
        state = await self.runner.thread.call(self._restore_checkpoint, store, can_start_over)
        version = state.version if state else 0
        needed = settled_positions(state)
        # Which server answers is noted before anything is read from it: a later restart is noticed then.
        await self.reconciler.take_restart()
        self.join.epoch = self.reconciler.epoch
        await self.reconciler.mark()
        await self.reconciler.remove_unexpected()
        await until_stored(self.context, partial(self._align, needed))
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

    def _restore_checkpoint(self, store: CheckpointStore, can_start_over: bool) -> TrainerState | None:
        """Put every part into the state of the newest whole checkpoint; None where there is none. Where all
        are damaged and `can_start_over`, every commit is replayed from the starting model."""
        try:
            checkpoint = store.load_latest()
        except NoneWholeError as error:
            if not can_start_over:
                raise
            log.error("no checkpoint is whole; replaying the run from its start", problem=str(error))
            checkpoint = None
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
        tickets = frozenset(ticket for commit in commits for ticket in commit.groups)
        history = self.archived.read()
        config = self.context.config
        async with open_cursor(history, config, self._positions, tickets.__contains__) as cursor:
            for commit in commits:
                if self.context.stopping.is_set():
                    raise StoppedError
                with self.context.activity.during("recover", f"replaying step {commit.step}"):
                    await self._replay_one(commit, cursor)
                metrics.REPLAYED_STEPS.inc()
                for ticket in commit.groups:
                    self.scheduler.settle(ticket)
                    self.join.close(ticket)
                await on_disk(self.context, recorder.step, commit.step, commit.metrics)

    async def _replay_one(self, commit: Commit, cursor: GroupCursor) -> None:
        # Before its records are read: pictures would have other numbers of tokens.
        check_processor(commit, self.runner.policy)
        try:
            # Their payloads may be in a store that is down: wait for it, unless the service must stop.
            groups = await self.context.unless_stopping(pending_groups(cursor, commit))
        except (MissingRecordsError, OtherSamplesError) as error:
            raise TidemillError(
                f"step {commit.step} was committed, but {error}. Restore Redis, and the run's archive, from "
                "their backup, or continue from a later checkpoint."
            ) from None
        if groups is None:
            raise StoppedError
        result = await self.runner.replay(commit, groups)
        numbers = step_metrics(commit.step, result, 0, 0.0)
        await self.runner.thread.call(self._check_weights, commit, numbers)
        # A step holds a shared GPU until its version is being written, and nothing is written here.
        self.runner.thread.release()

    def _check_weights(self, commit: Commit, numbers: dict[str, float]) -> None:
        """Compare the policy's weights with the commit's digest; `numbers` are the metrics of the replay."""
        policy = self.runner.policy
        config = self.context.config.trainer
        digest = policy.digest()
        if digest == commit.digest:
            log.info("step replayed, same weights", step=commit.step)
            return
        names = {"loss", "grad_norm", "entropy"} & commit.metrics.keys() & numbers.keys()
        size = weight_difference(policy, self.context.run_dir, commit) or {
            name: f"{commit.metrics[name]:.9g} then, {numbers[name]:.9g} now" for name in sorted(names)
        }
        # GPUs of another kind add in another order, also in deterministic mode: that is no error.
        is_promised = config.deterministic and pick_device(config.device).type == "cpu"
        say = log.error if is_promised else log.warning
        say(
            "step replayed, but the weights differ",
            step=commit.step,
            digest=digest,
            committed=commit.digest,
            **(size or {"size": "unknown: neither its weights nor its metrics can be compared"}),
        )


def open_cursor(
    history: History,
    config: RunConfig,
    positions: Mapping[StreamName, str] | None = None,
    is_wanted: Callable[[int], bool] = lambda _: True,
) -> GroupCursor:
    """A reader of groups, from these positions or from the start of the streams."""
    history.claims.reads_choices = True
    if config.images is not None and history.run_dir is not None:
        from tidemill.services.trainer.groups.pictures import watch_pictures

        watch_pictures(history.claims, config, history.run_dir)
    most = (2 + config.trainer.max_staleness) * config.trainer.groups_per_step
    return GroupCursor(history, config.largest_group_size, most, positions, is_wanted)


async def pending_groups(cursor: GroupCursor, commit: Commit) -> dict[int, Group]:
    """The groups that a committed step was trained on, from the archive and from Redis behind it.

    Raises:
        MissingRecordsError: they are not all there.
        LostPayloadError: a sample has lost its tokens.
        OtherSamplesError: the tokens or rewards are not those that were trained.
    """
    recorded = await cursor.groups(commit.groups)
    was_left_out = {(ticket, index) for ticket, index, reason in commit.dropped if reason != GREEDY}
    for group in recorded.values():
        for index, trajectory in group.trajectories.items():
            fault = fault_of(trajectory)
            if fault and (group.ticket, index) not in was_left_out:
                raise LostPayloadError(
                    f"step {commit.step} was committed and has to be trained again, but the sample "
                    f"{trajectory.key} of it has lost its tokens: {fault}. Put that payload back from a "
                    "backup, with the same bytes, then start again; without one, start a new run from the "
                    f"last version's weights (`{command_line('export')}`)."
                )
    cursor.close(commit.groups)
    groups = {
        ticket: Group(ticket, commit.step, group.trajectories, group.scores)
        for ticket, group in recorded.items()
    }
    if commit.samples_digest and commit.samples_digest != samples_digest(commit.trained_keys, groups):
        raise OtherSamplesError(
            "the streams hold other samples of its groups than it was trained on: Redis has lost those, and "
            "workers have generated the groups again"
        )
    return groups


def weight_difference(policy: Policy, run_dir: Path, commit: Commit) -> dict[str, Any] | None:
    """Greatest and mean absolute difference to the commit's weights on the disk; None without them. In the
    dtype in which they were written: a difference that is too small for it counts as 0."""
    try:
        manifest = read_manifest(run_dir, commit.version)
        # Behind the `+` is what is trained and not published, which the manifest's digest does not cover.
        if manifest is None or manifest.digest != commit.digest.partition("+")[0]:
            return None  # not written yet, or a replay with other weights has written this version since
        files = [verified_files(run_dir, link) for link in read_chain(run_dir, manifest)]
        base = files[0]
        deltas = files[1:]
        if not deltas:
            return _difference_to(policy, base[0])
        with aside_folder(run_dir / "replayed", "weights to compare with") as folder:
            return _difference_to(policy, write_whole(base, deltas, folder)[0])
    except (OSError, SafetensorError, StorageError, WeightsError):
        return None


def _difference_to(policy: Policy, path: Path) -> dict[str, Any]:
    greatest = 0.0
    total = 0.0
    count = 0
    unlike: list[str] = []
    with safe_open(path, framework="pt") as stored:
        names = set(stored.keys())
        # To the end in any case: where the policy is sharded, its other ranks take part in every tensor.
        for name, tensor in policy.named_parameters_for_export():
            if name not in names or stored.get_slice(name).get_shape() != list(tensor.shape):
                unlike.append(name)
                continue
            # In float64: bfloat16 would round the differences, and float32 sums of millions of them.
            weights = tensor.detach().to("cpu", torch.float64)
            published = stored.get_tensor(name)
            apart = (weights - published.to(torch.float64)).abs()
            greatest = max(greatest, float(apart.max())) if apart.numel() else greatest
            total += float(apart.sum())
            count += apart.numel()
    if unlike:
        return {"size": f"not comparable: {path} has no {unlike[0]} of the same shape"}
    return {"max_abs_difference": greatest, "mean_abs_difference": total / max(count, 1)}

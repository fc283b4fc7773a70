"""Trains committed steps again, from the records of archive and streams.

Takes the recorded groups in the recorded micro-batches, so on the same hardware in deterministic mode the
weights come out bit by bit. The digest in each commit shows it; a difference is logged.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import structlog
import torch
from safetensors import SafetensorError, safe_open

from tidemill.common.command_line import command_line
from tidemill.common.config import RunConfig
from tidemill.common.errors import TidemillError, WeightsError
from tidemill.common.files import StorageError, aside_folder
from tidemill.common.history import GroupCursor, History, MissingRecordsError, StreamName
from tidemill.common.process.service import ServiceContext, StoppedError
from tidemill.common.run.weight_files import read_chain, read_manifest, verified_files
from tidemill.common.telemetry import metrics
from tidemill.common.weights.delta import write_whole
from tidemill.common.wire.messages import Commit, fault_of
from tidemill.services.trainer.batch.reconciler import RunStreams
from tidemill.services.trainer.durable.waiting import on_disk
from tidemill.services.trainer.groups.group import Group
from tidemill.services.trainer.groups.group_filter import GREEDY
from tidemill.services.trainer.metrics.recorder import Recorder
from tidemill.services.trainer.metrics.step_metrics import step_metrics
from tidemill.services.trainer.policy.model_loading import pick_device
from tidemill.services.trainer.policy.policy import Policy
from tidemill.services.trainer.step import StepRunner, check_processor, samples_digest

log = structlog.get_logger(__name__)


class LostPayloadError(TidemillError):
    """A sample that a committed step was trained on is in the streams, but the payload that it claims is
    lost."""


class OtherSamplesError(TidemillError):
    """The streams have the groups of a committed step, with other tokens or rewards than were trained."""


class Retrainer:
    """Trains the steps that a trainer found committed behind its checkpoint."""

    def __init__(self, context: ServiceContext, runner: StepRunner, streams: RunStreams) -> None:
        self.context = context
        self.runner = runner
        self.streams = streams

    async def train(
        self,
        commits: Sequence[Commit],
        history: History,
        positions: Mapping[StreamName, str],
        recorder: Recorder,
    ) -> None:
        """Train every commit again, with the records of `history` from these positions on. Raises
        StoppedError: the service must stop; nothing was changed."""
        tickets = frozenset(ticket for commit in commits for ticket in commit.groups)
        config = self.context.config
        async with open_cursor(history, config, positions, tickets.__contains__) as cursor:
            for commit in commits:
                if self.context.stopping.is_set():
                    raise StoppedError
                with self.context.activity.during("recover", f"replaying step {commit.step}"):
                    await self._replay_one(commit, cursor)
                metrics.REPLAYED_STEPS.inc()
                for ticket in commit.groups:
                    self.streams.scheduler.settle(ticket)
                    self.streams.join.close(ticket)
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

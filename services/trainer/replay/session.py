"""Goes through a run's commits again, from the nearest checkpoint, and gives what comes out.

Guarantees: nothing of the run is written, neither files nor streams; what is trained, and in which order and
micro-batches, is what the commits say; memory holds one policy, and the groups that were outstanding
together.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tidemill.common.config import RunConfig
from tidemill.common.errors import TidemillError
from tidemill.common.history import (
    GroupCursor,
    History,
    MissingRecordsError,
    Selection,
    StreamName,
)
from tidemill.common.process.activity import Activity
from tidemill.common.streams import Entry, entry_id_of
from tidemill.common.wire.messages import Commit
from tidemill.services.trainer.batch.stream_join import SCORES, TRAJECTORIES
from tidemill.services.trainer.durable.checkpoint import Checkpoint, read_checkpoint
from tidemill.services.trainer.groups.group_filter import GroupFilter, PendingGroup
from tidemill.services.trainer.metrics.step_metrics import step_metrics
from tidemill.services.trainer.policy.policy import Policy, PolicyThread
from tidemill.services.trainer.step import StepResult, StepRunner

Say = Callable[[dict[str, Any]], None]
"""Tells whoever waits how far the replay is."""


@dataclass(frozen=True, slots=True)
class ReplayContext:
    """A process that serves nobody and is not asked to stop; fulfils `step.ReplayContext`."""

    config: RunConfig
    activity: Activity = field(default_factory=lambda: Activity("replay"))
    stopping: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """A committed step and what came out now; the policy has its version at this moment."""

    commit: Commit
    result: StepResult
    metrics: dict[str, float]
    digest: str


class Session:
    """One pass through a run, forward only. Lifecycle: `steps` once."""

    def __init__(
        self,
        history: History,
        config: RunConfig,
        run_dir: Path,
        policy: Policy,
        thread: PolicyThread,
        say: Say,
    ) -> None:
        self.history, self.config, self.run_dir = history, config, run_dir
        self.policy, self.thread, self.say = policy, thread, say
        self.runner = StepRunner(ReplayContext(config), policy, thread, GroupFilter(config))
        self.version, self.from_version = 0, 0
        self.first_difference: int | None = None
        """The first step, of those replayed since the last restored checkpoint, with another digest."""
        self._cursor: GroupCursor | None = None

    async def steps(self, wanted: Sequence[int]) -> AsyncIterator[ReplayedStep]:
        """Each wanted step, ascending. Raises TidemillError: its streams do not hold what it was trained on,
        or the config has changed."""
        async with AsyncExitStack() as stack:
            for step in sorted(set(wanted)):
                await self._restore(step, stack)
                async for commit in self._commits(self.version, step):
                    replayed = await self._train(commit)
                    if commit.step == step:
                        yield replayed

    async def _restore(self, step: int, stack: AsyncExitStack) -> None:
        """Take the newest checkpoint up to `step`, where that is nearer than what the policy holds."""
        found = await asyncio.to_thread(read_checkpoint, self.run_dir, step)
        if found is None or found.state.version <= self.version:
            if self._cursor is None:
                self._cursor = await stack.enter_async_context(self._open_cursor(None))
                self.say({"kind": "start", "version": 0, "step": step})
            return
        await self.thread.call(self.policy.load_state, found.folder)
        self.version = self.from_version = found.state.version
        self.first_difference = await self._difference_of_checkpoint()
        self._cursor = await stack.enter_async_context(self._open_cursor(found))
        self.say({"kind": "start", "version": self.version, "step": step})

    async def _difference_of_checkpoint(self) -> int | None:
        """The step before the checkpoint, where its weights are not those that the step was committed with: a
        trainer that had to replay on other hardware goes on from what it has."""
        commit = await self.history.commit(self.version - 1)
        is_same = commit is None or await self.thread.call(self.policy.digest) == commit.digest
        return None if is_same else self.version - 1

    def _open_cursor(self, checkpoint: Checkpoint | None) -> GroupCursor:
        """A reader from the start of the streams, or from where the checkpoint needs them."""
        trainer = self.config.trainer
        most = (2 + trainer.max_staleness) * trainer.groups_per_step
        if checkpoint is None:
            return GroupCursor(self.history, self.config.largest_group_size, most)
        state = checkpoint.state
        positions = {
            StreamName.TRAJECTORIES: state.positions[TRAJECTORIES],
            StreamName.SCORES: state.positions[SCORES],
        }
        outstanding = {int(item[0]) for item in state.scheduler["outstanding"]}
        first_new = int(state.scheduler["next_ticket"])
        return GroupCursor(
            self.history,
            self.config.largest_group_size,
            most,
            positions,
            lambda ticket: ticket >= first_new or ticket in outstanding,
        )

    async def _commits(self, first: int, last: int) -> AsyncIterator[Commit]:
        expected = first
        selection = Selection(first_id=entry_id_of(first), last_id=entry_id_of(last))
        async for record in self.history.scan(StreamName.COMMITS, selection):
            if not isinstance(record, Entry) or not isinstance(record.message, Commit):
                continue
            if record.message.step != expected:
                break
            yield record.message
            expected += 1
        if expected <= last:
            raise TidemillError(
                f"the commit of step {expected} is missing, so the steps up to {last} cannot be replayed "
                f"from version {first}. Restore the stream from its backup, or the archive."
            )

    async def _train(self, commit: Commit) -> ReplayedStep:
        started_at = time.monotonic()
        result = await self.runner.replay(commit, await self._groups_of(commit))
        digest = await self.thread.call(self.policy.digest)
        self.version = commit.version
        if digest != commit.digest and self.first_difference is None:
            self.first_difference = commit.step
        seconds = time.monotonic() - started_at
        self.say({"kind": "step", "step": commit.step, "seconds": seconds, "equal": digest == commit.digest})
        return ReplayedStep(commit, result, _metrics_of(commit, result, self.config), digest)

    async def _groups_of(self, commit: Commit) -> dict[int, PendingGroup]:
        """Groups to be judged and prepared again."""
        assert self._cursor is not None, "`_restore` comes first"
        self._cursor.close(ticket for ticket, index, _ in commit.dropped if index < 0)
        try:
            recorded = await self._cursor.groups(commit.groups)
        except MissingRecordsError as error:
            raise TidemillError(
                f"step {commit.step} cannot be trained again: {error}. Turn the archive on to keep all of a "
                "run, or set trainer.keep_checkpoints higher: the streams are kept from the oldest "
                "checkpoint on. Steps after a later checkpoint can be replayed."
            ) from None
        self._cursor.close(commit.groups)
        return {
            ticket: PendingGroup(ticket, commit.step, group.trajectories, group.scores)
            for ticket, group in recorded.items()
        }


def _metrics_of(commit: Commit, result: StepResult, config: RunConfig) -> dict[str, float]:
    """A step's metrics, but for those that are times."""
    num_dropped = sum(index < 0 for _, index, _ in commit.dropped)
    threshold = config.trainer.algorithm.success_threshold
    numbers = step_metrics(commit.step, result, num_dropped, 0.0, threshold)
    return {name: value for name, value in numbers.items() if name != "step_time_s"}

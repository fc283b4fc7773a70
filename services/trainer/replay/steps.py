"""`tidemill replay`: trains committed steps again, and compares the results with the record.

Goes through a run's commits, from the nearest checkpoint. Guarantees: nothing of the run is written, neither
files nor streams; what is trained, and in which order and micro-batches, is what the commits say; memory
holds one policy, and the groups that were outstanding together.

Compared bit by bit: every metric that follows from records and weights, each sample's advantage, what was
left out, and the digest. Times that were measured while the run went on are not compared.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

from tidemill.common.config import RunConfig
from tidemill.common.errors import TidemillError
from tidemill.common.history import GroupCursor, History, MissingRecordsError
from tidemill.common.process.activity import Activity
from tidemill.common.wire.messages import Commit
from tidemill.services.trainer.durable.checkpoint import read_checkpoint
from tidemill.services.trainer.durable.retraining import (
    OtherSamplesError,
    open_cursor,
    pending_groups,
    weight_difference,
)
from tidemill.services.trainer.metrics.step_metrics import step_metrics
from tidemill.services.trainer.policy.loading import closer_of, open_policy
from tidemill.services.trainer.policy.memory.fit import PASSES_FILE
from tidemill.services.trainer.policy.policy import Policy, PolicyThread
from tidemill.services.trainer.step import StepResult, StepRunner, check_processor

Say = Callable[[dict[str, Any]], None]
"""Reports how far the replay is."""


class StepReplay:
    """One pass through a run, forward only. Lifecycle: `results` once."""

    def __init__(
        self,
        history: History,
        config: RunConfig,
        run_dir: Path,
        policy: Policy,
        thread: PolicyThread,
        say: Say,
    ) -> None:
        """Args:
        history, config, run_dir: the run's.
        policy: the policy at the starting model; it is trained.
        thread: makes its calls.
        say: is called with an event for each start and step.
        """
        self.history = history
        self.config = config
        self.run_dir = run_dir
        self.policy = policy
        self.thread = thread
        self.say = say
        self.runner = StepRunner(config, policy, thread, Activity("replay"))
        self.version = 0
        """That of the policy's weights now."""
        self.from_version = 0
        """That of the checkpoint restored last; 0: the starting model."""
        self.first_difference: int | None = None
        """The first step, of those replayed since the last restored checkpoint, with another digest."""
        self._cursor: GroupCursor | None = None
        """Reads groups from the streams; the first `_restore` makes one."""

    async def results(self, wanted: Sequence[int]) -> AsyncIterator[dict[str, Any]]:
        """The comparison for each wanted step, ascending. Raises TidemillError: the streams do not hold what
        a step was trained on, or the config has changed."""
        async with AsyncExitStack() as stack:
            for step in sorted(set(wanted)):
                cursor = await self._restore(step)
                if cursor is not None:
                    self._cursor = await stack.enter_async_context(cursor)
                    self.say({"kind": "start", "version": self.version, "step": step})
                for number in range(self.version, step + 1):
                    commit = await self._commit(number, step)
                    result, digest = await self._train(commit)
                comparison = _compare_step(commit, result, digest, self.config)
                if digest != commit.digest:
                    # The policy has this step's version now.
                    apart = partial(weight_difference, self.policy, self.run_dir, commit)
                    comparison["weights"] = await self.thread.call(apart)
                comparison |= {"first_difference": self.first_difference, "from_version": self.from_version}
                yield comparison

    async def _restore(self, step: int) -> GroupCursor | None:
        """Restore the newest checkpoint up to `step`, where that is nearer than the policy's version.

        Returns a reader of what comes next: behind the checkpoint, or from the start of the streams where
        there is neither a checkpoint nor a reader yet. None: the reader from before goes on.
        """
        checkpoint = await asyncio.to_thread(read_checkpoint, self.run_dir, step)
        if checkpoint is None or checkpoint.state.version <= self.version:
            return open_cursor(self.history, self.config) if self._cursor is None else None
        state = checkpoint.state
        await self.thread.call(self.policy.load_state, checkpoint.folder)
        self.version = state.version
        self.from_version = self.version
        # The checkpoint's weights may not be those of its step's commit: a trainer that had to replay on
        # other hardware goes on from what it has.
        commit = await self.history.commit(self.version - 1)
        is_same = commit is None or await self.thread.call(self.policy.digest) == commit.digest
        self.first_difference = None if is_same else self.version - 1
        outstanding = {int(item[0]) for item in state.scheduler["outstanding"]}
        first_new = int(state.scheduler["next_ticket"])
        # What was settled at the checkpoint is not trained again: its records would only take memory.
        return open_cursor(
            self.history, self.config, state.positions, lambda n: n >= first_new or n in outstanding
        )

    async def _commit(self, step: int, last: int) -> Commit:
        """Raises TidemillError: there is none, so that the steps up to `last` cannot be replayed."""
        commit = await self.history.commit(step)
        if commit is None:
            raise TidemillError(
                f"the commit of step {step} is missing, so the steps up to {last} cannot be replayed "
                f"from version {self.from_version}. Restore the stream from its backup, or the archive."
            )
        return commit

    async def _train(self, commit: Commit) -> tuple[StepResult, str]:
        assert self._cursor is not None, "`_restore` comes first"
        # Before its records are read: pictures would have other numbers of tokens.
        check_processor(commit, self.policy)
        started_at = time.monotonic()
        # Groups that were replaced are never trained: the reader need not keep what it has of them.
        self._cursor.close(ticket for ticket, index, _ in commit.dropped if index < 0)
        try:
            groups = await pending_groups(self._cursor, commit)
        except (MissingRecordsError, OtherSamplesError) as error:
            raise TidemillError(
                f"step {commit.step} cannot be trained again: {error}. Turn the archive on to keep all of a "
                "run, or set trainer.keep_checkpoints higher: the streams are kept from the oldest "
                "checkpoint on. Steps after a later checkpoint can be replayed."
            ) from None
        result = await self.runner.replay(commit, groups)
        digest = await self.thread.call(self.policy.digest)
        self.version = commit.version
        if digest != commit.digest and self.first_difference is None:
            self.first_difference = commit.step
        seconds = time.monotonic() - started_at
        self.say({"kind": "step", "step": commit.step, "seconds": seconds, "equal": digest == commit.digest})
        return result, digest


def _compare_step(commit: Commit, result: StepResult, digest: str, config: RunConfig) -> dict[str, Any]:
    """`equal` says whether everything that is compared is the same, bit by bit."""
    num_dropped = sum(index < 0 for _, index, _ in commit.dropped)
    now = step_metrics(commit.step, result, num_dropped, 0.0, config.trainer.algorithm.success_threshold)
    del now["step_time_s"]
    then = commit.metrics
    metrics = [
        {
            "name": name,
            "recorded": then[name],
            "replayed": value,
            "difference": value - then[name],
            "equal": _is_same(value, then[name]),
        }
        for name, value in now.items()
        if name in then
    ]
    advantages = _compare_advantages(commit, result)
    dropped = sorted(item for item in commit.dropped if item[1] >= 0)
    left_out = sorted((g.ticket, index, reason) for g in result.groups for index, reason in g.left_out)
    is_same_digest = commit.digest == digest
    return {
        "step": commit.step,
        "version": commit.version,
        "equal": is_same_digest
        and all(row["equal"] for row in metrics)
        and advantages["equal"]
        and dropped == left_out,
        "digest": {"recorded": commit.digest, "replayed": digest, "equal": is_same_digest},
        "metrics": metrics,
        "not_compared": sorted(then.keys() - now.keys()),
        "advantages": advantages,
        "left_out": {
            "equal": dropped == left_out,
            "recorded": [list(item) for item in dropped],
            "replayed": [list(item) for item in left_out],
        },
        "num_groups": len(commit.groups),
        "num_samples": len(result.samples),
    }


def _compare_advantages(commit: Commit, result: StepResult) -> dict[str, Any]:
    """Compares every sample's advantage; `first` is the first one that differs."""
    difference: dict[str, Any] = {"equal": True, "num_different": 0, "first": None}
    for group in result.groups:
        recorded = commit.advantages.get(str(group.ticket), [])
        replayed = [sample.mean_advantage for sample in group.samples]
        indices = [sample.key[1] for sample in group.samples]
        pairs: list[tuple[int, Any, Any]]
        if len(recorded) != len(replayed):
            pairs = [(indices[0] if indices else 0, recorded, replayed)]
        else:
            triples = zip(indices, recorded, replayed, strict=True)
            pairs = [(index, then, now) for index, then, now in triples if not _is_same(then, now)]
        if pairs:
            index, then, now = pairs[0]
            first = {"ticket": group.ticket, "index": index, "recorded": then, "replayed": now}
            difference["first"] = difference["first"] or first
            difference["equal"] = False
            difference["num_different"] += len(pairs)
    return difference


def _is_same(first: float, second: float) -> bool:
    """Whether both are the same number, or both NaN."""
    return first == second or (math.isnan(first) and math.isnan(second))


async def replay_steps(
    history: History, config: RunConfig, run_dir: Path, steps: Sequence[int], say: Say
) -> bool:
    """Replay the steps and report events by `say`; returns whether all results are as recorded."""
    thread = PolicyThread()
    # With the sizes of passes that the run has chosen, if any: this GPU could choose others.
    passes_of = run_dir if (run_dir / PASSES_FILE).exists() else None
    policy = await thread.call(open_policy, config, passes_of, run_dir)
    replay = StepReplay(history, config, run_dir, policy, thread, say)
    is_equal = True
    started_at = time.monotonic()
    try:
        async for result in replay.results(steps):
            is_equal = is_equal and result["equal"]
            say({"kind": "result", "seconds": time.monotonic() - started_at, **result})
    finally:
        close = closer_of(policy)
        if close is not None:
            await thread.call(close)
    return is_equal

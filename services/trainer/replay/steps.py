"""`tidemill replay step`: what was recorded of steps against what comes out now, event by event.

Compared bit by bit: every metric that follows from records and weights, each sample's advantage, what was
left out, and the digest. Times that were measured while the run went on are not compared.
"""

import argparse
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tidemill.common.config import RunConfig
from tidemill.common.history import History
from tidemill.common.wire.messages import Commit
from tidemill.services.trainer.durable.recovery import weight_difference
from tidemill.services.trainer.policy.fsdp.sharded_policy import ShardedPolicy
from tidemill.services.trainer.policy.loading import open_policy
from tidemill.services.trainer.policy.memory.model import PASSES_FILE
from tidemill.services.trainer.policy.policy import Policy, PolicyThread
from tidemill.services.trainer.policy.state import PolicyState
from tidemill.services.trainer.replay.session import ReplayedStep, Say, Session
from tidemill.services.trainer.replay.torch_dump import write_dump
from tidemill.services.trainer.replay.what_if import WhatIf, copied_state
from tidemill.services.trainer.step import StepResult


def compare_step(replayed: ReplayedStep) -> dict[str, Any]:
    """`equal` says whether everything that is compared is the same, bit by bit."""
    commit = replayed.commit
    metrics = compare_metrics(commit.metrics, replayed.metrics)
    advantages = compare_advantages(commit, replayed.result)
    left_out = compare_left_out(commit, replayed.result)
    digest = {"recorded": commit.digest, "replayed": replayed.digest}
    return {
        "step": commit.step,
        "version": commit.version,
        "equal": commit.digest == replayed.digest
        and all(row["equal"] for row in metrics)
        and advantages["equal"]
        and left_out["equal"],
        "digest": digest | {"equal": commit.digest == replayed.digest},
        "metrics": metrics,
        "not_compared": sorted(commit.metrics.keys() - replayed.metrics.keys()),
        "advantages": advantages,
        "left_out": left_out,
        "num_groups": len(commit.groups),
        "num_samples": len(replayed.result.samples),
    }


def compare_metrics(recorded: Mapping[str, float], replayed: Mapping[str, float]) -> list[dict[str, Any]]:
    """A row for each metric that both have; `difference` is replayed minus recorded."""
    return [
        {
            "name": name,
            "recorded": recorded[name],
            "replayed": value,
            "difference": value - recorded[name],
            "equal": is_same(value, recorded[name]),
        }
        for name, value in replayed.items()
        if name in recorded
    ]


def compare_advantages(commit: Commit, result: StepResult) -> dict[str, Any]:
    """Of every sample; `first` is the first one that differs."""
    found: dict[str, Any] = {"equal": True, "num_different": 0, "first": None}
    for group in result.groups:
        recorded = commit.advantages.get(str(group.ticket), [])
        replayed = [sample.mean_advantage for sample in group.samples]
        indices = [sample.key[1] for sample in group.samples]
        pairs: list[tuple[int, Any, Any]]
        if len(recorded) != len(replayed):
            pairs = [(indices[0] if indices else 0, recorded, replayed)]
        else:
            pairs = [
                (index, then, now)
                for index, then, now in zip(indices, recorded, replayed, strict=True)
                if not is_same(then, now)
            ]
        if pairs:
            index, then, now = pairs[0]
            first = {"ticket": group.ticket, "index": index, "recorded": then, "replayed": now}
            found["first"] = found["first"] or first
            found["equal"], found["num_different"] = False, found["num_different"] + len(pairs)
    return found


def compare_left_out(commit: Commit, result: StepResult) -> dict[str, Any]:
    """Samples that were left out of their groups, with the reason."""
    recorded = sorted(item for item in commit.dropped if item[1] >= 0)
    replayed = sorted((g.ticket, index, reason) for g in result.groups for index, reason in g.left_out)
    return {
        "equal": recorded == replayed,
        "recorded": [list(item) for item in recorded],
        "replayed": [list(item) for item in replayed],
    }


def is_same(one: float, other: float) -> bool:
    """The same number, or both none."""
    return one == other or (math.isnan(one) and math.isnan(other))


class StepReplay:
    """Replays steps and says what came out, event by event."""

    def __init__(
        self,
        history: History,
        config: RunConfig,
        changed: RunConfig | None,
        options: argparse.Namespace,
        say: Say,
    ) -> None:
        """`changed` is the config of a what-if; `options` are those of the command line."""
        self.history, self.config, self.options, self.say = history, config, options, say
        self.thread = PolicyThread()
        self.what_if = WhatIf(config, changed, self.thread) if changed else None
        self._start: PolicyState | None = None

    async def run(self, steps: Sequence[int]) -> bool:
        """Replay the steps; returns whether all came out as recorded."""
        folder: Path = self.options.run_dir
        # What this GPU would choose is none of the run's business.
        known = folder if (folder / PASSES_FILE).exists() else None
        policy = await self.thread.call(open_policy, self.config, known)
        try:
            return await self._run(policy, steps)
        finally:
            if isinstance(policy, ShardedPolicy):
                await self.thread.call(policy.close)

    async def _run(self, policy: Policy, steps: Sequence[int]) -> bool:
        session = Session(self.history, self.config, self.options.run_dir, policy, self.thread, self.say)

        async def before(_step: int) -> None:
            if self.what_if is not None:
                await self.what_if.remember(policy)
            if self.options.with_weights:
                self._start = await self.thread.call(copied_state, policy)

        is_equal, started_at = True, time.monotonic()
        async for replayed in session.steps(steps, before):
            result = compare_step(replayed)
            is_equal = is_equal and result["equal"]
            result["first_difference"] = session.first_difference
            result["from_version"] = session.from_version
            if not result["digest"]["equal"]:
                result["weights"] = await self.thread.call(
                    weight_difference, policy, self.options.run_dir, replayed.commit
                )
            if self.what_if is not None:
                result["what_if"] = await self.what_if.train(replayed.commit, replayed.groups, policy)
            if self.options.to_torch:
                result["file"] = self._dump(replayed)
            self.say({"kind": "result", "seconds": time.monotonic() - started_at, **result})
        return is_equal

    def _dump(self, replayed: ReplayedStep) -> dict[str, str | int]:
        path = self.options.to_torch
        return {"path": str(path), "num_bytes": write_dump(path, self.config, replayed, self._start)}

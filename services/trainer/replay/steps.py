"""`tidemill replay`: what was recorded of steps against what comes out now, event by event.

Compared bit by bit: every metric that follows from records and weights, each sample's advantage, what was
left out, and the digest. Times that were measured while the run went on are not compared.
"""

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
from tidemill.services.trainer.policy.memory.passes import PASSES_FILE
from tidemill.services.trainer.policy.policy import PolicyThread
from tidemill.services.trainer.replay.session import ReplayedStep, Say, Session
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


async def replay_steps(
    history: History, config: RunConfig, run_dir: Path, steps: Sequence[int], say: Say
) -> bool:
    """Replay the steps and say what came out, event by event; returns whether all came out as recorded."""
    thread = PolicyThread()
    # What this GPU would choose is none of the run's business.
    known = run_dir if (run_dir / PASSES_FILE).exists() else None
    policy = await thread.call(open_policy, config, known)
    session = Session(history, config, run_dir, policy, thread, say)
    is_equal, started_at = True, time.monotonic()
    try:
        async for replayed in session.steps(steps):
            result = compare_step(replayed)
            is_equal = is_equal and result["equal"]
            result["first_difference"] = session.first_difference
            result["from_version"] = session.from_version
            if not result["digest"]["equal"]:
                result["weights"] = await thread.call(weight_difference, policy, run_dir, replayed.commit)
            say({"kind": "result", "seconds": time.monotonic() - started_at, **result})
    finally:
        if isinstance(policy, ShardedPolicy):
            await thread.call(policy.close)
    return is_equal

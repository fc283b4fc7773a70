"""What was recorded of a step against what came out now, as plain values for whoever shows them.

Compared bit by bit: every metric that follows from records and weights, each sample's advantage, what was
left out, and the digest. Times and shares that were measured while the run went on are not compared.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import structlog
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from common.config import RunConfig
from common.errors import WeightsError
from common.run.weight_files import WEIGHTS_FOLDER, read_manifest, version_name
from common.wire.messages import Commit
from services.trainer.policy.model_loading import pick_device
from services.trainer.policy.policy import Policy
from services.trainer.replay.session import ReplayedStep
from services.trainer.step import StepResult
from services.trainer.weights.encode import WEIGHTS_FILE


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


log = structlog.get_logger(__name__)

COMPARED_METRICS = ("loss", "grad_norm", "entropy")


def check_replay(
    policy: Policy, commit: Commit, metrics: dict[str, float], config: RunConfig, run_dir: Path
) -> bool:
    """Hold the policy's weights against the commit's digest; returns whether they are the same.

    `metrics` are those of the replay. Runs in the policy's thread.
    """
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
    """Greatest and mean absolute difference to the commit's weights on the disk; None without them.

    In the dtype in which they were written, so that a difference too small for it shows as 0.
    """
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
                apart = _apart(tensor, stored.get_tensor(name))
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


def _apart(one: Tensor, other: Tensor) -> Tensor:
    return (one.detach().to("cpu", torch.float64) - other.to(torch.float64)).abs()

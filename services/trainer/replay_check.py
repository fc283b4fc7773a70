"""Compares a replayed step with its commit: the digest proves it, and a difference is told with its size.

The size is taken from the weights of that version on the disk, where they still are; otherwise from the
metrics of the two trainings. A difference is never silent: an error where the run promised there would be
none (`trainer.deterministic` on a CPU), else a warning.
"""

from pathlib import Path
from typing import Any

import structlog
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from common.config import RunConfig
from common.errors import WeightsError
from common.messages import Commit
from common.weight_files import WEIGHTS_FOLDER, read_manifest, version_name
from services.trainer.export import WEIGHTS_FILE
from services.trainer.model_loading import pick_device
from services.trainer.policy import Policy

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

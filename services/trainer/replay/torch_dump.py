"""`--to-torch FILE`: the exact batch of a step as plain tensors, for a notebook.

Rows are samples in the order of training, padded on the right; what belongs to a token stands at that token's
place, and is zero elsewhere. torch reads it with `weights_only=True`; docs/debugging.md shows how.

Shape legend: B samples, T tokens of the longest prompt plus completion.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.config import RunConfig
from common.files import storage_errors
from services.trainer.groups.samples import Sample
from services.trainer.policy.state import PolicyState
from services.trainer.replay.session import ReplayedStep
from services.trainer.replay.what_if import named_weights

SCHEMA = 1
PER_TOKEN = {
    "loss_mask": ("mask", torch.bool),
    "rollout_logprobs": ("rollout_logprobs", torch.float32),
    "proximal_logprobs": ("proximal_logprobs", torch.float32),
    "reference_logprobs": ("reference_logprobs", torch.float32),
    "values": ("values", torch.float32),
    "returns": ("returns", torch.float64),
}
"""Name in the file -> field of a sample, and how it is stored; left out where the algorithm has none."""


def write_dump(path: Path, config: RunConfig, replayed: ReplayedStep, start: PolicyState | None) -> int:
    """Write the batch, and with `start` the weights before the step; returns the size in bytes. Raises
    StorageError: the file cannot be written; what was there before is as it was."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with storage_errors("the batch", path):
        try:
            with open(aside, "wb") as file:
                torch.save(batch_of(config, replayed, start), file)
            os.replace(aside, path)
        finally:
            aside.unlink(missing_ok=True)
        return path.stat().st_size


def batch_of(config: RunConfig, replayed: ReplayedStep, start: PolicyState | None) -> dict[str, Any]:
    """Tensors by name, and beside them numbers and text only."""
    minis = replayed.result.mini_batches
    placed = [
        (number, micro, sample)
        for number, mini in enumerate(minis)
        for micro, batch in enumerate(mini.micro_batches)
        for sample in batch.samples
    ]
    samples = [sample for _, _, sample in placed]
    commit = replayed.commit
    return {
        "schema": SCHEMA,
        "run_id": config.run_id,
        "step": commit.step,
        "model": config.model.path,
        **_token_tensors(samples),
        "token_versions": _versions(samples, replayed),
        "reward": torch.tensor([sample.reward for sample in samples], dtype=torch.float64),
        "ticket": torch.tensor([sample.key[0] for sample in samples]),
        "index": torch.tensor([sample.key[1] for sample in samples]),
        "mini_batch": torch.tensor([number for number, _, _ in placed]),
        "micro_batch": torch.tensor([micro for _, micro, _ in placed]),
        "denominator": torch.tensor([mini.sums.denominator for mini in minis], dtype=torch.float64),
        "temperature": config.rollout.sampling.temperature,
        "algorithm": config.trainer.algorithm.model_dump(mode="json"),
        "optimizer": config.trainer.optimizer.model_dump(mode="json"),
        "recorded": dict(commit.metrics),
        "digest": commit.digest,
    } | ({"weights": named_weights(start)} if start else {})


def _token_tensors(samples: Sequence[Sample]) -> dict[str, Tensor]:
    """Everything of shape [B, T]; advantages in float64, as they were computed."""
    num_rows, length = len(samples), max((sample.num_tokens for sample in samples), default=0)
    input_ids_BT = torch.zeros(num_rows, length, dtype=torch.int64)
    attention_mask_BT = torch.zeros(num_rows, length, dtype=torch.bool)
    advantages_BT = torch.zeros(num_rows, length, dtype=torch.float64)
    for row, sample in enumerate(samples):
        ids = np.concatenate([sample.prompt_ids, sample.completion_ids])
        input_ids_BT[row, : len(ids)] = torch.from_numpy(ids.astype(np.int64))
        attention_mask_BT[row, : len(ids)] = True
        advantage = np.broadcast_to(np.float64(sample.advantage), sample.mask.shape) * sample.mask
        advantages_BT[row, _completion(sample)] = torch.from_numpy(advantage)
    tensors = {
        "input_ids": input_ids_BT,
        "attention_mask": attention_mask_BT,
        "position_ids": torch.arange(length).expand(num_rows, length).contiguous(),
        "advantages": advantages_BT,
    }
    for name, (field, dtype) in PER_TOKEN.items():
        if any(getattr(sample, field) is not None for sample in samples):
            tensors[name] = _placed(samples, field, dtype, length)
    return tensors


def _placed(samples: Sequence[Sample], field: str, dtype: torch.dtype, length: int) -> Tensor:
    values_BT = torch.zeros(len(samples), length, dtype=dtype)
    for row, sample in enumerate(samples):
        if (values := getattr(sample, field)) is not None:
            values_BT[row, _completion(sample)] = torch.from_numpy(np.array(values)).to(dtype)
    return values_BT


def _completion(sample: Sample) -> slice:
    return slice(len(sample.prompt_ids), sample.num_tokens)


def _versions(samples: Sequence[Sample], replayed: ReplayedStep) -> Tensor:
    """The version that produced each completion token, -1 elsewhere. Shape [B, T]."""
    length = max((sample.num_tokens for sample in samples), default=0)
    versions_BT = torch.full((len(samples), length), -1, dtype=torch.int32)
    for row, sample in enumerate(samples):
        ticket, index = sample.key
        versions_T = replayed.groups[ticket].trajectories[index].token_versions()
        versions_BT[row, _completion(sample)] = torch.from_numpy(versions_T)
    return versions_BT

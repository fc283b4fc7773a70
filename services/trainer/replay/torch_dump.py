"""`--to-torch FILE`: the exact batch of a step as plain tensors, for a notebook.

Rows are samples in the order of training, one for each segment, padded on the right; what belongs to a token
stands at that token's place, and is zero elsewhere. torch reads it with `weights_only=True`;
docs/debugging.md shows how.

Shape legend: B rows, T tokens of the longest prompt plus completion.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tidemill.common.config import RunConfig
from tidemill.common.files import storage_errors
from tidemill.common.wire.arrays import Int32
from tidemill.services.trainer.groups.samples import Sample, token_versions
from tidemill.services.trainer.policy.state import PolicyState
from tidemill.services.trainer.replay.session import ReplayedStep
from tidemill.services.trainer.replay.what_if import named_weights

SCHEMA = 1
PER_TOKEN = {
    "loss_mask": ("mask", torch.bool),
    "rollout_logprobs": ("rollout_logprobs", torch.float32),
    "proximal_logprobs": ("proximal_logprobs", torch.float32),
    "reference_logprobs": ("reference_logprobs", torch.float32),
    "values": ("values", torch.float32),
    "returns": ("returns", torch.float64),
    "factors": ("factors", torch.float64),
    "penalised": ("penalised", torch.float64),
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
        (number, micro, row)
        for number, mini in enumerate(minis)
        for micro, batch in enumerate(mini.micro_batches)
        for sample in batch.samples
        for row in _rows_of(sample)
    ]
    rows = [row for _, _, row in placed]
    samples = [row.sample for row in rows]
    commit = replayed.commit
    return {
        "schema": SCHEMA,
        "run_id": config.run_id,
        "step": commit.step,
        "model": config.model.path,
        **_token_tensors(rows),
        "token_versions": _versions(rows, replayed),
        "reward": torch.tensor([sample.reward for sample in samples], dtype=torch.float64),
        "ticket": torch.tensor([sample.key[0] for sample in samples]),
        "index": torch.tensor([sample.key[1] for sample in samples]),
        "segment": torch.tensor([row.segment for row in rows]),
        "mini_batch": torch.tensor([number for number, _, _ in placed]),
        "micro_batch": torch.tensor([micro for _, micro, _ in placed]),
        "denominator": torch.tensor([mini.sums.denominator for mini in minis], dtype=torch.float64),
        "temperature": config.rollout.sampling.temperature,
        "algorithm": config.trainer.algorithm.model_dump(mode="json"),
        "optimizer": config.trainer.optimizer.model_dump(mode="json"),
        "recorded": dict(commit.metrics),
        "digest": commit.digest,
    } | ({"weights": named_weights(start)} if start else {})


@dataclass(frozen=True, slots=True, eq=False)
class _Row:
    """One segment of a sample: `own` are its places among the sample's completion tokens."""

    sample: Sample
    segment: int
    prompt_ids: Int32
    own: slice

    @property
    def ids(self) -> Int32:
        return np.concatenate([self.prompt_ids, self.sample.completion_ids[self.own]])

    @property
    def completion(self) -> slice:
        """Its places in the row."""
        return slice(len(self.prompt_ids), len(self.prompt_ids) + self.own.stop - self.own.start)


def _rows_of(sample: Sample) -> Iterator[_Row]:
    start = 0
    for number, (prompt_ids, num_completion) in enumerate(sample.segments):
        yield _Row(sample, number, prompt_ids, slice(start, start + num_completion))
        start += num_completion


def _token_tensors(rows: Sequence[_Row]) -> dict[str, Tensor]:
    """Everything of shape [B, T]; advantages in float64, as they were computed."""
    num_rows, length = len(rows), max((len(row.ids) for row in rows), default=0)
    input_ids_BT = torch.zeros(num_rows, length, dtype=torch.int64)
    attention_mask_BT = torch.zeros(num_rows, length, dtype=torch.bool)
    advantages_BT = torch.zeros(num_rows, length, dtype=torch.float64)
    for b, row in enumerate(rows):
        ids, sample = row.ids, row.sample
        input_ids_BT[b, : len(ids)] = torch.from_numpy(ids.astype(np.int64))
        attention_mask_BT[b, : len(ids)] = True
        advantage = np.broadcast_to(np.float64(sample.advantage), sample.mask.shape) * sample.mask
        advantages_BT[b, row.completion] = torch.from_numpy(advantage[row.own])
    tensors = {
        "input_ids": input_ids_BT,
        "attention_mask": attention_mask_BT,
        "position_ids": torch.arange(length).expand(num_rows, length).contiguous(),
        "advantages": advantages_BT,
    }
    if any(row.sample.teaching is not None for row in rows):
        tensors["teacher_logprobs"] = _teacher_logprobs(rows, length)
    for name, (field, dtype) in PER_TOKEN.items():
        if any(getattr(row.sample, field) is not None for row in rows):
            tensors[name] = _placed(rows, field, dtype, length)
    return tensors


def _placed(rows: Sequence[_Row], field: str, dtype: torch.dtype, length: int) -> Tensor:
    values_BT = torch.zeros(len(rows), length, dtype=dtype)
    for b, row in enumerate(rows):
        if (values := getattr(row.sample, field)) is not None:
            values_BT[b, row.completion] = torch.from_numpy(np.array(values[row.own])).to(dtype)
    return values_BT


def _teacher_logprobs(rows: Sequence[_Row], length: int) -> Tensor:
    """Those of each sample's teacher, 0 where it has none. Shape [B, T]."""
    values_BT = torch.zeros(len(rows), length)
    for b, row in enumerate(rows):
        if (teaching := row.sample.teaching) is not None:
            values_BT[b, row.completion] = torch.from_numpy(np.array(teaching.logprobs[row.own]))
    return values_BT


def _versions(rows: Sequence[_Row], replayed: ReplayedStep) -> Tensor:
    """The version that produced each completion token, -1 elsewhere. Shape [B, T]."""
    length = max((len(row.ids) for row in rows), default=0)
    versions_BT = torch.full((len(rows), length), -1, dtype=torch.int32)
    for b, row in enumerate(rows):
        ticket, index = row.sample.key
        versions_T = token_versions(replayed.groups[ticket].trajectories[index])
        versions_BT[b, row.completion] = torch.from_numpy(versions_T[row.own])
    return versions_BT

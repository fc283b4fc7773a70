"""The trainer's step beside a bare loop of torch, in one process and in turns.

The bare loop gets the same packed tokens ready made: rectangles of token ids, and for each scored token its
position, target and weight. It runs the same model, F.cross_entropy over a chunk of logits at a time,
backward, and fused AdamW. It plans nothing, clips nothing, and measures neither entropies nor anything else.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils import get_total_norm
from torch.utils.checkpoint import checkpoint

from benchmarks.trainer_sides import LR, make_policy, now_s, train_step
from tidemill.services.trainer.groups.samples import Sample, form_micro_batches
from tidemill.services.trainer.policy.packing import make_tile
from tidemill.services.trainer.policy.transformers_policy import TransformersPolicy

CHUNK_ELEMENTS = 1 << 26
"""Logits at once; more are computed again in the backward pass."""


@dataclass(frozen=True)
class Rectangle:
    """One forward pass, on the device: what the model gets, and of N scored tokens the flat position before
    each, its id, and the advantage over the number of tokens of the step."""

    inputs: dict[str, Any]
    places_N: Tensor
    targets_N: Tensor
    weights_N: Tensor


class BareLoop:
    """A model and its optimizer."""

    def __init__(self, model: Any, rectangles: Sequence[Rectangle]) -> None:
        self._model, self._rectangles = model, rectangles
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0, fused=True)

    def step(self) -> None:
        """All rectangles, then one update."""
        self.add_gradients()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def add_gradients(self) -> None:
        """Forward and backward passes."""
        for rectangle in self._rectangles:
            with torch.autocast("cuda", torch.bfloat16, enabled=torch.cuda.is_available()):
                hidden = self._model.base_model(**rectangle.inputs, use_cache=False).last_hidden_state
                loss = self._loss(hidden.flatten(0, 1)[rectangle.places_N], rectangle)
            loss.backward()

    def _loss(self, hidden_NH: Tensor, rectangle: Rectangle) -> Tensor:
        """-A log p, summed: what a policy gradient is where the ratio is 1."""
        head = self._model.lm_head.weight
        size = CHUNK_ELEMENTS // head.shape[0]
        columns = (hidden_NH, rectangle.targets_N, rectangle.weights_N)
        chunks = list(zip(*(column.split(size) for column in columns), strict=True))
        if len(chunks) == 1:
            return weighted_loss(head, *chunks[0])
        parts = [checkpoint(weighted_loss, head, *chunk, use_reentrant=False) for chunk in chunks]
        return torch.stack(parts).sum()

    def norm(self) -> float:
        """Of the gradient of a step, which is then forgotten."""
        self.add_gradients()
        norm = float(get_total_norm([weight.grad for weight in self._model.parameters()]))
        self._optimizer.zero_grad(set_to_none=True)
        return norm


def weighted_loss(head_VH: Tensor, hidden_CH: Tensor, targets_C: Tensor, weights_C: Tensor) -> Tensor:
    """Of a chunk's tokens."""
    logits_CV = F.linear(hidden_CH, head_VH).float()
    return (F.cross_entropy(logits_CV, targets_C, reduction="none") * weights_C).sum()


def packed(policy: TransformersPolicy, samples: Sequence[Sample], budget_tokens: int) -> list[Rectangle]:
    """What the trainer lays out, as tensors on the device."""
    num_trained = sum(sample.num_trained for sample in samples)
    to_device = partial(torch.as_tensor, device=policy._model.device)
    rectangles = []
    for batch in form_micro_batches(samples, budget_tokens):
        for lines in policy._plan(batch.samples):
            tile = make_tile(lines, policy.layout)
            weights = [
                float(batch.samples[row.sample].advantage) / num_trained
                for row in tile.rows
                for _ in row.targets
            ]
            kwargs = {
                name: to_device(value) if isinstance(value, Tensor) else value
                for name, value in tile.model_kwargs.items()
            }
            places, targets = to_device(tile.sources_N), to_device(tile.targets_N)
            rectangles.append(
                Rectangle(kwargs | {"input_ids": to_device(tile.ids_BT)}, places, targets, to_device(weights))
            )
    return rectangles


def run_bare(model: Any, samples: Sequence[Sample], budget_tokens: int, steps: int) -> dict[str, Any]:
    """A step of each side in turns, after one of each to warm up; medians.

    Raises:
        RuntimeError: their gradients differ, so that they do not do the same work.
    """
    bare_model = copy.deepcopy(model)
    policy = make_policy(model, samples, budget_tokens)
    bare = BareLoop(bare_model, packed(policy, samples, budget_tokens))
    norms = bare.norm(), train_step(policy, samples, budget_tokens)
    bare.step()
    if abs(norms[0] / norms[1] - 1.0) > 1e-2:
        raise RuntimeError(
            f"the gradient's norm is {norms[0]} in the bare loop and {norms[1]} in the trainer"
        )
    sides: dict[str, Callable[[], Any]] = {
        "bare": bare.step,
        "tidemill": lambda: train_step(policy, samples, budget_tokens),
    }
    times: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(steps):
        # Whoever is first in a pair is second in the next.
        for side in list(sides)[:: -1 if number % 2 else 1]:
            started = now_s()
            sides[side]()
            times[side].append(now_s() - started)
    # Over pairs of steps: what else the machine does slows both steps of a pair.
    ratio = median(bare_s / own_s for bare_s, own_s in zip(times["bare"], times["tidemill"], strict=True))
    return {"step_s": [median(times[side]) for side in sides], "ratio": ratio}

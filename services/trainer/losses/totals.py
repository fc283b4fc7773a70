"""The terms of many forward passes as the metrics of a micro-batch."""

from collections.abc import Sequence

import torch

from services.trainer.losses.policy_loss import LossTerms
from services.trainer.policy import MicroBatchMetrics


def total_metrics(parts: Sequence[LossTerms]) -> MicroBatchMetrics:
    """Join the terms of tiles; the only point where the host waits for the device."""
    if not parts:
        return MicroBatchMetrics()
    sums = torch.stack([torch.stack([value.double() for value in part.sums.values()]) for part in parts])
    maxima = torch.stack([torch.stack([v.double() for v in part.maxima.values()]) for part in parts])
    totals = dict(zip(parts[0].sums, sums.sum(0).tolist(), strict=True))
    return MicroBatchMetrics(**totals, **dict(zip(parts[0].maxima, maxima.amax(0).tolist(), strict=True)))

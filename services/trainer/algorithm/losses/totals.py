"""The terms of many forward passes as the metrics of a micro-batch."""

from collections.abc import Sequence

import torch

from services.trainer.algorithm.losses.policy_loss import LossTerms
from services.trainer.policy.policy import MicroBatchMetrics


def total_metrics(parts: Sequence[LossTerms]) -> MicroBatchMetrics:
    """Join the terms of tiles; the only point where the host waits for the device."""
    if not parts:
        return MicroBatchMetrics()
    sums = torch.stack([torch.stack([value.double() for value in part.sums.values()]) for part in parts])
    maxima = torch.stack([torch.stack([v.double() for v in part.maxima.values()]) for part in parts])
    totals = dict(zip(parts[0].sums, sums.sum(0).tolist(), strict=True))
    return MicroBatchMetrics(**totals, **dict(zip(parts[0].maxima, maxima.amax(0).tolist(), strict=True)))


def loss_metrics(sums: MicroBatchMetrics) -> dict[str, float]:
    """Metrics of the loss; those of a value head only where there is one."""
    tokens = max(sums.tokens, 1)
    sampling = "sampling/importance_sampling_ratio"
    metrics = {
        "loss": sums.loss_sum / sums.denominator if sums.denominator else 0.0,
        "entropy": sums.entropy_sum / tokens,
        "kl": sums.kl_sum / tokens,
        "rollout_kl": sums.rollout_kl_sum / tokens,
        "clip_ratio/low_mean": sums.clipped_low / tokens,
        "clip_ratio/high_mean": sums.clipped_high / tokens,
        "clip_ratio/region_mean": (sums.clipped_low + sums.clipped_high) / tokens,
        "clip_ratio/dual_mean": sums.clipped_dual / tokens,
        f"{sampling}/mean": sums.weight_sum / tokens,
        f"{sampling}/max": sums.weight_max,
        f"{sampling}/bounded_mean": sums.weights_bounded / tokens,
        "sampling/effective_sample_size": effective_share(sums),
        "logprob_gap/mean": sums.mismatch_sum / tokens,
        "logprob_gap/max": sums.mismatch_max,
    }
    return metrics | _value_metrics(sums, tokens)


def effective_share(sums: MicroBatchMetrics) -> float:
    """Effective sample size over the number of tokens, (sum w)^2 / (N sum w^2): 1 where all weights are
    equal.

    Of the importance weights before any bound. Weights 1, 1, 4 give 36 / (3 * 18) = 2/3.
    """
    if not sums.tokens or not sums.raw_weight_square_sum:
        return 1.0
    # Equal weights give a little more than 1 by rounding.
    return min(1.0, sums.raw_weight_sum**2 / (sums.tokens * sums.raw_weight_square_sum))


def _value_metrics(sums: MicroBatchMetrics, tokens: int) -> dict[str, float]:
    """Loss, and 1 - (mean square error) / (variance of the returns): 1 is perfect, 0 as good as the mean."""
    if not sums.return_square_sum and not sums.value_square_error_sum:
        return {}
    variance = sums.return_square_sum / tokens - (sums.return_sum / tokens) ** 2
    error = sums.value_square_error_sum / tokens
    return {
        "value/loss": sums.value_loss_sum / tokens,
        "value/explained_variance": 1.0 - error / variance if variance > 1e-12 else 0.0,
        "value/return_mean": sums.return_sum / tokens,
    }

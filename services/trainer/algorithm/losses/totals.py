"""The sums of micro-batches over their tokens, and the metrics made of them."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from tidemill.services.trainer.algorithm.losses.policy_loss import Sums
from tidemill.services.trainer.algorithm.losses.tokens import Normalisation, denominator
from tidemill.services.trainer.groups.micro_batch import MicroBatch


@dataclass(frozen=True, slots=True)
class MicroBatchMetrics:
    """Sums over the trained tokens of one or more micro-batches; `+` joins two of them.

    Divide a `*_sum` or a count by `tokens` for the mean, `loss_sum` by `denominator`.
    """

    sequences: int = 0
    tokens: int = 0
    """Tokens that carry loss."""
    denominator: float = 0.0
    """What these samples add to the denominator of `update`."""
    positions: int = 0
    """Positions of the forward passes that were trained on, with padding."""
    row_tokens: int = 0
    """Their tokens with a row for each sample or segment, without padding."""
    row_pairs: int = 0
    """Pairs of a token in these rows and one that it attends to, itself included."""
    loss_sum: float = 0.0
    entropy_sum: float = 0.0
    kl_sum: float = 0.0
    """Estimate of KL(current || reference) by the configured estimator; 0 without a reference."""
    rollout_kl_sum: float = 0.0
    """k3 estimate of KL(rollout || current)."""
    clipped_low: float = 0.0
    clipped_high: float = 0.0
    clipped_dual: float = 0.0
    """Tokens without gradient because the ratio left its range (with `cispo`: with a bounded weight)."""
    weight_sum: float = 0.0
    weight_max: float = 0.0
    """Importance weights against the rollout policy, truncated or masked."""
    weights_bounded: float = 0.0
    """Tokens whose importance weight was truncated or masked."""
    raw_weight_sum: float = 0.0
    raw_weight_square_sum: float = 0.0
    """Importance weights before any bound; their effective sample size is sum^2 / sum of squares."""
    rejected: float = 0.0
    """Tokens that `rejection` left out of the loss."""
    off_policy: float = 0.0
    """Tokens that `off_policy_threshold` left out of the policy's term."""
    left_out: float = 0.0
    """Tokens that an entropy quantile or clip-cov left out of the policy's term."""
    mismatch_sum: float = 0.0
    mismatch_max: float = 0.0
    """|current - rollout| of the logprobs: staleness plus numerical mismatch."""
    unmasked_mismatch_sum: float = 0.0
    """The same without sampling masks, by current logprobs over all ids."""
    teacher_kl_sum: float = 0.0
    """Estimate of KL(current || teacher) where that is in the loss, over `teacher_tokens` tokens."""
    teacher_tokens: float = 0.0
    imitation_sum: float = 0.0
    """-logprob of demonstrations, over `imitation_tokens` tokens; of the other sums, only `loss_sum` contains
    these tokens."""
    imitation_tokens: float = 0.0
    value_loss_sum: float = 0.0
    value_square_error_sum: float = 0.0
    return_sum: float = 0.0
    return_square_sum: float = 0.0
    """The value head's loss, (value at the step's start - return)^2, and the returns."""
    balance_sum: float = 0.0
    router_z_sum: float = 0.0
    """The routers' balance loss and z-loss, means over layers."""
    changed_tokens: float = 0.0
    changed_layers: float = 0.0
    """Tokens that the routers would have sent to other experts than the engine did, in some layer; and the
    share of layers, summed over tokens."""
    compared_tokens: int = 0
    replayed_gap_sum: float = 0.0
    unreplayed_gap_sum: float = 0.0
    """`mismatch` of some tokens, with replayed routes as they are trained, and without."""
    expert_counts: tuple[tuple[int, ...], ...] = ()
    """Tokens that each expert of each mixture layer got, where it is wanted."""

    @property
    def sampled_tokens(self) -> float:
        """Tokens that carry loss and were sampled: all but those of demonstrations."""
        return self.tokens - self.imitation_tokens

    def __add__(self, other: "MicroBatchMetrics") -> "MicroBatchMetrics":
        def join(name: str) -> Any:
            mine, theirs = getattr(self, name), getattr(other, name)
            if name == "expert_counts":
                return tuple(map(_added, mine, theirs)) if mine and theirs else mine or theirs
            return max(mine, theirs) if name.endswith("_max") else mine + theirs

        return MicroBatchMetrics(**{item.name: join(item.name) for item in fields(self)})


def count_batch(
    batch: MicroBatch, normalisation: Normalisation, max_completion_tokens: int
) -> MicroBatchMetrics:
    """The counts of a micro-batch that are known before it is trained."""
    sequences, tokens = len(batch.samples), batch.num_trained
    share = denominator(normalisation, sequences, tokens, max_completion_tokens, batch.num_groups)
    return MicroBatchMetrics(sequences, tokens, share)


def _added(mine: Sequence[int], theirs: Sequence[int]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip(mine, theirs, strict=True))


def total_metrics(parts: Sequence[Sums]) -> MicroBatchMetrics:
    """Join the sums of tiles, of which one with demonstrations alone lacks some; the only point where the
    host waits for the device."""
    if not parts:
        return MicroBatchMetrics()
    every = {name: sums for part in parts for name, sums in part.items()}
    nothing = {name: torch.zeros_like(sums) for name, sums in every.items()}
    rows = [(nothing | part).values() for part in parts]
    # In float64: float32 counts exactly up to 2^24 only, and sums of squares lose their digits.
    tiles = torch.stack([torch.cat([sums.double().flatten() for sums in row]) for row in rows])
    totals, largest = iter(tiles.sum(0).tolist()), iter(tiles.amax(0).tolist())
    values: dict[str, float] = {}
    counts: list[tuple[int, ...]] = []
    for name, sums in nothing.items():
        pairs = [(next(totals), next(largest)) for _ in range(sums.numel())]
        if name.startswith("expert_counts/"):
            counts.append(tuple(int(total) for total, _ in pairs))
        else:
            values[name] = pairs[0][1] if name.endswith("_max") else pairs[0][0]
    return MicroBatchMetrics(**values, expert_counts=tuple(counts))  # type: ignore[arg-type]


def loss_metrics(sums: MicroBatchMetrics) -> dict[str, float]:
    """Metrics of the loss; those of a value head or of a selection of tokens only where there is one."""
    tokens = max(sums.sampled_tokens, 1)
    sampling = "sampling/importance_sampling_ratio"
    of_all: dict[str, float] = {
        "loss": sums.loss_sum / sums.denominator if sums.denominator else 0.0,
        "forward/positions": float(sums.positions),
        "forward/row_tokens": float(sums.row_tokens),
    }
    if sums.imitation_tokens:
        of_all["imitation/loss"] = sums.imitation_sum / sums.imitation_tokens
        of_all["imitation/token_share"] = sums.imitation_tokens / sums.tokens
    if sums.tokens and not sums.sampled_tokens:
        return of_all
    metrics = of_all | {
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
        "sampling/rejected_mean": sums.rejected / tokens,
        "sampling/off_policy_mean": sums.off_policy / tokens,
        "sampling/effective_sample_size": _effective_share(sums),
        "logprob_gap/mean": sums.mismatch_sum / tokens,
        "logprob_gap/max": sums.mismatch_max,
    }
    if sums.unmasked_mismatch_sum not in (0.0, sums.mismatch_sum):
        metrics["logprob_gap/unmasked_mean"] = sums.unmasked_mismatch_sum / tokens
    selected = {"selection/left_out_mean": sums.left_out / tokens} if sums.left_out else {}
    distilled = {"teacher_kl": sums.teacher_kl_sum / sums.teacher_tokens} if sums.teacher_tokens else {}
    routed = _route_metrics(sums, tokens) | _expert_metrics(sums, tokens)
    return metrics | selected | distilled | _value_metrics(sums, tokens) | routed


def _effective_share(sums: MicroBatchMetrics) -> float:
    """Effective sample size over the number of tokens, (sum w)^2 / (N sum w^2), of the importance weights
    before any bound: 1 where all are equal. Weights 1, 1, 4 give 36 / (3 * 18) = 2/3."""
    if not sums.sampled_tokens or not sums.raw_weight_square_sum:
        return 1.0
    # Equal weights give a little more than 1 by rounding.
    return min(1.0, sums.raw_weight_sum**2 / (sums.sampled_tokens * sums.raw_weight_square_sum))


def _value_metrics(sums: MicroBatchMetrics, tokens: float) -> dict[str, float]:
    """Loss, and 1 - (mean square error) / (variance of the returns): 1 is perfect, 0 as good as the mean."""
    if not sums.return_square_sum and not sums.value_square_error_sum:
        return {}
    variance = sums.return_square_sum / tokens - (sums.return_sum / tokens) ** 2
    error = sums.value_square_error_sum / tokens
    return {
        "value/loss": sums.value_loss_sum / tokens,
        # The variance is a difference of two large numbers: what is smaller than this is rounding.
        "value/explained_variance": 1.0 - error / variance if variance > 1e-12 else 0.0,
        "value/return_mean": sums.return_sum / tokens,
    }


def _route_metrics(sums: MicroBatchMetrics, tokens: float) -> dict[str, float]:
    if not sums.compared_tokens:
        return {}
    return {
        "routes/changed_tokens": sums.changed_tokens / tokens,
        "routes/changed_layers": sums.changed_layers / tokens,
        "routes/logprob_gap_with": sums.replayed_gap_sum / sums.compared_tokens,
        "routes/logprob_gap_without": sums.unreplayed_gap_sum / sums.compared_tokens,
    }


def _expert_metrics(sums: MicroBatchMetrics, tokens: float) -> dict[str, float]:
    """How evenly the step's tokens used the experts, where they were counted.

    `max_load` is the busiest expert's tokens over the mean's, in the worst layer: 1 + MaxVio of arXiv
    2408.15664. Counts (3, 1) and (2, 2): 1.5; idle 0; entropy (0.811 + 1) / 2.
    """
    if not any(map(sum, sums.expert_counts)):
        return {}
    shares = [np.divide(layer, sum(layer)) for layer in sums.expert_counts]
    entropies = [-np.sum(p * np.log(p, where=p > 0, out=np.zeros_like(p))) / np.log(len(p)) for p in shares]
    return {
        "experts/balance_loss": sums.balance_sum / tokens,
        "experts/z_loss": sums.router_z_sum / tokens,
        "experts/max_load": max(float(p.max() * len(p)) for p in shares),
        "experts/entropy": float(np.mean(entropies)),
        "experts/idle": float(np.mean(np.concatenate(shares) == 0.0)),
    }

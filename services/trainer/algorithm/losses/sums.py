"""Sums over the trained tokens of micro-batches, and the metrics made of them.

A sum has its name from the line of the loss that adds it (`policy_loss.py`), and that says what becomes of
it: `NAME_sum` is added up and becomes the metric NAME, its mean over the tokens that were sampled; of
`NAME_max` the largest counts, as the metric `NAME/max`. Sums that are named in `READ` become metrics by
another rule or name.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tidemill.services.trainer.algorithm.losses.tokens import Normalisation, denominator
from tidemill.services.trainer.groups.micro_batch import MicroBatch

TileSums = dict[str, Tensor]
"""What the loss of a tile adds: detached tensors by name, still on the device."""
EXPERTS = "expert_counts/"
"""Prefix of the only sums that are arrays: tokens that each expert of a mixture layer got, [E]."""


class Sums(dict[str, Any]):
    """Sums by name, as items; those of `READ` as attributes too, 0 where nothing was added. `+` joins the
    sums of two micro-batches.

    Divide a sum or a count by `sampled_tokens` for the mean, `loss_sum` by `denominator`. Of two
    micro-batches:

        {"tokens": 9, "entropy_sum": 18.0, "mismatch_max": 0.7} + {"tokens": 1, "mismatch_max": 0.2}
        == {"tokens": 10, "entropy_sum": 18.0, "mismatch_max": 0.7}

    Of each micro-batch there are `sequences`, `tokens` (that carry loss), `denominator` (what it adds to that
    of `update`), `positions` of the forward passes with padding, `row_tokens` (their tokens with a row for
    each sample or segment, without padding) and `row_pairs` (of a token in these rows and one that it attends
    to, itself too). Of pictures there are `picture_tokens`, each picture of a pass once, and `picture_pairs`
    of tokens of one picture.
    """

    def __getattr__(self, name: str) -> Any:
        if name not in READ:
            raise AttributeError(f"there is no sum {name!r} in READ of {__name__}; others are read as items")
        return self.get(name, 0.0)

    @property
    def sampled_tokens(self) -> float:
        """Tokens that carry loss and were sampled: all but those of demonstrations."""
        return float(self.tokens - self.imitation_tokens)

    @property
    def expert_counts(self) -> tuple[tuple[int, ...], ...]:
        """Tokens that each expert of each mixture layer got, where they were counted."""
        layers = sorted(int(name.removeprefix(EXPERTS)) for name in self if name.startswith(EXPERTS))
        return tuple(tuple(self[f"{EXPERTS}{layer}"].tolist()) for layer in layers)

    def __add__(self, other: Mapping[str, Any]) -> "Sums":
        joined = Sums(self)
        for name, value in other.items():
            if name not in joined:
                joined[name] = value
            elif name.endswith("_max"):
                joined[name] = max(joined[name], value)
            else:
                joined[name] = joined[name] + value
        return joined


def count_batch(batch: MicroBatch, normalisation: Normalisation, max_completion_tokens: int) -> Sums:
    """The counts of a micro-batch that are known before it is trained."""
    sequences = len(batch.samples)
    tokens = batch.num_trained
    share = denominator(normalisation, sequences, tokens, max_completion_tokens, batch.num_groups)
    return Sums(sequences=sequences, tokens=tokens, denominator=share)


def add_tiles(tiles: Sequence[TileSums]) -> Sums:
    """Join the sums of tiles, of which one with demonstrations alone lacks some; the only point where the
    host waits for the device."""
    if not tiles:
        return Sums()
    firsts: dict[str, Tensor] = {}
    """Each sum of the first tile that has it, by name."""
    for tile in tiles:
        if tile.keys() != firsts.keys():
            for name, value in tile.items():
                firsts.setdefault(name, value)
    kinds: dict[tuple[torch.dtype, torch.Size], list[str]] = {}
    for name, value in firsts.items():
        kinds.setdefault((value.dtype, value.shape), []).append(name)
    columns: list[Tensor] = []
    names_in_order: list[str] = []
    # One operation for all numbers of a kind: on CPUs there is a tile for each long sample.
    for names in kinds.values():
        values: list[Tensor] = []
        for tile in tiles:
            values += [tile[name] if name in tile else torch.zeros_like(firsts[name]) for name in names]
        # In float64: float32 counts exactly up to 2^24 only, and sums of squares lose their digits.
        columns.append(torch.stack(values).reshape(len(tiles), -1).double())
        names_in_order += names
    # [M, K]: tiles, by the numbers of all sums end to end.
    tiles_MK = torch.cat(columns, 1)
    totals_K = tiles_MK.sum(0).tolist()
    largest_K = tiles_MK.amax(0).tolist()
    sums = Sums()
    start = 0
    for name in names_in_order:
        end = start + firsts[name].numel()
        if name.startswith(EXPERTS):
            sums[name] = np.array(totals_K[start:end], dtype=np.int64)
        elif name.endswith("_max"):
            sums[name] = largest_K[start]
        else:
            sums[name] = totals_K[start]
        start = end
    return sums


MEANS = {
    "entropy": "entropy_sum",
    # Estimate of KL(current || reference) by the configured estimator; 0 without a reference.
    "kl": "kl_sum",
    # k3 estimate of KL(rollout || current).
    "rollout_kl": "rollout_kl_sum",
    # Tokens without gradient because the ratio left its range (with `cispo`: with a bounded weight).
    "clip_ratio/low_mean": "clipped_low",
    "clip_ratio/high_mean": "clipped_high",
    "clip_ratio/dual_mean": "clipped_dual",
    # Importance weights against the rollout policy, truncated or masked; and tokens for which that changed
    # them.
    "sampling/importance_sampling_ratio/mean": "weight_sum",
    "sampling/importance_sampling_ratio/bounded_mean": "weights_bounded",
    # Tokens that `rejection` left out of the loss, and `off_policy_threshold` out of the policy's term.
    "sampling/rejected_mean": "rejected",
    "sampling/off_policy_mean": "off_policy",
    # |current - rollout| of the logprobs: staleness plus numerical mismatch.
    "logprob_gap/mean": "mismatch_sum",
}
"""Metrics of every step that sampled tokens: means over these, 0 where nothing was added."""
LARGEST = {
    "sampling/importance_sampling_ratio/max": "weight_max",
    "logprob_gap/max": "mismatch_max",
}
COUNTS = frozenset((
    "sequences", "tokens", "denominator", "positions", "row_tokens", "row_pairs", "imitation_tokens",
    "teacher_tokens", "left_out", "compared_tokens", "changed_tokens", "changed_layers",
    "picture_tokens", "picture_pairs",
))  # fmt: skip
READ = COUNTS.union(MEANS.values(), LARGEST.values(), (
    "loss_sum", "raw_weight_sum", "raw_weight_square_sum", "unmasked_mismatch_sum", "imitation_sum",
    "teacher_kl_sum", "value_loss_sum", "value_square_error_sum", "return_sum", "return_square_sum",
    "balance_sum", "router_z_sum", "replayed_gap_sum", "unreplayed_gap_sum",
))  # fmt: skip
"""Sums that code reads by their names, as `sums.NAME`: no other name is an attribute. They become metrics by
`MEANS`, `LARGEST` or a function below, and not by their names."""


def loss_metrics(sums: Sums) -> dict[str, float]:
    """Metrics of the loss; those of a value head or of a selection of tokens only where there is one."""
    tokens = max(sums.sampled_tokens, 1)
    metrics: dict[str, float] = {
        "loss": sums.loss_sum / sums.denominator if sums.denominator else 0.0,
        "forward/positions": float(sums.positions),
        "forward/row_tokens": float(sums.row_tokens),
    }
    if sums.imitation_tokens:
        # -logprob of demonstrations; of the other sums, only `loss_sum` contains these tokens.
        metrics["imitation/loss"] = sums.imitation_sum / sums.imitation_tokens
        metrics["imitation/token_share"] = sums.imitation_tokens / sums.tokens
    if sums.tokens and not sums.sampled_tokens:
        return metrics
    metrics |= {name: sums.get(of, 0.0) / tokens for name, of in MEANS.items()}
    metrics |= {name: sums.get(of, 0.0) for name, of in LARGEST.items()}
    metrics["clip_ratio/region_mean"] = (sums.clipped_low + sums.clipped_high) / tokens
    metrics["sampling/effective_sample_size"] = _effective_share(sums)
    # The same without sampling masks, by current logprobs over all ids.
    if sums.unmasked_mismatch_sum not in (0.0, sums.mismatch_sum):
        metrics["logprob_gap/unmasked_mean"] = sums.unmasked_mismatch_sum / tokens
    if sums.left_out:
        metrics["selection/left_out_mean"] = sums.left_out / tokens
    if sums.teacher_tokens:
        metrics["teacher_kl"] = sums.teacher_kl_sum / sums.teacher_tokens
    metrics |= _value_metrics(sums, tokens) | _route_metrics(sums, tokens) | _expert_metrics(sums, tokens)
    return metrics | _metrics_by_name(sums, tokens)


def _metrics_by_name(sums: Sums, tokens: float) -> dict[str, float]:
    """The metrics of sums that nothing else knows: added in the loss, by one line."""
    metrics = {}
    for name, value in sums.items():
        if name in READ:
            continue
        if name.endswith("_sum"):
            metrics[name.removesuffix("_sum")] = value / tokens
        elif name.endswith("_max"):
            metrics[f"{name.removesuffix('_max')}/max"] = value
    return metrics


def _effective_share(sums: Sums) -> float:
    """Effective sample size over the number of tokens, (sum w)^2 / (N sum w^2), of the importance weights
    before any bound: 1 where all are equal. Weights 1, 1, 4 give 36 / (3 * 18) = 2/3."""
    if not sums.sampled_tokens or not sums.raw_weight_square_sum:
        return 1.0
    # Equal weights give a little more than 1 by rounding.
    return min(1.0, float(sums.raw_weight_sum**2 / (sums.sampled_tokens * sums.raw_weight_square_sum)))


def _value_metrics(sums: Sums, tokens: float) -> dict[str, float]:
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


def _route_metrics(sums: Sums, tokens: float) -> dict[str, float]:
    if not sums.compared_tokens:
        return {}
    return {
        "routes/changed_tokens": sums.changed_tokens / tokens,
        "routes/changed_layers": sums.changed_layers / tokens,
        "routes/logprob_gap_with": sums.replayed_gap_sum / sums.compared_tokens,
        "routes/logprob_gap_without": sums.unreplayed_gap_sum / sums.compared_tokens,
    }


def _expert_metrics(sums: Sums, tokens: float) -> dict[str, float]:
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

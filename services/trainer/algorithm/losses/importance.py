"""Importance weights: the old policy against the one that sampled.

They correct for stale weights and for numerics that differ between engine and trainer alike. Shape legend: N
trained tokens, S sequences.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from common.config.algorithm import AlgorithmConfig
from services.trainer.algorithm.losses.tokens import MAX_LOG_RATIO, sequence_means, sequence_sums


@dataclass(frozen=True, slots=True, eq=False)
class Importance:
    """`weights_N` multiply the loss; `raw_N` are those before any bound, both without gradient."""

    weights_N: Tensor
    raw_N: Tensor
    is_bounded_N: Tensor
    """Tokens whose weight was truncated or masked."""


def importance_weights(
    log_ratio_N: Tensor, sequence_N: Tensor, num_sequences: int, algorithm: AlgorithmConfig
) -> Importance:
    """Weights w of the tokens from log(old / rollout), bounded as `algorithm.importance` says. Shapes [N].

    Of each token (`level: token`), of its sequence as the product over tokens (`sequence`) or as their
    geometric mean (`geometric`):

    * `truncate`: clip(w, low, high). Truncated importance sampling (Yao et al. 2025, "Your efficient RL
      framework secretly brings you off-policy RL training"); the behaviour weight of decoupled PPO (AReaL,
      arXiv 2505.24298, eq. 5). A little bias for bounded variance.
    * `mask`: w where it lies in [low, high], else 0. Masked importance sampling; on tokens with bounds on
      both sides it is IcePop (Ring-1T, arXiv 2510.18855: low 0.5, high 5). What is masked still counts
      in D.
    * `off`: 1.

    `raw_N` is what the weights would be without bounds, also where they are off, for the diagnostics.
    """
    importance, mode = algorithm.importance, algorithm.importance_mode
    log_ratio_N = log_ratio_N.detach()
    if importance.level == "sequence":
        log_ratio_N = sequence_sums(log_ratio_N, sequence_N, num_sequences)[sequence_N]
    elif importance.level == "geometric":
        log_ratio_N = sequence_means(log_ratio_N, sequence_N, num_sequences)[sequence_N]
    raw_N = log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if mode == "off":
        return Importance(torch.ones_like(raw_N), raw_N, torch.zeros_like(raw_N, dtype=torch.bool))
    is_outside_N = (raw_N < importance.low) | (raw_N > importance.high)
    if mode == "mask":
        return Importance(raw_N.masked_fill(is_outside_N, 0.0), raw_N, is_outside_N)
    return Importance(raw_N.clamp(importance.low, importance.high), raw_N, is_outside_N)

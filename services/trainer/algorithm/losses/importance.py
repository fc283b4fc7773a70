"""Importance weights.

They compare the old policy with the one that sampled: they correct for stale weights and for numerics that
differ between engine and trainer. They look at whole sequences, so nothing depends on micro-batches.

Shape legend: N trained tokens, S sequences.
"""

import torch
from torch import Tensor

from tidemill.common.config.algorithm import AlgorithmConfig
from tidemill.services.trainer.algorithm.losses.tokens import MAX_LOG_RATIO, sequence_means, sequence_sums


def importance_weights(
    log_ratio_N: Tensor, sequence_N: Tensor, num_sequences: int, algorithm: AlgorithmConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """Weights w of the tokens from log(old / rollout), bounded as `algorithm.importance` says; the weights
    without bounds, also with mode `off`; and which of them a bound has changed. Shapes [N], no gradient.

    A weight is that of the token (`level: token`) or of its sequence: the product over tokens (`sequence`) or
    their geometric mean (`geometric`):

    * `truncate`: clip(w, low, high). Truncated importance sampling (Yao et al. 2025, "Your efficient RL
      framework secretly brings you off-policy RL training"); the behaviour weight of decoupled PPO (AReaL,
      arXiv 2505.24298, eq. 5). A little bias for bounded variance.
    * `mask`: w where it lies in [low, high], else 0. Masked importance sampling; on tokens with bounds on
      both sides it is IcePop (Ring-1T, arXiv 2510.18855: low 0.5, high 5). Masked tokens still count in
      the denominator.
    * `off`: 1.
    """
    importance = algorithm.importance
    mode = algorithm.importance_mode
    # Importance weights are constants: else the loss could fall by moving them alone.
    log_ratio_N = log_ratio_N.detach()
    if importance.level == "sequence":
        log_ratio_N = sequence_sums(log_ratio_N, sequence_N, num_sequences)[sequence_N]
    elif importance.level == "geometric":
        log_ratio_N = sequence_means(log_ratio_N, sequence_N, num_sequences)[sequence_N]
    # After the sum: that of a long sequence is far beyond any token's.
    raw_N = log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if mode == "off":
        return torch.ones_like(raw_N), raw_N, torch.zeros_like(raw_N, dtype=torch.bool)
    is_outside_N = (raw_N < importance.low) | (raw_N > importance.high)
    if mode == "mask":
        return raw_N.masked_fill(is_outside_N, 0.0), raw_N, is_outside_N
    return raw_N.clamp(importance.low, importance.high), raw_N, is_outside_N

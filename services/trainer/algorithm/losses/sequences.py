"""GMPO and VESPO: one ratio for a sequence, in other forms than GSPO's.

Shape legend: N trained tokens, S sequences that they belong to.
"""

import math

import torch

from tidemill.common.config.algorithm import AlgorithmConfig
from tidemill.services.trainer.algorithm.losses.tokens import (
    MAX_LOG_RATIO,
    Ratio,
    Surrogate,
    sequence_means,
    sequence_sums,
    unclipped,
)

LEAST_LOG_WEIGHT = math.log(1e-8)
"""Of a sequence's ratio in VESPO, as in TRL: below it the weight is nothing."""


def gmpo(ratio: Ratio, algorithm: AlgorithmConfig) -> Surrogate:
    """A times the geometric mean of a sequence's clipped ratios, at each of its tokens.

    arXiv 2507.20673 (verl's `geo_mean`): each log-ratio stops at clip_high where A > 0, at -clip_low where A
    < 0. Bounds are of log-ratios: the paper's e^-0.4 and e^0.4 are 0.4 and 0.4. With `normalisation:
    sequence` the equal terms of a sequence are averaged to the paper's one. Log-ratios 0.5 and 0.1, A = 2,
    clip_high = 0.4: 2 exp(0.25) = 2.568.
    """
    log_N = ratio.log_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    is_high_N = (log_N > algorithm.clip_high) & (ratio.advantages_N > 0)
    is_low_N = (log_N < -algorithm.clip_low) & (ratio.advantages_N < 0)
    clipped_N = log_N.clamp(-algorithm.clip_low, algorithm.clip_high)
    means_S = sequence_means(
        torch.where(is_high_N | is_low_N, clipped_N, log_N), ratio.sequence_N, ratio.num_sequences
    )
    objective_N = means_S.exp()[ratio.sequence_N] * ratio.advantages_N
    return Surrogate(objective_N, is_low_N, is_high_N, is_dual_N=torch.zeros_like(is_low_N))


def vespo(ratio: Ratio, algorithm: AlgorithmConfig) -> Surrogate:
    """phi(W) A logprob, with W the product of a sequence's ratios and phi(W) = W^k exp(lambda (1 - W)).

    arXiv 2602.10693, section 3.4: in place of a clip, a smooth weight without gradient, which is 1 at W = 1
    and fades on both sides; k and lambda depend on the sign of A. W = 2 with k = 2, lambda = 3: 4 exp(-3) =
    0.1991.
    """
    positive, negative = algorithm.vespo.positive, algorithm.vespo.negative
    with torch.no_grad():
        log_N = ratio.log_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        log_S = sequence_sums(log_N, ratio.sequence_N, ratio.num_sequences)
        log_weight_N = log_S.clamp(LEAST_LOG_WEIGHT, MAX_LOG_RATIO)[ratio.sequence_N]
        is_negative_N = ratio.advantages_N < 0
        power_N = torch.full_like(log_weight_N, positive[0]).masked_fill(is_negative_N, negative[0])
        decay_N = torch.full_like(log_weight_N, positive[1]).masked_fill(is_negative_N, negative[1])
        phi_N = (power_N * log_weight_N + decay_N * (1.0 - log_weight_N.exp())).exp()
    return unclipped(phi_N * ratio.advantages_N * ratio.logprobs_N)

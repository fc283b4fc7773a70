"""Tokens and sequences that are left out, because two policies disagree on them too much.

Whole sequences are looked at, so nothing depends on micro-batches.

Shape legend: N trained tokens, S sequences.
"""

import torch
from torch import Tensor

from tidemill.common.config.algorithm import AlgorithmConfig
from tidemill.common.config.algorithm_sections import RejectionConfig
from tidemill.services.trainer.algorithm.losses.tokens import (
    MAX_LOG_RATIO,
    Tokens,
    sequence_means,
    sequence_sums,
)


def rejected_tokens(
    log_ratio_N: Tensor, sequence_N: Tensor, num_sequences: int, rejection: RejectionConfig
) -> Tensor:
    """Which tokens are left out, from log(old / rollout). Shapes [N].

    With r = old / rollout of a token and l = log r, a token or a sequence is judged by one or several of

    * k1: r itself, between two bounds; of a sequence the product of its tokens (`seq_sum_k1`) or their
      geometric mean (`seq_mean_k1`);
    * k2 = l^2 / 2 and k3 = r - 1 - l, estimates of KL(rollout || old), up to a bound; of a sequence their
      sum, mean or largest.

    Each criterion that is set has to hold, whatever the weights of `importance` are; `veto` rejects a
    sequence with a token whose r is below it. Like verl's rollout correction, except that bounds of k1 are of
    r, not of 1 / r. A rejected token is in no term of the loss.

    Ratios 0.5 and 3 in one sequence: product 1.5, geometric mean 1.2247, k2 0.2402 and 0.6035, k3 0.1931 and
    0.9014. `token_k1: [0.4, 2]` rejects the second token, `seq_max_k3: 0.9` both.
    """
    log_N = log_ratio_N.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    # `expm1`, because most ratios are nearly 1, where `exp(l) - 1` loses its digits.
    measures = {"k1": log_N, "k2": 0.5 * log_N.square(), "k3": torch.expm1(log_N) - log_N}
    is_out_N = torch.zeros_like(log_N, dtype=torch.bool)
    is_out_S = torch.zeros(num_sequences, dtype=torch.bool, device=log_N.device)
    for name, bound in rejection.bounds.items():
        of, _, measure = name.rpartition("_")  # "seq_max_k3" is "seq_max" of "k3"
        if of == "token":
            is_out_N = is_out_N | _is_outside(measures[measure], bound)
        else:
            values_S = _OF_SEQUENCES[of](measures[measure], sequence_N, num_sequences)
            is_out_S = is_out_S | _is_outside(values_S, bound)
    if rejection.veto is not None:
        is_far_N = log_N < _log(rejection.veto, log_N)
        is_out_S = is_out_S | (sequence_sums(is_far_N.to(log_N.dtype), sequence_N, num_sequences) > 0)
    return is_out_N | is_out_S[sequence_N]


def kept_weights(tokens: Tokens, is_rejected_N: Tensor, algorithm: AlgorithmConfig) -> Tensor:
    """The weights of tokens, 0 for rejected ones. Shape [N].

    With `denominator: kept` and `normalisation: sequence` a sequence's mean is over its kept tokens: of 4
    tokens with weights 1/4 of which one is rejected, the others have 1/3.
    """
    is_kept_N = (~is_rejected_N).to(tokens.weights_N.dtype)
    if algorithm.rejection.denominator == "kept" and algorithm.normalisation == "sequence":
        shares_S = sequence_means(is_kept_N, tokens.sequence_N, tokens.num_sequences)
        # A sequence of which nothing is kept gives 0 / 1e-12, which is 0, and not 0 / 0.
        is_kept_N = is_kept_N / shares_S.clamp(min=1e-12)[tokens.sequence_N]
    return tokens.weights_N * is_kept_N


def off_policy_tokens(tokens: Tokens, threshold: float) -> Tensor:
    """Tokens with A < 0 in sequences that the policy has left: mean of log(rollout / current) above the
    threshold. Shape [N].

    DeepSeek-V3.2's off-policy sequence mask (arXiv 2512.02556), against the policy that sampled, as in TRL.
    Rollout probabilities 0.5 and 0.4, now 0.25 and 0.2: log 2 = 0.693 on average; a threshold of 0.5 masks
    both where A < 0, and none where A > 0.
    """
    gap_N = (tokens.rollout_logprobs_N - tokens.logprobs_N).detach()
    means_S = sequence_means(gap_N, tokens.sequence_N, tokens.num_sequences)
    return (tokens.advantages_N < 0) & (means_S > threshold)[tokens.sequence_N]


def _is_outside(values: Tensor, bound: float | tuple[float, float]) -> Tensor:
    if isinstance(bound, tuple):
        low, high = bound
        return (values < _log(low, values)) | (values > _log(high, values))
    return values > bound


def _log(number: float, like: Tensor) -> Tensor:
    """The logarithm in the dtype of what it bounds, so that a ratio at its bound is inside."""
    return torch.tensor(number, dtype=like.dtype, device=like.device).log()


def _sequence_maxima(values_N: Tensor, sequence_N: Tensor, num_sequences: int) -> Tensor:
    """Largest value of each sequence; values are at least 0. Shape [S]."""
    return values_N.new_zeros(num_sequences).scatter_reduce(0, sequence_N, values_N, "amax")


_OF_SEQUENCES = {"seq_sum": sequence_sums, "seq_mean": sequence_means, "seq_max": _sequence_maxima}

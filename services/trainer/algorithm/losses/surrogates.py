"""The objectives of PPO, GSPO, CISPO, SAPO, KL-Cov and REINFORCE. Shape legend: N trained tokens."""

import torch
from torch import Tensor

from tidemill.common.config.algorithm import AlgorithmConfig
from tidemill.services.trainer.algorithm.losses.tokens import (
    MAX_LOG_RATIO,
    Ratio,
    Surrogate,
    sequence_means,
    unclipped,
)


def ppo(ratio: Ratio, algorithm: AlgorithmConfig) -> Surrogate:
    """The clipped objective of each token by its own ratio.

    Of clip-cov too (arXiv 2505.22617): the tokens that it holds back have the factor 0 (`mini_batch.py`).
    """
    return clipped_surrogate(ratio.ratio_N, ratio.advantages_N, algorithm)


def kl_cov(ratio: Ratio, algorithm: AlgorithmConfig) -> Surrogate:
    """r A, less coefficient * |log r| on the chosen tokens; nothing is clipped.

    arXiv 2505.22617: a policy's entropy falls with the covariance of logprob and advantage, most of which
    comes from a few tokens. Which tokens is a statistic of the mini-batch (`mini_batch.py`). r = 1.2, A = 2,
    coefficient 1: 2.4, and 2.4 - 0.1823 = 2.2177 on a chosen token.
    """
    objective_N = ratio.ratio_N * ratio.advantages_N
    if ratio.penalised_N is not None:
        distance_N = ratio.log_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).abs()
        objective_N = objective_N - algorithm.covariance.coefficient * ratio.penalised_N * distance_N
    return unclipped(objective_N)


def clipped_surrogate(ratio_N: Tensor, advantages_N: Tensor, algorithm: AlgorithmConfig) -> Surrogate:
    """min(r A, clip(r, 1 - low, 1 + high) A), and at least `dual_clip` * A where A < 0. Shapes [N].

    arXiv 1707.06347, eq. 7; separate bounds are DAPO's clip-higher (arXiv 2503.14476); the dual clip is arXiv
    1912.09729 (TRL's `delta`). The gradient is zero where a positive advantage meets r > 1 + high, or a
    negative one r < 1 - low (those tokens have already moved enough) or r > `dual_clip` (one token that
    became much likelier would outweigh all others). r = 1.5, A = 2, high = 0.28 gives 2.56.
    """
    low, high, dual_clip = 1.0 - algorithm.clip_low, 1.0 + algorithm.clip_high, algorithm.dual_clip_bound
    clipped_N = ratio_N.clamp(low, high)
    # Above 1 + high, the minimum of a positive A is the clipped side: so this bound acts on negative A alone.
    bounded_N = ratio_N if dual_clip is None else ratio_N.clamp(max=dual_clip)
    objective_N = torch.minimum(bounded_N * advantages_N, clipped_N * advantages_N)
    with torch.no_grad():
        is_negative_N = advantages_N < 0
        is_dual_N = torch.zeros_like(is_negative_N)
        if dual_clip is not None:
            is_dual_N = (ratio_N > dual_clip) & is_negative_N
        return Surrogate(
            objective_N,
            is_low_N=(ratio_N < low) & is_negative_N,
            is_high_N=(ratio_N > high) & (advantages_N > 0),
            is_dual_N=is_dual_N,
        )


def reinforce(ratio: Ratio, algorithm: AlgorithmConfig) -> Surrogate:
    """A * logprob: its gradient is A times the gradient of the logprob. Shapes [N].

    Williams 1992, with the baseline in the advantage; RLOO (arXiv 2402.14740) and REINFORCE++ use it. Nothing
    is clipped: `importance` weights alone correct for policies other than the current one.
    """
    return unclipped(ratio.advantages_N * ratio.logprobs_N)


def cispo(ratio: Ratio, algorithm: AlgorithmConfig) -> Surrogate:
    """stop_gradient(clip(r, 1 - low, 1 + high)) * A * logprob. Shapes [N].

    CISPO, MiniMax-M1, arXiv 2506.13585, eq. 4 and 5. In place of PPO's clip, which silences tokens that have
    moved, every token keeps its gradient with a bounded weight. The paper leaves the lower bound open
    (`clip_low: 1`); TRL's `epsilon_high` is our 1 + clip_high. r = 7, high = 4 weighs the token by 5.

    Counted as clipped is what the bound changed and PPO would have silenced as well.
    """
    ratio_N = ratio.ratio_N.detach()
    low, high = 1.0 - algorithm.clip_low, 1.0 + algorithm.clip_high
    plain = unclipped(ratio_N.clamp(low, high) * ratio.advantages_N * ratio.logprobs_N)
    return Surrogate(
        plain.objective_N,
        is_low_N=(ratio_N < low) & (ratio.advantages_N < 0),
        is_high_N=(ratio_N > high) & (ratio.advantages_N > 0),
        is_dual_N=plain.is_dual_N,
    )


def gspo(ratio: Ratio, algorithm: AlgorithmConfig) -> Surrogate:
    """The clipped surrogate of s = (product of the token ratios)^(1 / len), at each of the len tokens.

    GSPO, arXiv 2507.18071, eq. 5 and 7: s is the geometric mean of the token ratios, so its clip range is far
    narrower than PPO's (3e-4 and 4e-4 in the paper). With `normalisation: sequence` the len equal terms are
    averaged to the paper's one term for a sequence. Token ratios 1.2 and 0.9 give s = sqrt(1.08) = 1.0392.
    """
    log_S = sequence_means(ratio.log_N, ratio.sequence_N, ratio.num_sequences)
    ratio_S = log_S.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return clipped_surrogate(ratio_S[ratio.sequence_N], ratio.advantages_N, algorithm)


TEMPERATURE_POSITIVE, TEMPERATURE_NEGATIVE = 1.0, 1.05
"""The paper's: tokens with a negative advantage are gated a little harder. Also TRL's defaults."""


def sapo(ratio: Ratio, algorithm: AlgorithmConfig) -> Surrogate:
    """A * sigmoid(t (r - 1)) * 4 / t with t by the sign of A. Shapes [N].

    SAPO, arXiv 2511.20347: at r = 1 the gradient is that of PPO, and it fades on both sides instead of ending
    at a bound. r = 1 gives 2 A / t.
    """
    positive_N = torch.full_like(ratio.advantages_N, TEMPERATURE_POSITIVE)
    temperature_N = positive_N.masked_fill(ratio.advantages_N <= 0, TEMPERATURE_NEGATIVE)
    gate_N = torch.sigmoid(temperature_N * (ratio.ratio_N - 1.0)) * 4.0 / temperature_N
    return unclipped(gate_N * ratio.advantages_N)

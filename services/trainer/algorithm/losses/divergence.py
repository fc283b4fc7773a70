"""DPPO: a trust region in probabilities in place of PPO's in ratios. Shape legend: N trained tokens.

arXiv 2602.04879. A ratio says little about how far a policy has moved: a token of probability 1e-5 may double
without harm, one of 0.9 that falls to 0.5 is a large step with a small ratio. So a token loses its gradient
where the divergence of the two policies, seen on that token alone ("binary": this token against all others),
exceeds its bound and the update would enlarge it. With p = probability now, q = the old one:

* total variation: |p - q| (verl's `dppo_tv`; prime-rl's default loss with bounds 0.2);
* KL: q log(q / p) + (1 - q) log((1 - q) / (1 - p)) (verl's `dppo_kl`).

The bounds are `clip_high` where A > 0 and the token has become likelier, `clip_low` where A < 0 and it has
become less likely.
"""

from torch import Tensor

from tidemill.common.config.algorithm import AlgorithmConfig
from tidemill.services.trainer.algorithm.losses.tokens import Ratio, Surrogate

LEAST_REST = 1e-8
"""Probability of all other tokens, at least: its logarithm stays finite."""


def dppo_tv(ratio: Ratio, algorithm: AlgorithmConfig) -> Surrogate:
    """r A, or no gradient where p - q leaves [-clip_low, clip_high] on the side that A pushes to.

    p = 0.5, q = 0.2, A = 2, clip_high = 0.2: 0.3 is too far, the objective is 0; with A = -2 it is -5.
    """
    moved_N = ratio.logprobs_N.detach().exp() - ratio.old_logprobs_N.exp()
    return _masked(ratio, algorithm, moved_N > algorithm.clip_high, moved_N < -algorithm.clip_low)


def dppo_kl(ratio: Ratio, algorithm: AlgorithmConfig) -> Surrogate:
    """r A, or no gradient where the binary KL exceeds its bound on the side that A pushes to.

    p = 0.5, q = 0.2: 0.2 log 0.4 + 0.8 log 1.6 = 0.1927.
    """
    log_N, old_N = ratio.log_N.detach(), ratio.old_logprobs_N
    divergence_N = -old_N.exp() * log_N + _rest(old_N) * (
        _rest(old_N).log() - _rest(ratio.logprobs_N.detach()).log()
    )
    is_high_N = (divergence_N > algorithm.clip_high) & (log_N > 0)
    return _masked(ratio, algorithm, is_high_N, (divergence_N > algorithm.clip_low) & (log_N < 0))


def _rest(logprobs_N: Tensor) -> Tensor:
    """1 - p, also where p is nearly 1."""
    # `1 - exp(x)` has no digits left where p is nearly 1; `expm1` keeps them.
    return (-logprobs_N.expm1()).clamp(min=LEAST_REST)


def _masked(
    ratio: Ratio, algorithm: AlgorithmConfig, is_too_high_N: Tensor, is_too_low_N: Tensor
) -> Surrogate:
    """r A where the token is inside. The weight r stops at `dppo.max_ratio`, the token keeps its gradient."""
    ratio_N, bound = ratio.ratio_N.detach(), algorithm.dppo.max_ratio
    weight_N = ratio_N if bound is None else ratio_N.clamp(max=bound)
    is_high_N = is_too_high_N & (ratio.advantages_N > 0)
    is_low_N = is_too_low_N & (ratio.advantages_N < 0)
    # Value w, gradient w times that of the logprob.
    one_N = 1.0 + ratio.logprobs_N - ratio.logprobs_N.detach()
    objective_N = (weight_N * ratio.advantages_N * one_N).masked_fill(is_high_N | is_low_N, 0.0)
    is_bounded_N = (ratio_N > weight_N) & ~is_high_N & ~is_low_N
    return Surrogate(objective_N, is_low_N=is_low_N, is_high_N=is_high_N, is_dual_N=is_bounded_N)

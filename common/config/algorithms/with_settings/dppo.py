"""DPPO, arXiv 2602.04879: a trust region in probabilities in place of PPO's in ratios.

A ratio says little about how far a policy has moved: a token of probability 1e-5 may double without harm, one
of 0.9 that falls to 0.5 is a large step with a small ratio. So the divergence of the two policies is bounded,
seen on one token alone ("binary": this token against all others). Where it exceeds its bound, and the update
would enlarge it, the token has no gradient.

Below p is the token's probability now, q the old one, r their ratio p / q, and A the token's advantage.
"""

from typing import TYPE_CHECKING

from pydantic import Field

from tidemill.common.config.algorithms.loss import Loss, Surrogate, Tokens
from tidemill.common.config.algorithms.settings import Settings
from tidemill.common.config.section import Section

if TYPE_CHECKING:
    from torch import Tensor

    from tidemill.common.config.algorithm import AlgorithmConfig

LEAST_REMAINDER = 1e-8
"""Lower bound of the probability of all other tokens, so that its logarithm stays finite."""


class DppoConfig(Section):
    """DPPO (arXiv 2602.04879), beside the bounds of the clip."""

    max_ratio: float | None = Field(None, gt=1.0, le=1e6)
    """Largest weight of a token (verl's `clip_ratio_c`); null has no bound."""


class DppoSettings(Settings):
    """Settings of `dppo_tv` and `dppo_kl`."""

    dppo: DppoConfig = DppoConfig()


def dppo_tv(ratio: Tokens, algorithm: "AlgorithmConfig") -> Surrogate:
    """r A, with the total variation as the divergence. verl's `dppo_tv`; prime-rl's default loss with bounds
    0.2.

    No gradient where p - q > clip_high and A > 0, or p - q < -clip_low and A < 0.

    p = 0.5, q = 0.2, A = 2, clip_high = 0.2: 0.3 is too far, the objective is 0; with A = -2 it is -5.
    """
    moved_N = ratio.logprobs_N.detach().exp() - ratio.old_logprobs_N.exp()  # p - q
    return _masked(ratio, algorithm, moved_N > algorithm.clip_high, moved_N < -algorithm.clip_low)


def dppo_kl(ratio: Tokens, algorithm: "AlgorithmConfig") -> Surrogate:
    """r A, with the binary KL as the divergence, q log(q / p) + (1 - q) log((1 - q) / (1 - p)). verl's
    `dppo_kl`.

    No gradient where it exceeds clip_high, p > q and A > 0, or it exceeds clip_low, p < q and A < 0.

    p = 0.5, q = 0.2: 0.2 log 0.4 + 0.8 log 1.6 = 0.1927.
    """
    log_N = ratio.log_N.detach()  # log(p / q)
    old_N = ratio.old_logprobs_N
    remainder_N = _remainder(ratio.logprobs_N.detach())
    old_remainder_N = _remainder(old_N)
    log_of_remainders_N = old_remainder_N.log() - remainder_N.log()
    divergence_N = -old_N.exp() * log_N + old_remainder_N * log_of_remainders_N
    is_high_N = (divergence_N > algorithm.clip_high) & (log_N > 0)
    is_low_N = (divergence_N > algorithm.clip_low) & (log_N < 0)
    return _masked(ratio, algorithm, is_high_N, is_low_N)


def _remainder(logprobs_N: "Tensor") -> "Tensor":
    """1 - p, also where p is nearly 1."""
    # `1 - exp(x)` has no digits left where p is nearly 1; `expm1` keeps them.
    return (-logprobs_N.expm1()).clamp(min=LEAST_REMAINDER)


def _masked(
    ratio: Tokens, algorithm: "AlgorithmConfig", is_too_high_N: "Tensor", is_too_low_N: "Tensor"
) -> Surrogate:
    """r A where the token is inside its bounds, else 0. Weights stop at `dppo.max_ratio`: such a token keeps
    its gradient, with that weight."""
    ratio_N = ratio.ratio_N.detach()
    bound = DppoSettings.of(algorithm).dppo.max_ratio
    weight_N = ratio_N if bound is None else ratio_N.clamp(max=bound)
    is_high_N = is_too_high_N & (ratio.advantages_N > 0)
    is_low_N = is_too_low_N & (ratio.advantages_N < 0)
    # 1, with the gradient of the logprob: the weight scales value and gradient alike.
    one_N = 1.0 + ratio.logprobs_N - ratio.logprobs_N.detach()
    objective_N = (weight_N * ratio.advantages_N * one_N).masked_fill(is_high_N | is_low_N, 0.0)
    # Weighted less than by its ratio, because of `dppo.max_ratio`.
    is_bounded_N = (ratio_N > weight_N) & ~is_high_N & ~is_low_N
    return Surrogate(objective_N, is_low_N=is_low_N, is_high_N=is_high_N, is_dual_N=is_bounded_N)


LOSSES = (
    Loss(
        name="dppo_tv",
        surrogate=dppo_tv,
        summary="r A, without gradient where the probability has moved by more than `clip_high` upwards (A "
        "> 0) or `clip_low` downwards (A < 0): a rare token may double, a frequent one may not be halved "
        "(arXiv 2602.04879). With `old_logprobs: rollout`",
        is_idle_at_one=True,
        settings=DppoSettings,
    ),
    Loss(
        name="dppo_kl",
        surrogate=dppo_kl,
        summary="as `dppo_tv`, with the KL divergence of this token against all others",
        is_idle_at_one=True,
        settings=DppoSettings,
    ),
)

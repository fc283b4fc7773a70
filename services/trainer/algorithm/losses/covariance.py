"""clip-cov and kl-cov: hold back the few tokens that make the entropy collapse.

Shape legend: N trained tokens.

arXiv 2505.22617: a policy's entropy falls with the covariance of logprob and advantage, most of which comes
from a few tokens. Which tokens is a statistic of the mini-batch (`mini_batch.py`).
"""

from tidemill.common.config.algorithm import AlgorithmConfig
from tidemill.services.trainer.algorithm.losses.surrogates import clipped_surrogate
from tidemill.services.trainer.algorithm.losses.tokens import MAX_LOG_RATIO, Ratio, Surrogate, unclipped


def clip_cov(ratio: Ratio, algorithm: AlgorithmConfig) -> Surrogate:
    """PPO's clipped objective; the chosen tokens have the factor 0."""
    return clipped_surrogate(
        ratio.ratio_N, ratio.advantages_N, algorithm.clip_low, algorithm.clip_high, algorithm.dual_clip_bound
    )


def kl_cov(ratio: Ratio, algorithm: AlgorithmConfig) -> Surrogate:
    """r A, less coefficient * |log r| on the chosen tokens; nothing is clipped.

    r = 1.2, A = 2, coefficient 1: 2.4, and 2.4 - 0.1823 = 2.2177 on a chosen token.
    """
    objective_N = ratio.ratio_N * ratio.advantages_N
    if ratio.penalised_N is not None:
        distance_N = ratio.log_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).abs()
        objective_N = objective_N - algorithm.covariance.coefficient * ratio.penalised_N * distance_N
    return unclipped(objective_N)

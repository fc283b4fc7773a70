"""clip-cov and kl-cov, arXiv 2505.22617: the entropy falls fastest where the covariance of logprob and
advantage is large, and most of it comes from a few tokens. These lose their gradient, or are penalised."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import xxhash
from pydantic import Field

from tidemill.common.config.algorithms.loss import MAX_LOG_RATIO, Loss, Position, Surrogate, Tokens
from tidemill.common.config.algorithms.losses.ppo import ppo
from tidemill.common.config.algorithms.settings import Settings
from tidemill.common.config.section import Rules, Section
from tidemill.common.wire.arrays import Float64

if TYPE_CHECKING:
    from tidemill.common.config.algorithm import AlgorithmConfig


class CovarianceConfig(Section):
    """clip-cov and kl-cov (arXiv 2505.22617)."""

    share: float = Field(2e-4, gt=0.0, le=1.0)
    """Share of a mini-batch's tokens, at least one (verl's `clip_cov_ratio`, `kl_cov_ratio`)."""
    low: float = Field(1.0, ge=-1e9, le=1e9)
    """Lowest covariance of tokens that `clip_cov` chooses."""
    high: float = Field(5.0, ge=-1e9, le=1e9)
    """Highest covariance."""
    coefficient: float = Field(1.0, gt=0.0, le=1e6)
    """Weight of |log r| on the tokens of `kl_cov` (`ppo_kl_coef`)."""

    def rules(self) -> Rules:
        if self.low >= self.high:
            yield f"low ({self.low}) must be below high ({self.high})"


class CovarianceSettings(Settings):
    """Settings of `clip_cov` and `kl_cov`."""

    covariance: CovarianceConfig = CovarianceConfig()


def token_covariances(ratio: Tokens) -> Float64:
    """(A - mean A) (logprob - mean logprob) of each token of a mini-batch, with means over all. Shape [N].

    Advantages 1, -1 with logprobs -1, -3: both 1.
    """
    # By numpy: sums of torch depend on the number of its threads, and the last bit may decide between tokens.
    advantages_N = ratio.advantages_N.numpy()
    logprobs_N = ratio.logprobs_N.numpy()
    count = max(len(logprobs_N), 1)
    covariances_N: Float64 = (advantages_N - advantages_N.sum() / count) * (
        logprobs_N - logprobs_N.sum() / count
    )
    return covariances_N


def clip_cov_tokens(
    ratio: Tokens, result: Surrogate, positions: Sequence[Position], algorithm: "AlgorithmConfig"
) -> list[int]:
    """Which of N tokens clip-cov takes the gradient from: a share of all, at least one, at random among those
    whose covariance lies in (low, high) and that the ordinary clip leaves alone.

    Chance is a hash of the token's key and index: the same in every replay.
    """
    bounds = CovarianceSettings.of(algorithm).covariance
    covariances_N = token_covariances(ratio)
    assert result.is_low_N is not None and result.is_high_N is not None, "PPO has both bounds"
    is_free_N = ~(result.is_low_N | result.is_high_N).numpy()
    inside_N = (covariances_N > bounds.low) & (covariances_N < bounds.high) & is_free_N
    order = sorted(np.flatnonzero(inside_N).tolist(), key=lambda n: (_chance(positions[n]), n))
    return order[: max(int(bounds.share * len(positions)), 1)]


def kl_cov_tokens(
    ratio: Tokens, result: Surrogate, positions: Sequence[Position], algorithm: "AlgorithmConfig"
) -> list[int]:
    """Which of N tokens kl-cov penalises: the share with the largest covariances, at least one; of equal ones
    the first by key and index."""
    share = CovarianceSettings.of(algorithm).covariance.share
    order: list[int] = np.argsort(-token_covariances(ratio), kind="stable").tolist()
    return order[: max(int(share * len(positions)), 1)]


def _chance(position: Position) -> int:
    key, index = position
    # Little-endian on every machine: it has to be the same hash.
    return xxhash.xxh3_64_intdigest(np.array([*key, index], dtype="<i8").tobytes())


def kl_cov(ratio: Tokens, algorithm: "AlgorithmConfig") -> Surrogate:
    """r A, less coefficient * |log r| on the chosen tokens; nothing is clipped.

    r = 1.2, A = 2, coefficient 1: 2.4, and 2.4 - 0.1823 = 2.2177 on a chosen token.
    """
    objective_N = ratio.ratio_N * ratio.advantages_N
    if ratio.penalised_N is not None:
        coefficient = CovarianceSettings.of(algorithm).covariance.coefficient
        distance_N = ratio.log_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).abs()
        objective_N = objective_N - coefficient * ratio.penalised_N * distance_N
    return Surrogate(objective_N)


LOSSES = (
    Loss(
        name="clip_cov",
        surrogate=ppo,
        summary="PPO's, without gradient for a random `covariance.share` of the tokens whose covariance of "
        "logprob and advantage lies between `covariance.low` and `high` (arXiv 2505.22617)",
        choose=clip_cov_tokens,
        leaves_out=True,
        settings=CovarianceSettings,
    ),
    Loss(
        name="kl_cov",
        surrogate=kl_cov,
        summary="r A, less `covariance.coefficient` times \\|log r\\| on the `covariance.share` with the "
        "largest covariance (arXiv 2505.22617)",
        is_idle_at_one=True,
        choose=kl_cov_tokens,
        settings=CovarianceSettings,
    ),
)

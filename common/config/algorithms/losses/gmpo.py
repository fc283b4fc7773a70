"""GMPO, arXiv 2507.20673 (verl's `geo_mean`)."""

from typing import TYPE_CHECKING

from tidemill.common.config.algorithms.loss import MAX_LOG_RATIO, Loss, Surrogate, Tokens, sequence_means

if TYPE_CHECKING:
    from tidemill.common.config.algorithm import AlgorithmConfig


def gmpo(ratio: Tokens, algorithm: "AlgorithmConfig") -> Surrogate:
    """A times the geometric mean of a sequence's clipped ratios, at each of its tokens.

    Each log-ratio stops at clip_high where A > 0, at -clip_low where A < 0. Bounds are of log-ratios: the
    paper's e^-0.4 and e^0.4 are 0.4 and 0.4. With `normalisation: sequence` the equal terms of a sequence
    are averaged to the paper's one. Log-ratios 0.5 and 0.1, A = 2, clip_high = 0.4: 2 exp(0.25) = 2.568.
    """
    log_N = ratio.log_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    is_high_N = (log_N > algorithm.clip_high) & (ratio.advantages_N > 0)
    is_low_N = (log_N < -algorithm.clip_low) & (ratio.advantages_N < 0)
    clipped_N = log_N.clamp(-algorithm.clip_low, algorithm.clip_high)
    bounded_N = clipped_N.where(is_high_N | is_low_N, log_N)
    means_S = sequence_means(bounded_N, ratio.sequence_N, ratio.num_sequences)
    objective_N = means_S.exp()[ratio.sequence_N] * ratio.advantages_N
    return Surrogate(objective_N, is_low_N, is_high_N)


LOSSES = (
    Loss(
        name="gmpo",
        surrogate=gmpo,
        summary="A times the geometric mean of a sequence's ratios, each clipped: its logarithm at "
        "`clip_high` where A > 0, at -`clip_low` where A < 0 (arXiv 2507.20673; there 0.4 and 0.4)",
        level="sequence",
        is_idle_at_one=True,
    ),
)

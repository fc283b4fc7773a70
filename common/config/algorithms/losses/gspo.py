"""GSPO, arXiv 2507.18071."""

from typing import TYPE_CHECKING

from tidemill.common.config.algorithms.loss import (
    MAX_LOG_RATIO,
    Loss,
    Surrogate,
    Tokens,
    clipped_surrogate,
    sequence_means,
)

if TYPE_CHECKING:
    from tidemill.common.config.algorithm import AlgorithmConfig


def gspo(ratio: Tokens, algorithm: "AlgorithmConfig") -> Surrogate:
    """The clipped surrogate of s = (product of the token ratios)^(1 / len), at each of the len tokens.

    Eq. 5 and 7: s is the geometric mean of the token ratios, so its clip range is far narrower than PPO's
    (3e-4 and 4e-4 in the paper). With `normalisation: sequence` the len equal terms are averaged to the
    paper's one term for a sequence. Token ratios 1.2 and 0.9 give s = sqrt(1.08) = 1.0392.
    """
    log_S = sequence_means(ratio.log_N, ratio.sequence_N, ratio.num_sequences)
    ratio_S = log_S.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return clipped_surrogate(ratio_S[ratio.sequence_N], ratio.advantages_N, algorithm)


LOSSES = (
    Loss(
        name="gspo",
        surrogate=gspo,
        summary="as `ppo`, with one r for a sequence, the geometric mean over its tokens",
        level="sequence",
        has_dual_clip=True,
        is_idle_at_one=True,
    ),
)

"""Group sequence policy optimisation: one ratio, and one clip, for a whole sequence."""

from common.config.algorithm import AlgorithmConfig
from services.trainer.losses.ppo import clipped_surrogate
from services.trainer.losses.tokens import MAX_LOG_RATIO, Ratio, Surrogate, sequence_means


def gspo(ratio: Ratio, algorithm: AlgorithmConfig) -> Surrogate:
    """The clipped surrogate of s = (product of the token ratios)^(1 / len), at each of the len tokens.

    GSPO, arXiv 2507.18071, eq. 5 and 7: s is the geometric mean of the token ratios, so its clip range is far
    narrower than PPO's (3e-4 and 4e-4 in the paper). With `normalisation: sequence` the len equal terms are
    averaged to the paper's one term for a sequence. Token ratios 1.2 and 0.9 give s = sqrt(1.08) = 1.0392.
    """
    log_S = sequence_means(ratio.log_N, ratio.sequence_N, ratio.num_sequences)
    ratio_S = log_S.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return clipped_surrogate(
        ratio_S[ratio.sequence_N],
        ratio.advantages_N,
        algorithm.clip_low,
        algorithm.clip_high,
        algorithm.dual_clip_bound,
    )

"""PPO's clipped surrogate with separate bounds and, where asked for, the dual clip."""

import torch
from torch import Tensor

from common.config.algorithm import AlgorithmConfig
from services.trainer.losses.tokens import Ratio, Surrogate


def ppo(ratio: Ratio, algorithm: AlgorithmConfig) -> Surrogate:
    """The objective of each token by its own ratio; see `clipped_surrogate`."""
    return clipped_surrogate(
        ratio.ratio_N,
        ratio.advantages_N,
        algorithm.clip_low,
        algorithm.clip_high,
        algorithm.dual_clip_bound,
    )


def clipped_surrogate(
    ratio_N: Tensor,
    advantages_N: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Surrogate:
    """min(r A, clip(r, 1 - low, 1 + high) A), and at least `dual_clip` * A where A < 0. Shapes [N].

    arXiv 1707.06347, eq. 7; separate bounds are DAPO's clip-higher (arXiv 2503.14476); the dual clip is arXiv
    1912.09729 (TRL's `delta`). The gradient is zero where a positive advantage meets r > 1 + high, or
    a negative one r < 1 - low (those tokens have already moved enough) or r > `dual_clip` (one token that
    became much likelier would outweigh all others). r = 1.5, A = 2, high = 0.28 gives 2.56.
    """
    clipped_N = ratio_N.clamp(1.0 - clip_low, 1.0 + clip_high)
    bounded_N = ratio_N if dual_clip is None else ratio_N.clamp(max=dual_clip)
    objective_N = torch.minimum(bounded_N * advantages_N, clipped_N * advantages_N)
    with torch.no_grad():
        is_negative_N = advantages_N < 0
        is_dual_N = torch.zeros_like(is_negative_N)
        if dual_clip is not None:
            is_dual_N = (ratio_N > dual_clip) & is_negative_N
        return Surrogate(
            objective_N,
            is_low_N=(ratio_N < 1.0 - clip_low) & is_negative_N,
            is_high_N=(ratio_N > 1.0 + clip_high) & (advantages_N > 0),
            is_dual_N=is_dual_N,
        )

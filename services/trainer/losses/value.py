"""The value head's loss."""

import torch
from torch import Tensor


def value_loss(values_N: Tensor, old_values_N: Tensor, returns_N: Tensor, clip: float | None) -> Tensor:
    """1/2 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2). Shape [N], at least 0.

    PPO's clipped value loss (arXiv 2005.12729, section 3; in OpenAI's baselines, not in the paper): a value
    that has moved c away from its estimate at the step's start has no gradient. `clip=None`: 1/2 (V - R)^2.
    V = 1, V_old = 0.5, c = 0.2, R = 0: max(1, 0.49) / 2 = 0.5; with R = 2: max(1, 1.69) / 2 = 0.845.
    """
    errors_N = (values_N - returns_N).square()
    if clip is None:
        return 0.5 * errors_N
    clipped_N = old_values_N + (values_N - old_values_N).clamp(-clip, clip)
    return 0.5 * torch.maximum(errors_N, (clipped_N - returns_N).square())

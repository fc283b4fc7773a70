"""Soft adaptive policy optimisation: a smooth gate in place of the clip."""

import torch

from common.config.algorithm import AlgorithmConfig
from services.trainer.losses.tokens import Ratio, Surrogate, unclipped

TEMPERATURE_POSITIVE, TEMPERATURE_NEGATIVE = 1.0, 1.05
"""The paper's: tokens with a negative advantage are gated a little harder. Also TRL's defaults."""


def sapo(ratio: Ratio, algorithm: AlgorithmConfig) -> Surrogate:
    """A * sigmoid(t (r - 1)) * 4 / t with t by the sign of A. Shapes [N].

    SAPO, arXiv 2511.20347: at r = 1 the gradient is that of PPO, and it fades on both sides
    instead of ending at a bound. r = 1 gives 2 A / t.
    """
    positive_N = torch.full_like(ratio.advantages_N, TEMPERATURE_POSITIVE)
    temperature_N = positive_N.masked_fill(ratio.advantages_N <= 0, TEMPERATURE_NEGATIVE)
    gate_N = torch.sigmoid(temperature_N * (ratio.ratio_N - 1.0)) * 4.0 / temperature_N
    return unclipped(gate_N * ratio.advantages_N)

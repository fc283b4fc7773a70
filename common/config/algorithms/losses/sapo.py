"""SAPO, arXiv 2511.20347."""

from typing import TYPE_CHECKING

from tidemill.common.config.algorithms.loss import Loss, Surrogate, Tokens

if TYPE_CHECKING:
    from tidemill.common.config.algorithm import AlgorithmConfig

TEMPERATURE_POSITIVE = 1.0
TEMPERATURE_NEGATIVE = 1.05
"""The paper's: tokens with a negative advantage are gated a little harder. Also TRL's defaults."""


def sapo(ratio: Tokens, algorithm: "AlgorithmConfig") -> Surrogate:
    """A * sigmoid(t (r - 1)) * 4 / t with t by the sign of A. Shapes [N].

    At r = 1 the gradient is that of PPO, and it fades on both sides instead of ending at a bound. r = 1 gives
    2 A / t.
    """
    advantages_N = ratio.advantages_N
    positive_N = advantages_N.new_full(advantages_N.shape, TEMPERATURE_POSITIVE)
    temperature_N = positive_N.masked_fill(advantages_N <= 0, TEMPERATURE_NEGATIVE)
    gate_N = (temperature_N * (ratio.ratio_N - 1.0)).sigmoid() * 4.0 / temperature_N
    return Surrogate(gate_N * advantages_N)


LOSSES = (
    Loss(
        name="sapo",
        surrogate=sapo,
        summary="a sigmoid gate around r = 1 (arXiv 2511.20347)",
        is_idle_at_one=True,
    ),
)

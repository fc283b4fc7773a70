"""VESPO, arXiv 2602.10693, section 3.4."""

import math
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from tidemill.common.config.algorithms.loss import MAX_LOG_RATIO, Loss, Surrogate, Tokens, sequence_sums
from tidemill.common.config.algorithms.settings import Settings
from tidemill.common.config.section import Section

if TYPE_CHECKING:
    from tidemill.common.config.algorithm import AlgorithmConfig

LEAST_LOG_WEIGHT = math.log(1e-8)
"""Lower bound of the logarithm of a sequence's ratio, as in TRL."""

Exponents = tuple[
    Annotated[float, Field(gt=0.0, le=100.0)],
    Annotated[float, Field(gt=0.0, le=100.0)],
]


class VespoConfig(Section):
    """The weight W^k exp(lambda (1 - W)) of a sequence with the ratio W (arXiv 2602.10693)."""

    positive: Exponents = (2.0, 3.0)
    """k and lambda where the advantage is not negative."""
    negative: Exponents = (3.0, 2.0)
    """The same where it is negative."""


class VespoSettings(Settings):
    """Settings of `vespo`."""

    vespo: VespoConfig = VespoConfig()


def vespo(ratio: Tokens, algorithm: "AlgorithmConfig") -> Surrogate:
    """phi(W) A logprob, with W the product of a sequence's ratios and phi(W) = W^k exp(lambda (1 - W)).

    In place of a clip, a smooth weight without gradient, which is 1 at W = 1 and fades on both sides; k and
    lambda depend on the sign of A. W = 2 with k = 2, lambda = 3: 4 exp(-3) = 0.1991.
    """
    config = VespoSettings.of(algorithm).vespo
    positive_power, positive_decay = config.positive
    negative_power, negative_decay = config.negative
    log_N = ratio.log_N.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    log_S = sequence_sums(log_N, ratio.sequence_N, ratio.num_sequences)
    log_weight_N = log_S.clamp(LEAST_LOG_WEIGHT, MAX_LOG_RATIO)[ratio.sequence_N]
    is_negative_N = ratio.advantages_N < 0
    shape = log_weight_N.shape
    power_N = log_weight_N.new_full(shape, positive_power).masked_fill(is_negative_N, negative_power)
    decay_N = log_weight_N.new_full(shape, positive_decay).masked_fill(is_negative_N, negative_decay)
    phi_N = (power_N * log_weight_N + decay_N * (1.0 - log_weight_N.exp())).exp()
    return Surrogate(phi_N * ratio.advantages_N * ratio.logprobs_N)


LOSSES = (
    Loss(
        name="vespo",
        surrogate=vespo,
        summary="A logprob, weighted by W^k exp(lambda (1 - W)) with W the ratio of the whole sequence to "
        "the rollout: a weight that fades on both sides of 1 (arXiv 2602.10693). `vespo.positive` and "
        "`vespo.negative` are k and lambda",
        level="sequence",
        weighs_by_rollout=True,
        settings=VespoSettings,
    ),
)

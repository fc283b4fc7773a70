"""CISPO, MiniMax-M1, arXiv 2506.13585."""

from typing import TYPE_CHECKING

from tidemill.common.config.algorithms.loss import Loss, Surrogate, Tokens

if TYPE_CHECKING:
    from tidemill.common.config.algorithm import AlgorithmConfig


def cispo(ratio: Tokens, algorithm: "AlgorithmConfig") -> Surrogate:
    """stop_gradient(clip(r, 1 - low, 1 + high)) * A * logprob. Shapes [N].

    Eq. 4 and 5. In place of PPO's clip, which silences tokens that have moved, every token keeps its gradient
    with a bounded weight. The paper leaves the lower bound open (`clip_low: 1`); TRL's `epsilon_high` is our
    1 + clip_high. r = 7, high = 4 weighs the token by 5.

    Counted as clipped is what the bound changed and PPO would have silenced as well.
    """
    ratio_N = ratio.ratio_N.detach()
    low = 1.0 - algorithm.clip_low
    high = 1.0 + algorithm.clip_high
    return Surrogate(
        ratio_N.clamp(low, high) * ratio.advantages_N * ratio.logprobs_N,
        is_low_N=(ratio_N < low) & (ratio.advantages_N < 0),
        is_high_N=(ratio_N > high) & (ratio.advantages_N > 0),
    )


LOSSES = (
    Loss(
        name="cispo",
        surrogate=cispo,
        summary="clip(r) without gradient, times A logprob: weights are bounded, no token is silenced",
        weighs_by_rollout=True,
    ),
)

"""PPO's clipped objective, arXiv 1707.06347."""

from typing import TYPE_CHECKING

from tidemill.common.config.algorithms.loss import Loss, Surrogate, Tokens, clipped_surrogate

if TYPE_CHECKING:
    from tidemill.common.config.algorithm import AlgorithmConfig


def ppo(ratio: Tokens, algorithm: "AlgorithmConfig") -> Surrogate:
    """The clipped objective of each token by its own ratio (`clipped_surrogate`). Shapes [N].

    r = 1.5, A = 2, `clip_high` = 0.28: min(3, 1.28 * 2) = 2.56.
    """
    return clipped_surrogate(ratio.ratio_N, ratio.advantages_N, algorithm)


LOSSES = (
    Loss(
        name="ppo",
        surrogate=ppo,
        summary="min(r A, clip(r, 1 - `clip_low`, 1 + `clip_high`) A), and at least c A where A < 0, with c "
        "= `dual_clip`",
        has_dual_clip=True,
    ),
)

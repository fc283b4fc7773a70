"""GRPO with the deviation of the mini-batch, arXiv 2508.08221."""

from tidemill.common.config.algorithms.advantage import (
    Advantage,
    RewardGroups,
    finite_rewards,
    joined,
    of_batch,
    scaled,
)
from tidemill.common.config.algorithms.advantages.dr_grpo import dr_grpo
from tidemill.common.wire.arrays import Float64


def grpo_batch(groups: RewardGroups) -> Float64:
    """(r - mean of the group) / (std of all rewards + 1e-4). Shape [N].

    TRL's `scale_rewards="batch"`: the deviation of many groups does not blow up a group that is nearly always
    right or wrong. Groups 1, 0 and 3, 0: all four have mean 1 and variance 6/3, so +-0.5 and +-1.5 are
    divided by 1.41421 + 1e-4: 0.35353, -0.35353, 1.06059, -1.06059.
    """
    centred = joined(map(dr_grpo, groups))
    rewards = joined(map(finite_rewards, groups))
    return scaled(centred, rewards)


ADVANTAGES = (
    Advantage(
        name="grpo_batch",
        estimate=of_batch(grpo_batch),
        summary="(r - mean of the group) / (std of the mini-batch's rewards + 1e-4) (arXiv 2508.08221)",
        scope="batch",
    ),
)

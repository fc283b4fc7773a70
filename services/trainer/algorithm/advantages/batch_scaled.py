"""Advantages that are centred in their group and scaled by something of the whole mini-batch.

Legend: a list of groups, each with its rewards; the result has one float64 for each completion, [N], in
order. As in `estimators`, equal rewards of a group give exactly zero, and a group of one gives zero.
"""

from collections.abc import Sequence

import numpy as np

from tidemill.services.trainer.algorithm.advantages.episode import Float64s, finite_rewards
from tidemill.services.trainer.algorithm.advantages.estimators import STD_EPSILON, dr_grpo, grpo

RewardGroups = Sequence[Sequence[float]]


def grpo_batch(groups: RewardGroups) -> Float64s:
    """(r - mean of the group) / (std of all rewards + 1e-4). Shape [N].

    arXiv 2508.08221, TRL's `scale_rewards="batch"`: the deviation of many groups does not blow up a group
    that is nearly always right or wrong. Groups 1, 0 and 3, 0: all four have mean 1 and variance 6/3, so
    +-0.5 and +-1.5 are divided by 1.41421 + 1e-4: 0.35353, -0.35353, 1.06059, -1.06059.

    Raises:
        ValueError: a reward is not finite.
    """
    return _scaled(_centred(groups), _joined([finite_rewards(rewards) for rewards in groups]))


def scale_rl(groups: RewardGroups) -> Float64s:
    """(r - mean of the group) / (std of all those differences + 1e-4). Shape [N].

    ScaleRL, arXiv 2510.13786: unlike `grpo_batch`, the deviation is without that between prompts. Groups 1, 0
    and 3, 0: +-0.5 and +-1.5 have the variance 5/3, so they are divided by 1.29099 + 1e-4.

    Raises:
        ValueError: a reward is not finite.
    """
    centred_N = _centred(groups)
    return _scaled(centred_N, centred_N)


def gpg(groups: RewardGroups) -> Float64s:
    """N / (completions of groups whose rewards differ) * (r - mean of the group). Shape [N].

    GPG, arXiv 2504.02546, with F_norm = 1: groups without a gradient take no weight from the others. Groups
    1, 0 and 1, 1: 4 / 2 * (0.5, -0.5) = 1, -1, and 0, 0. verl's `gpg` divides by the number of rewards that
    are not 0 instead.

    Raises:
        ValueError: a reward is not finite.
    """
    centred = [dr_grpo(rewards) for rewards in groups]
    num_teaching = sum(len(values) for values in centred if values.any())
    centred_N = _joined(centred)
    return centred_N * (len(centred_N) / num_teaching) if num_teaching else centred_N


def gdpo(groups: Sequence[Sequence[Sequence[float | None]]], weights: Sequence[float]) -> Float64s:
    """whiten(sum over rewards of w_k * grpo(r_k in the group)). Shape [N].

    GDPO, arXiv 2601.05242, eq. 4 to 6: `groups` has the K rewards of each completion. Each reward is compared
    within its group by itself, so that none drowns in another's spread; the weighted sums x are then brought
    to (x - mean) / (std + 1e-4) over the mini-batch. A reward that does not apply to a completion (None) is
    left out of its sum and of the group's mean and deviation, as in TRL; a completion without any gets 0.

    One group, two completions with rewards (1, 0) and (0, 0), weights 1 and 2: the first reward gives
    +-0.70701, the second 0; mean 0, deviation 0.99986: +-0.70704.

    Raises:
        ValueError: a reward is not finite.
    """
    sums = _joined([_weighted(rewards, weights) for rewards in groups])
    is_scored_N = np.array(
        [any(one is not None for one in rewards) for group in groups for rewards in group], dtype=np.bool_
    )
    scored = sums[is_scored_N]
    advantages_N = np.zeros_like(sums)
    if len(scored) > 1 and not (scored == scored[0]).all():
        advantages_N[is_scored_N] = _scaled(scored - scored.mean(), scored)
    return advantages_N


def _weighted(rewards: Sequence[Sequence[float | None]], weights: Sequence[float]) -> Float64s:
    """The weighted sum of a group's normalised rewards. Shape [G]."""
    total_G = np.zeros(len(rewards))
    for k, weight in enumerate(weights):
        column = [(place, one) for place, parts in enumerate(rewards) if (one := parts[k]) is not None]
        if column:
            # A reward of one completion alone gives 0 here: `grpo` has nothing to compare it with.
            total_G[[place for place, _ in column]] += weight * grpo([one for _, one in column])
    return total_G


def _centred(groups: RewardGroups) -> Float64s:
    return _joined([dr_grpo(rewards) for rewards in groups])


def _scaled(values_N: Float64s, spread: Float64s) -> Float64s:
    """The values divided by the unbiased deviation of `spread`; zeros stay zeros."""
    if not values_N.any():
        return values_N
    scaled_N: Float64s = values_N / (spread.std(ddof=1) + STD_EPSILON)
    return scaled_N


def _joined(arrays: Sequence[Float64s]) -> Float64s:
    return np.concatenate([np.zeros(0), *arrays])

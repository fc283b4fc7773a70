"""Advantages as pure functions: relative to the group, scaled by a statistic of the whole mini-batch,
REINFORCE++, and generalised advantage estimation.

Group-relative advantages sum to zero up to rounding; equal rewards give exactly zero, not rounding noise
blown up by a tiny deviation; a group of one gives zero, for it has nothing to compare with. In GAE (arXiv
1506.02438) and REINFORCE++ (arXiv 2501.03262) a token is the action. All of them raise ValueError where a
reward is not finite.

Shape legend: G completions of a group, N of all groups of a mini-batch, in order, A trained tokens.
"""

from collections.abc import Iterable, Sequence
from math import comb

import numpy as np
from numpy.typing import NDArray

from tidemill.common.wire.arrays import Float64

Rewards = Sequence[float | None] | NDArray[np.floating]
RewardGroups = Sequence[Sequence[float]]
Discount = float | Float64
"""One discount for all tokens of a sequence, or one for each, [A]."""

STD_EPSILON = 1e-4
"""Added to the standard deviation; TRL's value."""
VARIANCE_EPSILON = 1e-8
"""Added to the variance; verl's value."""


def finite_rewards(rewards: Rewards) -> Float64:
    """The rewards as an array [G] of float64.

    Raises:
        ValueError: a reward is None, NaN or infinite. Failed scores are dropped before, never guessed.
    """
    values = [float("nan") if reward is None else float(reward) for reward in rewards]
    rewards_G = np.asarray(values, dtype=np.float64)
    bad = np.flatnonzero(~np.isfinite(rewards_G))
    if len(bad):
        raise ValueError(
            f"reward {int(bad[0])} of {len(values)} is {rewards[int(bad[0])]}; all must be finite: "
            "leave out trajectories without one"
        )
    return rewards_G


def whiten(values: Sequence[Float64]) -> list[Float64]:
    """(x - mean) / sqrt(var + 1e-8) over all entries of all arrays, which keep their shapes.

    The variance is the unbiased one, as in verl. Fewer than two entries, or equal ones, give exactly zero.
    Arrays [1, 1] and [4] have mean 2 and variance 3: -0.57735, -0.57735 and 1.1547.
    """
    joined = _joined(values)
    # Compared exactly: the variance of equal floats may be a rounding error, and be divided by.
    if len(joined) < 2 or (joined == joined[0]).all():
        return [np.zeros_like(value) for value in values]
    mean, deviation = joined.mean(), np.sqrt(joined.var(ddof=1) + VARIANCE_EPSILON)
    return [(value - mean) / deviation for value in values]


def dr_grpo(rewards: Rewards) -> Float64:
    """r - mean(r). Shape [G], float64. Dr. GRPO, arXiv 2503.20783.

    Without the division by the deviation, which weighs very easy and very hard prompts more. Rewards 2, 0, 1,
    1 give 1, -1, 0, 0.
    """
    rewards_G = finite_rewards(rewards)
    # Compared exactly: the mean of equal floats may be off by one rounding, and 1e-17 / 1e-4 is not zero.
    if len(rewards_G) < 2 or (rewards_G == rewards_G[0]).all():
        return np.zeros_like(rewards_G)
    return rewards_G - rewards_G.mean()  # type: ignore[no-any-return]


def grpo(rewards: Rewards) -> Float64:
    """(r - mean(r)) / (std(r) + 1e-4). Shape [G], float64. GRPO, arXiv 2402.03300, outcome supervision.

    The standard deviation is the unbiased one (divisor G - 1), as in TRL; the paper does not say which.
    Rewards 1, 0, 0, 1 have mean 0.5 and std 0.57735, which gives +-0.86588.
    """
    return _scaled(dr_grpo(rewards), finite_rewards(rewards))


def rloo(rewards: Rewards) -> Float64:
    """r_i - mean of the other rewards = G / (G - 1) * (r_i - mean(r)). Shape [G], float64.

    RLOO, arXiv 2402.14740: a baseline that does not depend on the completion itself, so the policy gradient
    stays unbiased. Rewards 1, 0, 0, 1 give 2/3, -2/3, -2/3, 2/3. Equal rewards and a group of one give
    exactly zero.
    """
    centred_G = dr_grpo(rewards)
    num_rewards = len(centred_G)
    return centred_G * (num_rewards / (num_rewards - 1)) if num_rewards > 1 else centred_G


def opo(rewards: Rewards, lengths: Sequence[int]) -> Float64:
    """r - sum(l r) / sum(l), with l the number of trained tokens. Shape [G], float64.

    OPO, arXiv 2505.23585: the baseline of least variance where a gradient's norm grows with the completion's
    length. Rewards 1, 0, 0 of lengths 2, 1, 1 have the baseline 2/4: 0.5, -0.5, -0.5. Where no completion has
    a trained token, all lengths count as 1.

    Raises:
        ValueError: a reward is not finite, or there is no length for it.
    """
    rewards_G = finite_rewards(rewards)
    if len(lengths) != len(rewards_G):
        raise ValueError(f"{len(rewards_G)} rewards but {len(lengths)} lengths")
    if len(rewards_G) < 2 or (rewards_G == rewards_G[0]).all():
        return np.zeros_like(rewards_G)
    lengths_G = np.asarray(lengths, dtype=np.float64) if any(lengths) else np.ones(len(rewards_G))
    baseline = (lengths_G * rewards_G).sum() / lengths_G.sum()
    return rewards_G - baseline  # type: ignore[no-any-return]


def max_rl(rewards: Rewards) -> Float64:
    """(r - mean(r)) / m with m = max(mean(r), max(|r|) / G). Shape [G], float64. MaxRL, arXiv 2602.02710.

    With rewards of 0 and 1 the mean over a group is the gradient of the likelihood of a success, to the order
    G, in place of that of its probability: a prompt that is solved once in ten counts ten times as much. Made
    for rewards that are not negative, whose mean is at least the largest over G, so that m is the paper's
    mean. With rewards below 0 (a length penalty, KL in the reward) the mean may be as small as it likes, and
    m bounds advantages by 2 G. Where the mean is not above 0, all are zero. Rewards 1, 0, 0, 0 give 3, -1,
    -1, -1; rewards 1, -0.75, 0 have the mean 1/12 and m = 1/3: 2.75, -2.5, -0.25.
    """
    centred_G = dr_grpo(rewards)
    rewards_G = finite_rewards(rewards)
    if not len(rewards_G) or (mean := rewards_G.mean()) <= 0.0:
        return np.zeros_like(centred_G)
    scaled_G: Float64 = centred_G / max(mean, np.abs(rewards_G).max() / len(rewards_G))
    return scaled_G


def dr_grpo_passk(rewards: Rewards) -> Float64:
    """The best completion's lead over the second best; zero for all others. Shape [G], float64.

    arXiv 2503.19595: the greatest reward of all, less that of the group without the completion. It rewards
    the best of G, and only a best one that no other equals. Rewards 3, 1, 0 give 2, 0, 0.
    """
    rewards_G = finite_rewards(rewards)
    advantages_G = np.zeros_like(rewards_G)
    if len(rewards_G) > 1:
        second, best = np.argsort(rewards_G, kind="stable")[-2:]
        advantages_G[best] = rewards_G[best] - rewards_G[second]
    return advantages_G


def grpo_passk(rewards: Rewards) -> Float64:
    """`dr_grpo_passk` / (std(r) + 1e-4), with the deviation of `grpo`. Shape [G], float64.

    Rewards 3, 1, 0 have the variance 7/3: 2 / (1.52753 + 1e-4) = 1.30922, 0, 0.
    """
    return _scaled(dr_grpo_passk(rewards), finite_rewards(rewards))


def remax(rewards: Rewards, baseline: float) -> Float64:
    """r - reward of the greedy completion. Shape [G], float64. ReMax, arXiv 2310.10505, eq. 4.

    The baseline needs no siblings and no value head, only one more completion a prompt, which is not trained.
    Rewards 1, 0 beside a greedy one of 0.25 give 0.75, -0.25.
    """
    rewards_G: Float64 = finite_rewards(rewards) - finite_rewards([baseline])
    return rewards_G


def pass_at_k(rewards: Rewards, k: int, threshold: float = 0.5) -> Float64:
    """Analytic pass@k advantages. Shape [G], float64.

    With n of G rewards below `threshold`, a set of k succeeds with probability p = 1 - C(n, k) / C(G, k), and
    rewards of sets have the deviation s = sqrt(p (1 - p)). A success belongs to sets that all succeed: (1 -
    p) / s. A failure belongs to sets that fail where the other k - 1 do: (1 - p - C(n - 1, k - 1) / C(G - 1,
    k - 1)) / s. Where every set has one outcome (p is 0 or 1), all are zero. k = 1 is GRPO with the biased
    deviation. A group that has lost samples and is smaller than k counts as one set.

    G = 4, k = 2, one success: n = 3, p = 1 - 3/6 = 0.5, s = 0.5; the success gets 1, a failure (0.5 - 2/3) /
    0.5 = -1/3.

    Raises:
        ValueError: a reward is not finite, or k is below 1.
    """
    if k < 1:
        raise ValueError(f"k is {k}; pass@k needs at least 1")
    rewards_G = finite_rewards(rewards)
    size = len(rewards_G)
    k = min(k, size)
    is_success_G = rewards_G >= threshold
    failures = int((~is_success_G).sum())
    if size < 2 or failures in (0, size) or failures < k:
        return np.zeros_like(rewards_G)
    # Whole numbers, divided once: a product of ratios would round at each of them.
    fail = comb(failures, k) / comb(size, k)
    deviation = (fail * (1.0 - fail)) ** 0.5
    fail_given_failure = comb(failures - 1, k - 1) / comb(size - 1, k - 1)
    return np.where(is_success_G, fail / deviation, (fail - fail_given_failure) / deviation)


def gae(
    rewards_A: Float64, values_A: Float64, gamma: Discount = 1.0, gae_lambda: float = 1.0
) -> tuple[Float64, Float64]:
    """Advantages and returns of one sequence's A trained tokens. Shapes [A], float64.

    Eq. 16 as a recursion: d_t = r_t + gamma V_{t+1} - V_t and A_t = d_t + gamma lambda A_{t+1}; the value
    after the last token is 0, for the sequence is over (also one that was cut off at its limit). Returns, the
    value head's targets, are A_t + V_t. `values_A[t]` is the estimate before token t is chosen; tokens that
    are not trained (a tool's output) are no actions and are passed over. `gamma` is one number, or one [A]
    for the step from each token to the next.

    Rewards 0, 1, values 0.5, 0.25, gamma 1, lambda 0.5: d = -0.25, 0.75; A = 0.125, 0.75; returns 0.625, 1.

    Raises:
        ValueError: as many values as rewards are needed.
    """
    if rewards_A.shape != values_A.shape:
        raise ValueError(f"{len(rewards_A)} rewards but {len(values_A)} values")
    advantages = [0.0] * len(rewards_A)
    following_value = following_advantage = 0.0
    gammas = np.broadcast_to(gamma, rewards_A.shape).tolist()
    # Python's floats are the same float64, and a loop over them is faster than over numpy's.
    steps = list(zip(rewards_A.tolist(), values_A.tolist(), gammas, strict=True))
    for t, (reward, value, discount) in reversed(list(enumerate(steps))):
        delta = reward + discount * following_value - value
        following_advantage = delta + discount * gae_lambda * following_advantage
        advantages[t], following_value = following_advantage, value
    advantages_A = np.array(advantages, dtype=np.float64)
    return advantages_A, advantages_A + values_A


def reinforce_plus_plus(
    token_rewards: Sequence[Float64], gammas: Sequence[Discount] | None = None
) -> list[Float64]:
    """whiten(G_t) with G_t = r_t + gamma G_{t+1}. N arrays [A], float64.

    Token rewards hold the KL penalty of each token (k1, by `kl.place: reward`), rewards of single turns at
    their last tokens, and the rest of the sequence's at its own. `gammas` has a discount for each sequence,
    1 without. Rewards 1 and 0 of sequences of 1 and 2 tokens: returns [1], [0, 0], mean 1/3, variance
    1/3; advantages [1.1547], [-0.57735, -0.57735].
    """
    discounts = gammas or [1.0] * len(token_rewards)
    return whiten([returns(*pair) for pair in zip(token_rewards, discounts, strict=True)])


def reinforce_plus_plus_baseline(
    groups: Sequence[Sequence[float]], lengths: Sequence[Sequence[int]]
) -> list[Float64]:
    """whiten(r - mean of the group). N arrays [A], one value repeated, float64.

    `lengths` are the numbers of trained tokens, which weigh the mean and the deviation.
    """
    centred = [dr_grpo(rewards) for rewards in groups]
    return whiten(
        [
            np.full(length, value)
            for values, counts in zip(centred, lengths, strict=True)
            for value, length in zip(values, counts, strict=True)
        ]
    )


def returns(rewards_A: Float64, gamma: Discount) -> Float64:
    """Discounted sums of a token's reward and all later ones. Shape [A]. `gamma` as in `gae`.

    Without a discount, rewards 0, 0, 1 give exactly 1, 1, 1.
    """
    result, following = [0.0] * len(rewards_A), 0.0
    gammas = np.broadcast_to(gamma, rewards_A.shape).tolist()
    for t, reward in reversed(list(enumerate(rewards_A.tolist()))):
        following = reward + gammas[t] * following
        result[t] = following
    return np.array(result, dtype=np.float64)


def grpo_batch(groups: RewardGroups) -> Float64:
    """(r - mean of the group) / (std of all rewards + 1e-4). Shape [N].

    arXiv 2508.08221, TRL's `scale_rewards="batch"`: the deviation of many groups does not blow up a group
    that is nearly always right or wrong. Groups 1, 0 and 3, 0: all four have mean 1 and variance 6/3, so
    +-0.5 and +-1.5 are divided by 1.41421 + 1e-4: 0.35353, -0.35353, 1.06059, -1.06059.
    """
    return _scaled(_joined(map(dr_grpo, groups)), _joined(map(finite_rewards, groups)))


def scale_rl(groups: RewardGroups) -> Float64:
    """(r - mean of the group) / (std of all those differences + 1e-4). Shape [N].

    ScaleRL, arXiv 2510.13786: unlike `grpo_batch`, the deviation is without that between prompts. Groups 1, 0
    and 3, 0: +-0.5 and +-1.5 have the variance 5/3, so they are divided by 1.29099 + 1e-4.
    """
    centred_N = _joined(map(dr_grpo, groups))
    return _scaled(centred_N, centred_N)


def gpg(groups: RewardGroups) -> Float64:
    """N / (completions of groups whose rewards differ) * (r - mean of the group). Shape [N].

    GPG, arXiv 2504.02546, with F_norm = 1: groups without a gradient take no weight from the others. Groups
    1, 0 and 1, 1: 4 / 2 * (0.5, -0.5) = 1, -1, and 0, 0. verl's `gpg` divides by the number of rewards that
    are not 0 instead.
    """
    centred = [dr_grpo(rewards) for rewards in groups]
    num_teaching = sum(len(values) for values in centred if values.any())
    centred_N = _joined(centred)
    return centred_N * (len(centred_N) / num_teaching) if num_teaching else centred_N


def gdpo(groups: Sequence[Sequence[Sequence[float | None]]], weights: Sequence[float]) -> Float64:
    """whiten(sum over rewards of w_k * grpo(r_k in the group)). Shape [N].

    GDPO, arXiv 2601.05242, eq. 4 to 6: `groups` has the K rewards of each completion. Each reward is
    normalised within its group by itself, so that one with a large spread does not hide the others; the
    weighted sums x are then brought to (x - mean) / (std + 1e-4) over the mini-batch. A reward that does not
    apply to a completion (None) is left out of its sum and of the group's mean and deviation, as in TRL; a
    completion without any gets 0.

    One group, two completions with rewards (1, 0) and (0, 0), weights 1 and 2: the first reward gives
    +-0.70701, the second 0; mean 0, deviation 0.99986: +-0.70704.
    """
    sums = _joined(_weighted(rewards, weights) for rewards in groups)
    is_scored_N = np.array(
        [any(one is not None for one in rewards) for group in groups for rewards in group], dtype=np.bool_
    )
    scored = sums[is_scored_N]
    advantages_N = np.zeros_like(sums)
    if len(scored) > 1 and not (scored == scored[0]).all():
        advantages_N[is_scored_N] = _scaled(scored - scored.mean(), scored)
    return advantages_N


def _weighted(rewards: Sequence[Sequence[float | None]], weights: Sequence[float]) -> Float64:
    """The weighted sum of a group's normalised rewards. Shape [G]."""
    total_G = np.zeros(len(rewards))
    for k, weight in enumerate(weights):
        column = [(place, one) for place, parts in enumerate(rewards) if (one := parts[k]) is not None]
        if column:
            # A reward that only one completion has gives 0 here: `grpo` has nothing to compare it with.
            total_G[[place for place, _ in column]] += weight * grpo([one for _, one in column])
    return total_G


def _scaled(values: Float64, spread: Float64) -> Float64:
    """The values divided by the unbiased deviation of `spread`; zeros stay zeros."""
    if not values.any():
        return values
    scaled: Float64 = values / (spread.std(ddof=1) + STD_EPSILON)
    return scaled


def _joined(arrays: Iterable[Float64]) -> Float64:
    return np.concatenate([np.zeros(0), *arrays])

"""What an advantage is: its estimator, what follows from its name, and arithmetic that several share.

An estimator is a pure function of the groups of a call: of one, or of all of a mini-batch (`scope`). It gives
one number for each sample, or an array with one for each of its trained tokens. Equal rewards give exactly
zero, not rounding noise blown up by a tiny deviation; a group of one gives zero, for it has nothing to
compare with. A reward that is not finite is a ValueError.

Shape legend: G completions of a group, N of all groups of a call, in order, A trained tokens of a completion.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from tidemill.common.config.algorithms.settings import Algorithm
from tidemill.common.wire.arrays import Float64

if TYPE_CHECKING:
    from tidemill.common.config.algorithm import AlgorithmConfig

Rewards = Sequence[float | None] | NDArray[np.floating]
RewardGroups = Sequence[Sequence[float]]
Discount = float | Float64
"""One discount for all tokens of a sequence, or one for each, [A]."""
Values = list[float | Float64]
"""For each sample one number, or one for each of its trained tokens, [A]."""

STD_EPSILON = 1e-4
"""Added to the standard deviation; TRL's value."""
VARIANCE_EPSILON = 1e-8
"""Added to the variance; verl's value."""


class GroupRewards(Protocol):
    """What an estimator sees of a group of G completions.

    Example: `rewards` [1.0, 0.0] of completions with `lengths` [7, 9].
    """

    @property
    def rewards(self) -> list[float]:
        """[G] shaped rewards: scores less penalties."""

    @property
    def lengths(self) -> list[int]:
        """[G] numbers of trained tokens."""

    @property
    def greedy_reward(self) -> float:
        """Reward of the greedy completion, where there is one, else 0."""

    @property
    def token_rewards(self) -> list[Float64]:
        """G arrays [A]: the shaped reward at the trained tokens."""

    @property
    def values(self) -> list[Float64]:
        """G arrays [A] of a value head; only with `needs_values`."""

    @property
    def discounts(self) -> list[Discount]:
        """[G] discounts of the step from each token to the next."""

    @property
    def has_turn_rewards(self) -> bool:
        """Whether single turns have rewards."""

    @property
    def components(self) -> list[list[float | None]]:
        """[G][K] single rewards of `reward.rewards` before shaping; None: does not apply."""

    @property
    def weights(self) -> Sequence[float]:
        """[K] weights of these."""


Estimator = Callable[[Sequence[GroupRewards], "AlgorithmConfig"], Values]


@dataclass(frozen=True, kw_only=True)
class AdvantageTraits:
    """What follows from an advantage, apart from its numbers.

    Example: `remax` compares a group with its first sample, which is greedy: `has_greedy_baseline`, and all
    else as it stands below.
    """

    scope: Literal["group", "batch"] = "group"
    """Computed for one group, or for all groups of an optimizer update, which then waits for its last
    group."""
    compares_siblings: bool = True
    """Compares a completion with the others of its group: in a group of one, the advantage is 0."""
    has_discount: bool = False
    """Uses rewards of single tokens, so that `gamma` has a meaning."""
    has_greedy_baseline: bool = False
    """The first sample of a group is greedy: the others are compared with it, and it is not trained."""
    compares_rewards: bool = False
    """Compares each reward of `reward.rewards` by itself, before anything shapes their sum."""
    is_binary: bool = False
    """Only asks whether rewards reach `success_threshold`."""
    needs_values: bool = False
    """Needs a value head; with `value.whiten: false` its scope is the group."""
    set_size: Callable[["AlgorithmConfig"], tuple[str, int]] | None = None
    """The setting that says how many completions of a group it compares as a set, and its value."""


@dataclass(frozen=True, kw_only=True)
class Advantage(AdvantageTraits, Algorithm):
    """A built-in advantage.

    Example: `dr_grpo`, whose `estimate` makes 1, -1, 0, 0 of rewards 2, 0, 1, 1; its traits are the defaults.
    """

    estimate: Estimator


def of_groups(function: Callable[[GroupRewards, "AlgorithmConfig"], Float64]) -> Estimator:
    """An estimator from a function of one group that gives one number for each completion."""

    def estimate(groups: Sequence[GroupRewards], algorithm: "AlgorithmConfig") -> Values:
        return [float(value) for group in groups for value in function(group, algorithm)]

    return estimate


def of_rewards(function: Callable[[list[float]], Float64]) -> Estimator:
    """An estimator from a function of the rewards of one group that gives one number for each."""
    return of_groups(lambda group, _: function(group.rewards))


def of_batch(function: Callable[[list[list[float]]], Float64]) -> Estimator:
    """An estimator from a function of the rewards of all groups of a mini-batch that gives one number for
    each."""

    def estimate(groups: Sequence[GroupRewards], algorithm: "AlgorithmConfig") -> Values:
        return list(map(float, function([group.rewards for group in groups])))

    return estimate


def of_sequences(advantages: Sequence[Float64]) -> Values:
    """One number for each sequence whose tokens all have the same."""
    return [float(values_A[0]) if len(values_A) else 0.0 for values_A in advantages]


def finite_rewards(rewards: Rewards) -> Float64:
    """The rewards as an array [G] of float64.

    Raises:
        ValueError: a reward is None, NaN or infinite. Failed scores are dropped before, never guessed.
    """
    values = [float("nan") if reward is None else float(reward) for reward in rewards]
    rewards_G = np.asarray(values, dtype=np.float64)
    is_finite_G = np.isfinite(rewards_G)
    if not is_finite_G.all():
        bad = int(is_finite_G.argmin())
        raise ValueError(
            f"reward {bad} of {len(values)} is {rewards[bad]}; all must be finite: leave out trajectories "
            "without one"
        )
    return rewards_G


def whiten(values: Sequence[Float64]) -> list[Float64]:
    """(x - mean) / sqrt(var + 1e-8) over all entries of all arrays, which keep their shapes.

    The variance is the unbiased one, as in verl. Fewer than two entries, or equal ones, give exactly zero.
    Arrays [1, 1] and [4] have mean 2 and variance 3: -0.57735, -0.57735 and 1.1547.
    """
    all_values = joined(values)
    # Compared exactly: the variance of equal floats may be a rounding error, and be divided by.
    if len(all_values) < 2 or (all_values == all_values[0]).all():
        return [np.zeros_like(value) for value in values]
    mean = all_values.mean()
    deviation = np.sqrt(all_values.var(ddof=1) + VARIANCE_EPSILON)
    return [(value - mean) / deviation for value in values]


def returns(rewards_A: Float64, gamma: Discount) -> Float64:
    """Discounted sums of a token's reward and all later ones. Shape [A]. `gamma` is one number, or one [A]
    for the step from each token to the next.

    Without a discount, rewards 0, 0, 1 give exactly 1, 1, 1.
    """
    sums = [0.0] * len(rewards_A)
    later = 0.0
    gammas = np.broadcast_to(gamma, rewards_A.shape).tolist()
    for t, reward in reversed(list(enumerate(rewards_A.tolist()))):
        later = reward + gammas[t] * later
        sums[t] = later
    return np.array(sums, dtype=np.float64)


def scaled(values: Float64, spread: Float64) -> Float64:
    """values / (std of `spread` + 1e-4), with the unbiased deviation; zeros stay zeros."""
    if not values.any():
        return values
    quotients: Float64 = values / (spread.std(ddof=1) + STD_EPSILON)
    return quotients


def joined(arrays: Iterable[Float64]) -> Float64:
    """The arrays end to end."""
    return np.concatenate([np.zeros(0), *arrays])

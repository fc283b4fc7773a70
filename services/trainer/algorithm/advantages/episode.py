"""What advantages are computed from: one completion's reward, spread over its trained tokens.

Guarantee: the score of the reward service stays what it was (`Sample.reward`, and every metric of it). The
overlong punishment and the KL penalty exist here only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tidemill.common.config.algorithm import AlgorithmConfig
from tidemill.common.config.algorithm_sections import KlConfig
from tidemill.services.trainer.groups.samples import Sample

Rewards = Sequence[float | None] | NDArray[np.floating]


def finite_rewards(rewards: Rewards) -> NDArray[np.float64]:
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


VARIANCE_EPSILON = 1e-8
"""Added to the variance; verl's value."""

Float64s = NDArray[np.float64]
Discount = float | Float64s
"""One for all tokens of a sequence, or one for each, [A]."""


def whiten(values: Sequence[Float64s]) -> list[Float64s]:
    """(x - mean) / sqrt(var + 1e-8) over all entries of all arrays, which keep their shapes.

    The variance is the unbiased one, as in verl. Fewer than two entries, or equal ones, give exactly zero.
    Arrays [1, 1] and [4] have mean 2 and variance 3: -0.57735, -0.57735 and 1.1547.
    """
    joined = np.concatenate([np.zeros(0), *values])
    # Compared exactly: the variance of equal floats may be a rounding error, and be divided by.
    if len(joined) < 2 or (joined == joined[0]).all():
        return [np.zeros_like(value) for value in values]
    mean, deviation = joined.mean(), np.sqrt(joined.var(ddof=1) + VARIANCE_EPSILON)
    return [(value - mean) / deviation for value in values]


def overlong_penalty(num_tokens: int, max_tokens: int, buffer_tokens: float, penalty: float) -> float:
    """What is added to the reward of a completion of `num_tokens`: in [-penalty, 0].

    DAPO, arXiv 2503.14476, eq. 13: 0 up to max - buffer, then falling linearly to -penalty at max. The limit
    belongs to the rollout, so no completion is longer. 100 tokens at most, a buffer of 20 and penalty 1: 90
    tokens give -0.5.
    """
    over = num_tokens - (max_tokens - buffer_tokens)
    return -penalty * min(1.0, over / buffer_tokens) if over > 0 else 0.0


def length_penalties(samples: Sequence[Sample], algorithm: AlgorithmConfig) -> list[float]:
    """What is taken off the reward of each sample of a group for its length, relative to the group's longest.

    weight * pass rate * length / longest, for tokens and for turns; the pass rate is the share of scores of
    at least `success_threshold`. Nobody pays where nothing was solved, so exploring stays free. Scores 1, 1,
    0, 0 of 10, 5, 20, 20 tokens and a weight of 0.2: 0.05, 0.025, 0.1, 0.1.
    """
    penalty = algorithm.length_penalty
    if not penalty.is_on or not samples:
        return [0.0] * len(samples)
    is_success_G = np.array([sample.reward >= algorithm.success_threshold for sample in samples])
    tokens_G = np.array([sample.num_trained for sample in samples], dtype=np.float64)
    turns_G = np.array([max(len(sample.turns), 1) for sample in samples], dtype=np.float64)
    # All completions may be without a trained token.
    shares_G = penalty.tokens * tokens_G / max(tokens_G.max(), 1.0) + penalty.turns * turns_G / turns_G.max()
    paid_G = is_success_G if penalty.of == "successes" else np.ones(len(samples))
    costs: list[float] = (is_success_G.mean() * shares_G * paid_G).tolist()
    return costs


class Part(NamedTuple):
    """One of several rewards of a completion: its weight, and its value; None where it does not apply."""

    weight: float
    value: float | None


def overlong_reward(sample: Sample, algorithm: AlgorithmConfig, max_tokens: int) -> float:
    """The score, less the overlong punishment for the tokens that the model wrote: what an environment says
    is not the model's, and where a history was split into segments changes nothing."""
    overlong = algorithm.overlong
    return sample.reward + overlong_penalty(
        sample.num_trained, max_tokens, overlong.buffer_share * max_tokens, overlong.penalty
    )


@dataclass(frozen=True, slots=True, eq=False)
class Episode:
    """A sample with its shaped reward: `reward` is the sum of `token_rewards_A`, over A trained tokens.

    A sequence without trained tokens keeps its reward for the group's mean, and has no token rewards.
    """

    sample: Sample
    reward: float
    token_rewards_A: Float64s
    parts: tuple["Part", ...] = ()
    """The score's named rewards, before any shaping, where the advantage looks at each by itself."""
    baseline: float = 0.0
    """The reward of the group's greedy sample, less what it pays for being overlong; 0 without one."""

    @property
    def num_trained(self) -> int:
        return len(self.token_rewards_A)

    @property
    def has_turn_rewards(self) -> bool:
        """Whether the environment rewarded single turns."""
        return any(turn.reward for turn in self.sample.turns)

    @property
    def values_A(self) -> Float64s:
        """The value head's estimates at the trained tokens."""
        assert self.sample.values is not None, "`Policy.precompute` comes before advantages"
        return self.sample.values[self.sample.mask].astype(np.float64)

    def discounts(self, algorithm: AlgorithmConfig) -> Discount:
        """What the step from each token to the next is discounted by: `gamma`, or where that is per turn, 1
        within a turn and `gamma` from its last token on. One number, or [A]."""
        if algorithm.gamma_per == "token" or algorithm.gamma == 1.0:
            return algorithm.gamma
        turn_A = self.sample.turn_A
        # The last token ends its turn; a sequence without tokens has none.
        is_last_A = np.append(turn_A[1:] != turn_A[:-1], np.ones(min(len(turn_A), 1), dtype=np.bool_))
        return np.where(is_last_A, algorithm.gamma, 1.0)


def make_episode(
    sample: Sample,
    algorithm: AlgorithmConfig,
    max_tokens: int,
    parts: tuple[Part, ...] = (),
    length_penalty: float = 0.0,
) -> Episode:
    """Shape a sample's reward: overlong punishment, the penalty of its length within its group, and the KL
    penalty where it belongs to the reward.

    The penalty of a token is coefficient * k(rollout logprob - reference logprob), on the tokens that were
    sampled and by the policy that sampled them (arXiv 2203.02155, eq. 2). The score falls on the last token,
    less what the environment gave for single turns, which falls on the last trained token of each.
    """
    score = overlong_reward(sample, algorithm, max_tokens)
    token_rewards_A = np.zeros(sample.num_trained)
    score -= length_penalty
    if algorithm.kl.place == "reward":
        token_rewards_A -= algorithm.kl.coefficient * _kl(sample, algorithm.kl)
    reward = score + float(token_rewards_A.sum())
    if len(token_rewards_A):
        token_rewards_A += _placed(sample, score)
    return Episode(sample, reward, token_rewards_A, parts)


def _placed(sample: Sample, score: float) -> Float64s:
    """The score at the sample's trained tokens: each turn's reward at its last one (of a turn without any, at
    the last one before it), and the rest at the last of all. Shape [A], A > 0; the sum is the score."""
    placed_A = np.zeros(sample.num_trained)
    rest = score
    if any(turn.reward for turn in sample.turns):
        lasts = np.searchsorted(sample.turn_A, np.arange(len(sample.turns)), side="right") - 1
        for last, turn in zip(lasts.tolist(), sample.turns, strict=True):
            placed_A[max(last, 0)] += turn.reward
            rest -= turn.reward
    placed_A[-1] += rest
    return placed_A


def _kl(sample: Sample, kl: KlConfig) -> Float64s:
    """Estimates of KL(rollout || reference) at the trained tokens, as in `losses.kl`. Shape [A]."""
    assert sample.reference_logprobs is not None, "`Policy.precompute` comes before advantages"
    difference_A = (sample.rollout_logprobs - sample.reference_logprobs)[sample.mask].astype(np.float64)
    # As in the loss: `exp` of it stays finite.
    difference_A = difference_A.clip(-20.0, 20.0)
    if kl.estimator == "k1":
        return difference_A
    if kl.estimator == "abs":
        return np.abs(difference_A)
    if kl.estimator == "k2":
        return 0.5 * difference_A**2
    return np.minimum(np.expm1(-difference_A) + difference_A, np.inf if kl.bound is None else kl.bound)

"""What advantages are computed from: one completion's reward, spread over its trained tokens.

Guarantee: the score of the reward service stays what it was (`Sample.reward`, and every metric of it). The
overlong punishment and the KL penalty exist here only.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.config.algorithm import AlgorithmConfig, KlConfig
from services.trainer.advantages.overlong import overlong_penalty
from services.trainer.samples import Sample

Float64s = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Episode:
    """A sample with its shaped reward: `reward` is the sum of `token_rewards_A`, over A trained tokens.

    A sequence without trained tokens keeps its reward for the group's mean, and has no token rewards.
    """

    sample: Sample
    reward: float
    token_rewards_A: Float64s

    @property
    def num_trained(self) -> int:
        """A."""
        return len(self.token_rewards_A)


def make_episode(sample: Sample, algorithm: AlgorithmConfig, max_tokens: int) -> Episode:
    """Shape a sample's reward: overlong punishment, and the KL penalty where it belongs to the reward.

    The penalty of a token is coefficient * k(rollout logprob - reference logprob), on the tokens that were
    sampled and by the policy that sampled them (arXiv 2203.02155, eq. 2). The score falls on the last token.
    """
    overlong = algorithm.overlong
    score = sample.reward + overlong_penalty(
        len(sample.completion_ids), max_tokens, overlong.buffer_share * max_tokens, overlong.penalty
    )
    token_rewards_A = np.zeros(sample.num_trained)
    if algorithm.kl.place == "reward":
        token_rewards_A -= algorithm.kl.coefficient * _kl(sample, algorithm.kl)
    reward = score + float(token_rewards_A.sum())
    if len(token_rewards_A):
        token_rewards_A[-1] += score
    return Episode(sample, reward, token_rewards_A)


def _kl(sample: Sample, kl: KlConfig) -> Float64s:
    """Estimates of KL(rollout || reference) at the trained tokens, as in `losses.kl`. Shape [A]."""
    assert sample.reference_logprobs is not None, "`Policy.prepare` comes before advantages"
    difference_A = (sample.rollout_logprobs - sample.reference_logprobs)[sample.mask].astype(np.float64)
    difference_A = difference_A.clip(-20.0, 20.0)
    if kl.estimator == "k1":
        return difference_A
    if kl.estimator == "k2":
        return 0.5 * difference_A**2
    return np.minimum(np.expm1(-difference_A) + difference_A, np.inf if kl.bound is None else kl.bound)

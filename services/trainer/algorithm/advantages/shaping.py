"""What advantages are computed from: a sample's reward, spread over its trained tokens.

Guarantee: the score of the reward service stays what it was (`Sample.reward`, and every metric of it). The
penalties of length and the KL penalty are in `Sample.shaped_reward` and in `token_rewards` only.
"""

from collections.abc import Sequence

import numpy as np
import torch

from tidemill.common.config.algorithm import AlgorithmConfig
from tidemill.common.config.algorithm_sections import KlConfig
from tidemill.common.config.algorithms.advantage import Discount
from tidemill.common.config.algorithms.loss import MAX_LOG_RATIO
from tidemill.common.wire.arrays import Float64
from tidemill.services.trainer.groups.sample import Sample


def shaped_reward(
    sample: Sample, algorithm: AlgorithmConfig, max_tokens: int, length_penalty: float = 0.0
) -> float:
    """The score less the overlong punishment, the penalty of its length within its group, and the KL penalty
    of its tokens where that belongs to the reward."""
    score = overlong_reward(sample, algorithm, max_tokens) - length_penalty
    return score + (float(kl_rewards(sample, algorithm).sum()) if algorithm.kl.place == "reward" else 0.0)


def token_rewards(
    sample: Sample, algorithm: AlgorithmConfig, max_tokens: int, length_penalty: float = 0.0
) -> Float64:
    """The shaped reward, divided over the trained tokens. Shape [A]; the sum is `shaped_reward`.

    The score falls on the last token, less what the environment gave for single turns, which falls on the
    last trained token of each.
    """
    score = overlong_reward(sample, algorithm, max_tokens) - length_penalty
    rewards_A = kl_rewards(sample, algorithm)
    if len(rewards_A):
        rewards_A += _placed(sample, score)
    return rewards_A


def kl_rewards(sample: Sample, algorithm: AlgorithmConfig) -> Float64:
    """-coefficient * k(rollout logprob - reference logprob) of each trained token, where the KL penalty
    belongs to the reward, else 0: on the tokens that were sampled and by the policy that sampled them (arXiv
    2203.02155, eq. 2). Shape [A]."""
    rewards_A = np.zeros(sample.num_trained)
    if algorithm.kl.place == "reward":
        rewards_A -= algorithm.kl.coefficient * _kl(sample, algorithm.kl)
    return rewards_A


def overlong_reward(sample: Sample, algorithm: AlgorithmConfig, max_tokens: int) -> float:
    """The score, less the overlong punishment for the tokens that the model wrote: an environment's tokens do
    not count, and how a history was split into segments changes nothing."""
    overlong = algorithm.overlong
    num_tokens = sample.num_trained
    buffer_tokens = overlong.buffer_share * max_tokens
    return sample.reward + overlong_penalty(num_tokens, max_tokens, buffer_tokens, overlong.penalty)


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
    at least `success_threshold`. Without a success there is no penalty, so exploring stays free. Scores 1, 1,
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


def discounts(sample: Sample, algorithm: AlgorithmConfig) -> Discount:
    """Discount of the step from each token to the next: `gamma`, or where that is per turn, 1 within a turn
    and `gamma` from its last token to the next one. One number, or [A]."""
    if algorithm.gamma_per == "token" or algorithm.gamma == 1.0:
        return algorithm.gamma
    turn_A = sample.turn_A
    # The last token ends its turn; a sequence without tokens has none.
    is_last_A = np.append(turn_A[1:] != turn_A[:-1], np.ones(min(len(turn_A), 1), dtype=np.bool_))
    return np.where(is_last_A, algorithm.gamma, 1.0)


def _placed(sample: Sample, score: float) -> Float64:
    """The score at the sample's trained tokens: each turn's reward at its last one (if it has none, at the
    last one before it), and the rest at the last of all. Shape [A], A > 0; the sum is the score."""
    placed_A = np.zeros(sample.num_trained)
    remaining = score
    if sample.has_turn_rewards:
        lasts = np.searchsorted(sample.turn_A, np.arange(len(sample.turns)), side="right") - 1
        for last, turn in zip(lasts.tolist(), sample.turns, strict=True):
            placed_A[max(last, 0)] += turn.reward
            remaining -= turn.reward
    placed_A[-1] += remaining
    return placed_A


def _kl(sample: Sample, kl: KlConfig) -> Float64:
    """Estimates of KL(rollout || reference) at the trained tokens. Shape [A]."""
    from tidemill.services.trainer.algorithm.losses.terms import kl_penalty

    assert "reference_logprobs" in sample.columns, "`Policy.precompute` comes before advantages"
    difference_T = sample.rollout_logprobs - sample.columns["reference_logprobs"]
    difference_A = difference_T[sample.mask].astype(np.float64)
    # Finite: a reference may rule a token out.
    gap_A = torch.from_numpy(difference_A.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    penalty_A: Float64 = kl_penalty(gap_A, torch.zeros(()), kl).numpy()
    return penalty_A

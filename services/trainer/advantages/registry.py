"""Advantages by name. An advantage is computed for one group, or for all groups of an optimizer update.

`scope` says which: with "batch" an update waits for its last group before it trains on the first.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from common.config.algorithm import AlgorithmConfig, is_users_own
from services.trainer.advantages.episode import Episode, Float64s
from services.trainer.advantages.gae import gae
from services.trainer.advantages.grpo import dr_grpo, grpo
from services.trainer.advantages.pass_at_k import pass_at_k
from services.trainer.advantages.reinforce_plus_plus import (
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
)
from services.trainer.advantages.rloo import rloo
from services.trainer.advantages.users_own import users_advantage
from services.trainer.advantages.whitening import whiten

Scope = Literal["group", "batch"]
Groups = Sequence[Sequence[Episode]]


@dataclass(frozen=True, slots=True, eq=False)
class Estimate:
    """The advantage of one sample: one number, or one for each of its A trained tokens.

    `returns_A` are the value head's targets, where there is one.
    """

    advantage: float | Float64s
    returns_A: Float64s | None = None


@dataclass(frozen=True, slots=True)
class Advantage:
    """A function from groups of episodes to one estimate for each episode, in order."""

    scope: Scope
    estimate: Callable[[Groups], list[Estimate]]


def find_advantage(algorithm: AlgorithmConfig) -> Advantage:
    """The advantage that the config names.

    Raises:
        ConfigError: a user's own cannot be loaded or does not take what it will be given.
    """
    name = algorithm.advantage
    if is_users_own(name):
        scope, function = users_advantage(name)
        return Advantage(scope, lambda groups: [Estimate(value) for value in function(groups)])
    if name == "gae":
        return Advantage("batch" if algorithm.value.whiten else "group", lambda g: _gae(g, algorithm))
    if name == "reinforce_plus_plus":
        return Advantage("batch", lambda groups: _reinforce_plus_plus(groups, algorithm))
    if name == "reinforce_plus_plus_baseline":
        return Advantage("batch", _reinforce_plus_plus_baseline)
    of_rewards: dict[str, Callable[[list[float]], Float64s]] = {
        "grpo": grpo,
        "dr_grpo": dr_grpo,
        "rloo": rloo,
        "pass_at_k": lambda rewards: pass_at_k(rewards, algorithm.pass_k, algorithm.pass_threshold),
    }
    return Advantage("group", lambda groups: _group_relative(groups, of_rewards[name]))


def _group_relative(groups: Groups, function: Callable[[list[float]], Float64s]) -> list[Estimate]:
    return [
        Estimate(float(value))
        for group in groups
        for value in function([episode.reward for episode in group])
    ]


def _reinforce_plus_plus(groups: Groups, algorithm: AlgorithmConfig) -> list[Estimate]:
    rewards = [episode.token_rewards_A for group in groups for episode in group]
    advantages = reinforce_plus_plus(rewards, algorithm.gamma)
    if algorithm.has_token_advantages:
        return [Estimate(values_A) for values_A in advantages]
    return _of_sequences(advantages)


def _reinforce_plus_plus_baseline(groups: Groups) -> list[Estimate]:
    rewards = [[episode.reward for episode in group] for group in groups]
    lengths = [[episode.num_trained for episode in group] for group in groups]
    return _of_sequences(reinforce_plus_plus_baseline(rewards, lengths))


def _of_sequences(advantages: Sequence[Float64s]) -> list[Estimate]:
    """One number for each sequence whose tokens all have the same."""
    return [Estimate(float(values_A[0]) if len(values_A) else 0.0) for values_A in advantages]


def _gae(groups: Groups, algorithm: AlgorithmConfig) -> list[Estimate]:
    pairs = [
        gae(episode.token_rewards_A, _values(episode), algorithm.gamma, algorithm.gae_lambda)
        for group in groups
        for episode in group
    ]
    advantages = [advantages_A for advantages_A, _ in pairs]
    if algorithm.value.whiten:
        advantages = whiten(advantages)
    return [
        Estimate(advantages_A, returns_A)
        for advantages_A, (_, returns_A) in zip(advantages, pairs, strict=True)
    ]


def _values(episode: Episode) -> Float64s:
    sample = episode.sample
    assert sample.values is not None, "`Policy.prepare` comes before advantages"
    return sample.values[sample.mask].astype(np.float64)

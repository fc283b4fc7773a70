"""Advantages by name. An advantage is computed for one group, or for all groups of an optimizer update.

`scope` says which: with "batch" an update waits for its last group before it trains on the first.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from common.config import RunConfig
from common.config.algorithm import AlgorithmConfig, is_users_own
from common.errors import TidemillError
from common.wire.arrays import Float64
from services.trainer.algorithm.advantages.episode import Episode, Float64s, make_episode, whiten
from services.trainer.algorithm.advantages.group_relative import dr_grpo, grpo, pass_at_k, rloo
from services.trainer.algorithm.advantages.returns import (
    gae,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
)
from services.trainer.algorithm.advantages.users_own import users_advantage
from services.trainer.groups.group_filter import TrainableGroup
from services.trainer.groups.samples import Sample

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


class Advantages:
    """The run's advantage function on samples.

    `scope` is "group" where groups can be assigned one by one, as they complete, and "batch" where `assign`
    needs all groups of an optimizer update in one call: the result then depends on all of them.
    """

    def __init__(self, config: RunConfig) -> None:
        self._algorithm = config.trainer.algorithm
        self._max_tokens = config.rollout.sampling.max_tokens
        self._advantage = find_advantage(self._algorithm)

    @property
    def scope(self) -> Scope:
        """What one call of `assign` has to be given."""
        return self._advantage.scope

    def assign(self, groups: Sequence[TrainableGroup]) -> list[TrainableGroup]:
        """The groups with the advantages of their samples filled in; order and all else as they were.

        Raises:
            TidemillError: an advantage is not finite.
        """
        episodes = [
            [make_episode(sample, self._algorithm, self._max_tokens) for sample in group.samples]
            for group in groups
        ]
        estimates = iter(self._advantage.estimate(episodes))
        try:
            return [
                replace(group, samples=[_with(sample, next(estimates)) for sample in group.samples])
                for group in groups
            ]
        except ValueError as error:
            raise TidemillError(
                f"trainer.algorithm.advantage {self._algorithm.advantage}: {error}"
            ) from error


def _with(sample: Sample, estimate: Estimate) -> Sample:
    advantage = estimate.advantage
    return replace(
        sample,
        advantage=advantage if isinstance(advantage, float) else _spread(sample, advantage),
        returns=None if estimate.returns_A is None else _spread(sample, estimate.returns_A),
    )


def _spread(sample: Sample, values_A: Float64s) -> Float64:
    """Numbers of trained tokens at their places in the completion, 0 at the others. Shape [T]."""
    values_T = np.zeros(len(sample.completion_ids))
    values_T[sample.mask] = values_A
    return values_T

"""Advantages by name, and the user's own.

    def advantage(rewards, tickets=None, samples=None):

`rewards` [N] float64 are the shaped rewards of one group. A function that takes `tickets` [N] (the group each
reward belongs to) is given a whole mini-batch in one call instead. `samples` [N] are the trainer's `Sample`s.
It returns N finite numbers, or N arrays with one number for each of a completion's tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np

from tidemill.common.config import RunConfig
from tidemill.common.config.algorithm import AlgorithmConfig, is_users_own
from tidemill.common.errors import ConfigError, TidemillError
from tidemill.services.trainer.algorithm.advantages.batch_scaled import gdpo, gpg, grpo_batch, scale_rl
from tidemill.services.trainer.algorithm.advantages.episode import (
    Episode,
    Float64s,
    Part,
    length_penalties,
    make_episode,
    overlong_reward,
    whiten,
)
from tidemill.services.trainer.algorithm.advantages.estimators import (
    dr_grpo,
    dr_grpo_passk,
    gae,
    grpo,
    grpo_passk,
    max_rl,
    opo,
    pass_at_k,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
    rloo,
)
from tidemill.services.trainer.algorithm.advantages.teaching import with_teacher
from tidemill.services.trainer.algorithm.users_function import contained, load_users_function, taken_by
from tidemill.services.trainer.groups.group_filter import TrainableGroup
from tidemill.services.trainer.groups.samples import Sample

ADVANTAGE_FIELD = "trainer.algorithm.advantage"
ADVANTAGE_ARGUMENTS = ("rewards", "tickets", "samples")

Groups = Sequence[Sequence[Episode]]


def users_advantage(
    reference: str,
) -> tuple[Literal["group", "batch"], Callable[[Groups], list[float | Float64s]]]:
    """Scope and function of a user's own advantage.

    Raises:
        ConfigError: it cannot be loaded, does not fit, or fails on two made-up rewards.
    """
    function = load_users_function(ADVANTAGE_FIELD, reference, ADVANTAGE_ARGUMENTS)
    taken = taken_by(function)
    where = f"{ADVANTAGE_FIELD} {reference}"

    def compute(groups: Groups) -> list[float | Float64s]:
        parts = [[e for group in groups for e in group]] if "tickets" in taken else groups
        return [value for part in parts for value in _call(function, part, where)]

    if "samples" not in taken:
        trial = function(rewards=np.array([1.0, 0.0]), tickets=np.array([0, 0]), samples=[])
        made_up: Any = SimpleNamespace(completion_ids=np.zeros(3), mask=np.ones(3, np.bool_), key=(0, 0))
        _read(trial, [made_up, made_up], where)
    return "batch" if "tickets" in taken else "group", compute


def _call(function: Callable[..., Any], episodes: Sequence[Episode], where: str) -> list[float | Float64s]:
    samples = [episode.sample for episode in episodes]
    returned = function(
        rewards=np.array([episode.reward for episode in episodes]),
        tickets=np.array([sample.key[0] for sample in samples], dtype=np.int64),
        samples=samples,
    )
    return _read(returned, samples, where)


def _read(returned: Any, samples: Sequence[Any], where: str) -> list[float | Float64s]:
    """What a function returned, as one number or one array [A] for each sample."""
    with contained(where):
        values = [np.asarray(value, dtype=np.float64) for value in returned]
    if len(values) != len(samples):
        raise ConfigError(f"{where} returned {len(values)} advantages for {len(samples)} rewards")
    result: list[float | Float64s] = []
    for value, sample in zip(values, samples, strict=True):
        if not np.isfinite(value).all():
            raise ConfigError(f"{where} returned {value} for trajectory {sample.key}; it must be finite")
        if value.ndim and value.shape != sample.completion_ids.shape:
            raise ConfigError(
                f"{where} returned an array of {value.shape} for a completion of "
                f"{len(sample.completion_ids)} tokens; expected one number, or one for each token"
            )
        result.append(value[sample.mask] if value.ndim else float(value))
    return result


Scope = Literal["group", "batch"]


@dataclass(frozen=True, slots=True, eq=False)
class Estimate:
    """The advantage of one sample: one number, or one for each of its A trained tokens.

    `returns_A` are the value head's targets, where there is one.
    """

    advantage: float | Float64s
    returns_A: Float64s | None = None


Estimator = Callable[[Groups, AlgorithmConfig], list[Estimate]]


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
    if is_users_own(algorithm.advantage):
        scope, function = users_advantage(algorithm.advantage)
        return Advantage(scope, lambda groups: [Estimate(value) for value in function(groups)])
    traits = algorithm.advantage_traits
    scope = "group" if traits.needs_values and not algorithm.value.whiten else traits.scope
    estimate = _ESTIMATORS[algorithm.advantage]
    return Advantage(scope, lambda groups: estimate(groups, algorithm))


def _of_rewards(function: Callable[[list[float]], Float64s]) -> Estimator:
    """A function of a group's rewards, which gives one number for each."""

    def estimate(groups: Groups, algorithm: AlgorithmConfig) -> list[Estimate]:
        values = [function([episode.reward for episode in group]) for group in groups]
        return [Estimate(float(value)) for values_G in values for value in values_G]

    return estimate


def _of_batch(function: Callable[[list[list[float]]], Float64s]) -> Estimator:
    """A function of the rewards of all groups of a mini-batch, which gives one number for each."""

    def estimate(groups: Groups, algorithm: AlgorithmConfig) -> list[Estimate]:
        values_N = function([[episode.reward for episode in group] for group in groups])
        return [Estimate(float(value)) for value in values_N]

    return estimate


def _opo(groups: Groups, algorithm: AlgorithmConfig) -> list[Estimate]:
    values = [opo([e.reward for e in group], [e.num_trained for e in group]) for group in groups]
    return [Estimate(float(value)) for values_G in values for value in values_G]


def _remax(groups: Groups, algorithm: AlgorithmConfig) -> list[Estimate]:
    values = [remax([e.reward for e in group], group[0].baseline) for group in groups]
    return [Estimate(float(value)) for values_G in values for value in values_G]


def _gdpo(groups: Groups, algorithm: AlgorithmConfig) -> list[Estimate]:
    weights = next(([part.weight for part in episode.parts] for group in groups for episode in group), [])
    values = [[[part.value for part in episode.parts] for episode in group] for group in groups]
    return [Estimate(float(value)) for value in gdpo(values, weights)]


def _pass_at_k(groups: Groups, algorithm: AlgorithmConfig) -> list[Estimate]:
    k, threshold = algorithm.pass_k, algorithm.success_threshold
    return _of_rewards(lambda rewards: pass_at_k(rewards, k, threshold))(groups, algorithm)


def _reinforce_plus_plus(groups: Groups, algorithm: AlgorithmConfig) -> list[Estimate]:
    episodes = [episode for group in groups for episode in group]
    discounts = [episode.discounts(algorithm) for episode in episodes]
    advantages = reinforce_plus_plus([episode.token_rewards_A for episode in episodes], discounts)
    if algorithm.has_token_advantages or any(episode.has_turn_rewards for episode in episodes):
        return [Estimate(values_A) for values_A in advantages]
    return _of_sequences(advantages)


def _reinforce_plus_plus_baseline(groups: Groups, algorithm: AlgorithmConfig) -> list[Estimate]:
    rewards = [[episode.reward for episode in group] for group in groups]
    lengths = [[episode.num_trained for episode in group] for group in groups]
    return _of_sequences(reinforce_plus_plus_baseline(rewards, lengths))


def _of_sequences(advantages: Sequence[Float64s]) -> list[Estimate]:
    """One number for each sequence whose tokens all have the same."""
    return [Estimate(float(values_A[0]) if len(values_A) else 0.0) for values_A in advantages]


def _gae(groups: Groups, algorithm: AlgorithmConfig) -> list[Estimate]:
    pairs = [
        gae(episode.token_rewards_A, _values(episode), episode.discounts(algorithm), algorithm.gae_lambda)
        for group in groups
        for episode in group
    ]
    advantages = [advantages_A for advantages_A, _ in pairs]
    if algorithm.value.whiten:
        advantages = whiten(advantages)
    return [Estimate(values_A, returns_A) for values_A, (_, returns_A) in zip(advantages, pairs, strict=True)]


def _values(episode: Episode) -> Float64s:
    sample = episode.sample
    assert sample.values is not None, "`Policy.precompute` comes before advantages"
    return sample.values[sample.mask].astype(np.float64)


_ESTIMATORS: dict[str, Estimator] = {
    "grpo": _of_rewards(grpo),
    "dr_grpo": _of_rewards(dr_grpo),
    "rloo": _of_rewards(rloo),
    "pass_at_k": _pass_at_k,
    "reinforce_plus_plus": _reinforce_plus_plus,
    "reinforce_plus_plus_baseline": _reinforce_plus_plus_baseline,
    "gae": _gae,
    "opo": _opo,
    "max_rl": _of_rewards(max_rl),
    "grpo_passk": _of_rewards(grpo_passk),
    "dr_grpo_passk": _of_rewards(dr_grpo_passk),
    "grpo_batch": _of_batch(grpo_batch),
    "scale_rl": _of_batch(scale_rl),
    "gpg": _of_batch(gpg),
    "gdpo": _gdpo,
    "remax": _remax,
}
"""By the names of `tidemill.common.config.algorithm_table`."""


class Advantages:
    """The run's advantage function on samples.

    `scope` is "group" where groups can be assigned one by one, as they complete, and "batch" where `assign`
    needs all groups of an optimizer update in one call: the result then depends on all of them.
    """

    def __init__(self, config: RunConfig) -> None:
        self._algorithm = config.trainer.algorithm
        self._max_tokens = config.max_completion_tokens
        self._advantage = find_advantage(self._algorithm)
        named = config.reward.named if self._algorithm.advantage_traits.compares_rewards else {}
        self._weights = {name: one.weight for name, one in named.items() if "train" in one.lanes}

    @property
    def scope(self) -> Scope:
        """What one call of `assign` has to be given."""
        return self._advantage.scope

    def assign(
        self, groups: Sequence[TrainableGroup], algorithm: AlgorithmConfig | None = None
    ) -> list[TrainableGroup]:
        """The groups with the advantages of their samples filled in; order and all else as they were.
        `algorithm` is the run's section with the coefficients of this step, where those move.

        Raises:
            TidemillError: an advantage is not finite.
        """
        episodes = [self._episodes(group, algorithm or self._algorithm) for group in groups]
        estimates = iter(self._advantage.estimate(episodes))
        try:
            return [
                replace(group, samples=[self._with(sample, next(estimates)) for sample in group.samples])
                for group in groups
            ]
        except ValueError as error:
            raise TidemillError(
                f"trainer.algorithm.advantage {self._algorithm.advantage}: {error}"
            ) from error

    def _episodes(self, group: TrainableGroup, algorithm: AlgorithmConfig) -> list[Episode]:
        penalties = length_penalties(group.samples, algorithm)
        episodes = [
            make_episode(sample, algorithm, self._max_tokens, self._parts(group, sample), penalty)
            for sample, penalty in zip(group.samples, penalties, strict=True)
        ]
        if group.baseline is None:
            return episodes
        baseline = overlong_reward(group.baseline, algorithm, self._max_tokens)
        return [replace(episode, baseline=baseline) for episode in episodes]

    def _parts(self, group: TrainableGroup, sample: Sample) -> tuple[Part, ...]:
        score = group.source.scores.get(sample.key[1])
        components = score.components if score else {}
        return tuple(Part(weight, components.get(name)) for name, weight in self._weights.items())

    def _with(self, sample: Sample, estimate: Estimate) -> Sample:
        return with_teacher(_with(sample, estimate), self._algorithm.teacher)


def _with(sample: Sample, estimate: Estimate) -> Sample:
    advantage = estimate.advantage
    return replace(
        sample,
        advantage=advantage if isinstance(advantage, float) else sample.spread(advantage),
        returns=None if estimate.returns_A is None else sample.spread(estimate.returns_A),
    )

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
Values = list[float | Float64s]
"""Of each sample one number, or one for each of its A trained tokens."""
Scope = Literal["group", "batch"]
Estimator = Callable[[Groups, AlgorithmConfig], Values]


def users_advantage(reference: str) -> "Advantage":
    """A user's own.

    Raises:
        ConfigError: it cannot be loaded, does not fit, or fails on two made-up rewards.
    """
    function = load_users_function(ADVANTAGE_FIELD, reference, ADVANTAGE_ARGUMENTS)
    taken = taken_by(function)
    where = f"{ADVANTAGE_FIELD} {reference}"

    def compute(groups: Groups) -> Values:
        parts = [[e for group in groups for e in group]] if "tickets" in taken else groups
        return [value for part in parts for value in _call(function, part, where)]

    if "samples" not in taken:
        trial = function(rewards=np.array([1.0, 0.0]), tickets=np.array([0, 0]), samples=[])
        made_up: Any = SimpleNamespace(completion_ids=np.zeros(3), mask=np.ones(3, np.bool_), key=(0, 0))
        _read(trial, [made_up, made_up], where)
    return Advantage("batch" if "tickets" in taken else "group", compute)


def _call(function: Callable[..., Any], episodes: Sequence[Episode], where: str) -> Values:
    samples = [episode.sample for episode in episodes]
    returned = function(
        rewards=np.array([episode.reward for episode in episodes]),
        tickets=np.array([sample.key[0] for sample in samples], dtype=np.int64),
        samples=samples,
    )
    return _read(returned, samples, where)


def _read(returned: Any, samples: Sequence[Any], where: str) -> Values:
    """What a function returned, as one number or one array [A] for each sample."""
    with contained(where):
        values = [np.asarray(value, dtype=np.float64) for value in returned]
    if len(values) != len(samples):
        raise ConfigError(f"{where} returned {len(values)} advantages for {len(samples)} rewards")
    result: Values = []
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


@dataclass(frozen=True, slots=True)
class Advantage:
    """A function from groups of episodes to the advantages of all episodes, in order."""

    scope: Scope
    estimate: Callable[[Groups], Values]


def find_advantage(algorithm: AlgorithmConfig) -> Advantage:
    """The advantage that the config names.

    Raises:
        ConfigError: a user's own cannot be loaded or does not take what it will be given.
    """
    if is_users_own(algorithm.advantage):
        return users_advantage(algorithm.advantage)
    traits = algorithm.advantage_traits
    scope = "group" if traits.needs_values and not algorithm.value.whiten else traits.scope
    estimate = _ESTIMATORS[algorithm.advantage]
    return Advantage(scope, lambda groups: estimate(groups, algorithm))


def _of_groups(function: Callable[[Sequence[Episode], AlgorithmConfig], Float64s]) -> Estimator:
    """A function of one group, which gives one number for each of its episodes."""
    return lambda groups, algorithm: [
        float(value) for group in groups for value in function(group, algorithm)
    ]


def _of_rewards(function: Callable[[list[float]], Float64s]) -> Estimator:
    return _of_groups(lambda group, _: function(_rewards(group)))


def _of_batch(function: Callable[[list[list[float]]], Float64s]) -> Estimator:
    """A function of the rewards of all groups of a mini-batch, which gives one number for each."""
    return lambda groups, _: list(map(float, function([_rewards(group) for group in groups])))


def _rewards(group: Sequence[Episode]) -> list[float]:
    return [episode.reward for episode in group]


def _gdpo(groups: Groups, algorithm: AlgorithmConfig) -> Values:
    weights = next(([part.weight for part in episode.parts] for group in groups for episode in group), [])
    values = [[[part.value for part in episode.parts] for episode in group] for group in groups]
    return list(map(float, gdpo(values, weights)))


def _reinforce_plus_plus(groups: Groups, algorithm: AlgorithmConfig) -> Values:
    episodes = [episode for group in groups for episode in group]
    discounts = [episode.discounts(algorithm) for episode in episodes]
    advantages = reinforce_plus_plus([episode.token_rewards_A for episode in episodes], discounts)
    if algorithm.has_token_advantages or any(episode.has_turn_rewards for episode in episodes):
        return list(advantages)
    return _of_sequences(advantages)


def _reinforce_plus_plus_baseline(groups: Groups, algorithm: AlgorithmConfig) -> Values:
    lengths = [[episode.num_trained for episode in group] for group in groups]
    return _of_sequences(reinforce_plus_plus_baseline([_rewards(group) for group in groups], lengths))


def _of_sequences(advantages: Sequence[Float64s]) -> Values:
    """One number for each sequence whose tokens all have the same."""
    return [float(values_A[0]) if len(values_A) else 0.0 for values_A in advantages]


def _gae(groups: Groups, algorithm: AlgorithmConfig) -> Values:
    """Not whitened: `Advantages.assign` adds values to make returns of them."""
    return [
        gae(episode.token_rewards_A, episode.values_A, episode.discounts(algorithm), algorithm.gae_lambda)[0]
        for group in groups
        for episode in group
    ]


_ESTIMATORS: dict[str, Estimator] = {
    "grpo": _of_rewards(grpo),
    "dr_grpo": _of_rewards(dr_grpo),
    "rloo": _of_rewards(rloo),
    "pass_at_k": _of_groups(lambda group, a: pass_at_k(_rewards(group), a.pass_k, a.success_threshold)),
    "reinforce_plus_plus": _reinforce_plus_plus,
    "reinforce_plus_plus_baseline": _reinforce_plus_plus_baseline,
    "gae": _gae,
    "opo": _of_groups(lambda group, _: opo(_rewards(group), [e.num_trained for e in group])),
    "max_rl": _of_rewards(max_rl),
    "grpo_passk": _of_rewards(grpo_passk),
    "dr_grpo_passk": _of_rewards(dr_grpo_passk),
    "grpo_batch": _of_batch(grpo_batch),
    "scale_rl": _of_batch(scale_rl),
    "gpg": _of_batch(gpg),
    "gdpo": _gdpo,
    "remax": _of_groups(lambda group, _: remax(_rewards(group), group[0].baseline)),
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
        values = self._advantage.estimate(episodes)
        targets: Sequence[Float64s | None] = [None] * len(values)
        if self._algorithm.advantage_traits.needs_values:
            flat = [episode for group in episodes for episode in group]
            targets = [value + episode.values_A for value, episode in zip(values, flat, strict=True)]
            if self._algorithm.value.whiten:
                values = list(whiten(values))  # type: ignore[arg-type]
        assigned = iter(zip(values, targets, strict=True))
        try:
            return [
                replace(group, samples=[self._with(sample, *next(assigned)) for sample in group.samples])
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

    def _with(self, sample: Sample, value: float | Float64s, returns_A: Float64s | None) -> Sample:
        advantage = value if isinstance(value, float) else sample.spread(value)
        returns = None if returns_A is None else sample.spread(returns_A)
        return with_teacher(replace(sample, advantage=advantage, returns=returns), self._algorithm.teacher)

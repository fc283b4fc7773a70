"""Advantages by name, and the user's own.

    def advantage(rewards, tickets=None, samples=None):

`rewards` [N] float64 are the shaped rewards of one group. A function that takes `tickets` [N] (the group each
reward belongs to) is given a whole mini-batch in one call instead. `samples` [N] are the trainer's `Sample`s.
It returns N finite numbers, or N arrays with one number for each of a completion's tokens.
"""

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np

from tidemill.common.config import RunConfig
from tidemill.common.config.algorithm import AlgorithmConfig, is_users_own
from tidemill.common.errors import ConfigError, TidemillError
from tidemill.common.wire.arrays import Float64
from tidemill.common.wire.messages import TrajectoryKey
from tidemill.services.trainer.algorithm.advantages import estimators
from tidemill.services.trainer.algorithm.advantages.shaping import (
    add_teacher,
    discounts,
    length_penalties,
    overlong_reward,
    shaped_reward,
    token_rewards,
)
from tidemill.services.trainer.algorithm.users_function import contained, load_users_function
from tidemill.services.trainer.groups.group import Group
from tidemill.services.trainer.groups.sample import Sample

ADVANTAGE_FIELD = "trainer.algorithm.advantage"

Groups = Sequence[Group]
"""Groups whose samples have shaped rewards."""
Values = list[float | Float64]
"""For each sample one number, or one for each of its A trained tokens."""
Scope = Literal["group", "batch"]
TokenRewards = Callable[[Sample], Float64]
"""The shaped reward of a sample at its A trained tokens, [A]: for estimators that look at single tokens."""
Estimator = Callable[[Groups, AlgorithmConfig, TokenRewards], Values]


def find_advantage(algorithm: AlgorithmConfig) -> tuple[Scope, Estimator]:
    """The advantage that the config names, and whether one call needs a group or a whole mini-batch.

    Raises:
        ConfigError: a user's own cannot be loaded or does not take what it will be given.
    """
    if is_users_own(algorithm.advantage):
        return _users_advantage(algorithm.advantage)
    traits = algorithm.advantage_traits
    scope = "group" if traits.needs_values and not algorithm.value.whiten else traits.scope
    return scope, _ESTIMATORS[algorithm.advantage]


def _users_advantage(reference: str) -> tuple[Scope, Estimator]:
    """Raises ConfigError: it cannot be loaded, does not fit, or fails on two made-up rewards."""
    function, taken = load_users_function(ADVANTAGE_FIELD, reference, ("rewards", "tickets", "samples"))
    where = f"{ADVANTAGE_FIELD} {reference}"

    def compute(groups: Groups, *_: Any) -> Values:
        parts = [_samples(groups)] if "tickets" in taken else [group.samples for group in groups]
        return [value for part in parts for value in call(part)]

    def call(samples: Sequence[Sample]) -> Values:
        tickets = np.array([sample.key[0] for sample in samples], dtype=np.int64)
        returned = function(rewards=np.array(_rewards(samples)), tickets=tickets, samples=samples)
        return _read(returned, samples, where)

    if "samples" not in taken:
        trial = function(rewards=np.array([1.0, 0.0]), tickets=np.array([0, 0]), samples=[])
        made_up: Any = SimpleNamespace(completion_ids=np.zeros(3), mask=np.ones(3, np.bool_), key=(0, 0))
        _read(trial, [made_up, made_up], where)
    return "batch" if "tickets" in taken else "group", compute


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


def _samples(groups: Groups) -> list[Sample]:
    return [sample for group in groups for sample in group.samples]


def _rewards(samples: Sequence[Sample]) -> list[float]:
    return [sample.shaped_reward for sample in samples]


def _values(sample: Sample) -> Float64:
    assert "values" in sample.columns, "`Policy.precompute` comes before advantages"
    return sample.columns["values"][sample.mask].astype(np.float64)


def _of_groups(function: Callable[[list[float], Group, AlgorithmConfig], Float64]) -> Estimator:
    """An estimator from a function of one group and its rewards that gives one number for each of them."""
    return lambda groups, algorithm, _: [
        float(value) for group in groups for value in function(_rewards(group.samples), group, algorithm)
    ]


def _of_rewards(function: Callable[[list[float]], Float64]) -> Estimator:
    return _of_groups(lambda rewards, *_: function(rewards))


def _of_batch(function: Callable[[list[list[float]]], Float64]) -> Estimator:
    """An estimator from a function of the rewards of all groups of a mini-batch, one number for each."""
    return lambda groups, *_: list(map(float, function([_rewards(group.samples) for group in groups])))


def _reinforce_plus_plus(groups: Groups, algorithm: AlgorithmConfig, token_rewards: TokenRewards) -> Values:
    samples = _samples(groups)
    gammas = [discounts(sample, algorithm) for sample in samples]
    advantages = estimators.reinforce_plus_plus(list(map(token_rewards, samples)), gammas)
    if algorithm.has_token_advantages or any(sample.has_turn_rewards for sample in samples):
        return list(advantages)
    return _of_sequences(advantages)


def _reinforce_plus_plus_baseline(groups: Groups, *_: Any) -> Values:
    lengths = [[sample.num_trained for sample in group.samples] for group in groups]
    rewards = [_rewards(group.samples) for group in groups]
    return _of_sequences(estimators.reinforce_plus_plus_baseline(rewards, lengths))


def _of_sequences(advantages: Sequence[Float64]) -> Values:
    """One number for each sequence whose tokens all have the same."""
    return [float(values_A[0]) if len(values_A) else 0.0 for values_A in advantages]


def _gae(groups: Groups, algorithm: AlgorithmConfig, token_rewards: TokenRewards) -> Values:
    """Not whitened: `Advantages.assign` adds values to make returns of them."""
    return [
        estimators.gae(token_rewards(s), _values(s), discounts(s, algorithm), algorithm.gae_lambda)[0]
        for s in _samples(groups)
    ]


def _gdpo(groups: Groups, *_: Any, weights: dict[str, float] | None = None) -> Values:
    """`weights` by the names of rewards, which are read from the scores, before any shaping."""
    weights = weights or {}

    def components(group: Group, sample: Sample) -> list[float | None]:
        score = group.scores.get(sample.key[1])
        return [score.components.get(name) if score else None for name in weights]

    values = [[components(group, sample) for sample in group.samples] for group in groups]
    return list(map(float, estimators.gdpo(values, list(weights.values()))))


_OF_REWARDS = (
    estimators.grpo, estimators.dr_grpo, estimators.rloo, estimators.max_rl,
    estimators.grpo_passk, estimators.dr_grpo_passk,
)  # fmt: skip
_OF_BATCH = (estimators.grpo_batch, estimators.scale_rl, estimators.gpg)
_ESTIMATORS: dict[str, Estimator] = {
    **{one.__name__: _of_rewards(one) for one in _OF_REWARDS},
    **{one.__name__: _of_batch(one) for one in _OF_BATCH},
    "pass_at_k": _of_groups(lambda r, _, own: estimators.pass_at_k(r, own.pass_k, own.success_threshold)),
    "opo": _of_groups(lambda r, group, _: estimators.opo(r, [s.num_trained for s in group.samples])),
    "remax": _of_groups(
        lambda r, group, _: estimators.remax(r, group.baseline.shaped_reward if group.baseline else 0.0)
    ),
    "reinforce_plus_plus": _reinforce_plus_plus,
    "reinforce_plus_plus_baseline": _reinforce_plus_plus_baseline,
    "gae": _gae,
    "gdpo": _gdpo,
}
"""Estimators by the names of `tidemill.common.config.algorithm_table`."""


class Advantages:
    """The run's advantage function on samples.

    `scope` is "group" where groups can be assigned one by one, as they complete, and "batch" where `assign`
    needs all groups of an optimizer update in one call: the result then depends on all of them.
    """

    def __init__(self, config: RunConfig) -> None:
        self._algorithm = config.trainer.algorithm
        self._max_tokens = config.max_completion_tokens
        self.scope, self._estimate = find_advantage(self._algorithm)
        if self._algorithm.advantage_traits.compares_rewards:
            named = {name: one.weight for name, one in config.reward.named.items() if "train" in one.lanes}
            self._estimate = partial(_gdpo, weights=named)

    def assign(self, groups: Sequence[Group], algorithm: AlgorithmConfig | None = None) -> None:
        """Fill in the shaped rewards and advantages of the groups' samples. `algorithm` is the run's section
        with the coefficients of this step, where those move.

        Raises:
            TidemillError: an advantage is not finite.
        """
        of_step = algorithm or self._algorithm
        penalties = self._shape(groups, of_step)

        def rewards_of(sample: Sample) -> Float64:
            return token_rewards(sample, of_step, self._max_tokens, penalties.get(sample.key, 0.0))

        samples = _samples(groups)
        values = self._estimate(groups, self._algorithm, rewards_of)
        if self._algorithm.advantage_traits.needs_values:
            for sample, value in zip(samples, values, strict=True):
                sample.fill("returns", sample.spread(value + _values(sample)))
            if self._algorithm.value.whiten:
                values = list(estimators.whiten(values))  # type: ignore[arg-type]
        try:
            for sample, value in zip(samples, values, strict=True):
                sample.set_advantage(value if isinstance(value, float) else sample.spread(value))
                add_teacher(sample, self._algorithm.teacher)
        except ValueError as error:
            raise TidemillError(
                f"trainer.algorithm.advantage {self._algorithm.advantage}: {error}"
            ) from error

    def _shape(self, groups: Sequence[Group], algorithm: AlgorithmConfig) -> dict[TrajectoryKey, float]:
        """Fill in shaped rewards; returns what was taken off for the length of a sample within its group, by
        key, where there is such a penalty."""
        penalties: dict[TrajectoryKey, float] = {}
        for group in groups:
            if algorithm.length_penalty.is_on:
                costs = length_penalties(group.samples, algorithm)
                penalties.update((s.key, cost) for s, cost in zip(group.samples, costs, strict=True))
            for sample in group.samples:
                penalty = penalties.get(sample.key, 0.0)
                sample.shaped_reward = shaped_reward(sample, algorithm, self._max_tokens, penalty)
            if group.baseline is not None:
                baseline = group.baseline
                baseline.shaped_reward = overlong_reward(baseline, algorithm, self._max_tokens)
        return penalties

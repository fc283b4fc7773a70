"""Advantages by name, and the user's own.

    def advantage(rewards, tickets=None, samples=None):

`rewards` [N] float64 are the shaped rewards of one group. A function that takes `tickets` [N] (the group each
reward belongs to) is given a whole mini-batch in one call instead. `samples` [N] are the trainer's `Sample`s.
It returns N finite numbers, or N arrays with one number for each of a completion's tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np

from tidemill.common.config import RunConfig
from tidemill.common.config.algorithm import AlgorithmConfig, is_users_own
from tidemill.common.errors import ConfigError, TidemillError
from tidemill.common.wire.arrays import Float64
from tidemill.services.trainer.algorithm.advantages import estimators
from tidemill.services.trainer.algorithm.advantages.shaping import (
    discounts,
    length_penalties,
    overlong_reward,
    with_shaped_reward,
    with_teacher,
)
from tidemill.services.trainer.algorithm.users_function import contained, load_users_function
from tidemill.services.trainer.groups.group_filter import TrainableGroup
from tidemill.services.trainer.groups.samples import Sample

ADVANTAGE_FIELD = "trainer.algorithm.advantage"

Groups = Sequence[TrainableGroup]
"""Groups with shaped rewards."""
Values = list[float | Float64]
"""For each sample one number, or one for each of its A trained tokens."""
Scope = Literal["group", "batch"]
Estimator = Callable[[Groups, AlgorithmConfig], Values]


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

    def compute(groups: Groups, _: AlgorithmConfig) -> Values:
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


def _token_rewards(sample: Sample) -> Float64:
    assert sample.token_rewards_A is not None, "rewards are shaped before advantages are estimated"
    return sample.token_rewards_A


def _values(sample: Sample) -> Float64:
    assert sample.values is not None, "`Policy.precompute` comes before advantages"
    return sample.values[sample.mask].astype(np.float64)


def _of_groups(function: Callable[[list[float], TrainableGroup, AlgorithmConfig], Float64]) -> Estimator:
    """An estimator from a function of one group and its rewards that gives one number for each of them."""
    return lambda groups, algorithm: [
        float(value) for group in groups for value in function(_rewards(group.samples), group, algorithm)
    ]


def _of_rewards(function: Callable[[list[float]], Float64]) -> Estimator:
    return _of_groups(lambda rewards, *_: function(rewards))


def _of_batch(function: Callable[[list[list[float]]], Float64]) -> Estimator:
    """An estimator from a function of the rewards of all groups of a mini-batch, one number for each."""
    return lambda groups, _: list(map(float, function([_rewards(group.samples) for group in groups])))


def _reinforce_plus_plus(groups: Groups, algorithm: AlgorithmConfig) -> Values:
    samples = _samples(groups)
    gammas = [discounts(sample, algorithm) for sample in samples]
    advantages = estimators.reinforce_plus_plus(list(map(_token_rewards, samples)), gammas)
    if algorithm.has_token_advantages or any(sample.has_turn_rewards for sample in samples):
        return list(advantages)
    return _of_sequences(advantages)


def _reinforce_plus_plus_baseline(groups: Groups, algorithm: AlgorithmConfig) -> Values:
    lengths = [[sample.num_trained for sample in group.samples] for group in groups]
    rewards = [_rewards(group.samples) for group in groups]
    return _of_sequences(estimators.reinforce_plus_plus_baseline(rewards, lengths))


def _of_sequences(advantages: Sequence[Float64]) -> Values:
    """One number for each sequence whose tokens all have the same."""
    return [float(values_A[0]) if len(values_A) else 0.0 for values_A in advantages]


def _gae(groups: Groups, algorithm: AlgorithmConfig) -> Values:
    """Not whitened: `Advantages.assign` adds values to make returns of them."""
    return [
        estimators.gae(_token_rewards(s), _values(s), discounts(s, algorithm), algorithm.gae_lambda)[0]
        for s in _samples(groups)
    ]


def _gdpo(groups: Groups, _: AlgorithmConfig, weights: dict[str, float] | None = None) -> Values:
    """`weights` by the names of rewards, which are read from the scores, before any shaping."""
    weights = weights or {}

    def components(group: TrainableGroup, sample: Sample) -> list[float | None]:
        score = group.source.scores.get(sample.key[1])
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

    def assign(
        self, groups: Sequence[TrainableGroup], algorithm: AlgorithmConfig | None = None
    ) -> list[TrainableGroup]:
        """The groups with the advantages of their samples filled in; order and all else as they were.
        `algorithm` is the run's section with the coefficients of this step, where those move.

        Raises:
            TidemillError: an advantage is not finite.
        """
        shaped = [self._shaped(group, algorithm or self._algorithm) for group in groups]
        values = self._estimate(shaped, self._algorithm)
        targets: Sequence[Float64 | None] = [None] * len(values)
        if self._algorithm.advantage_traits.needs_values:
            pairs = zip(values, _samples(shaped), strict=True)
            targets = [value + _values(sample) for value, sample in pairs]
            if self._algorithm.value.whiten:
                values = list(estimators.whiten(values))  # type: ignore[arg-type]
        assigned = iter(zip(values, targets, strict=True))
        try:
            return [
                replace(group, samples=[self._with(sample, *next(assigned)) for sample in group.samples])
                for group in shaped
            ]
        except ValueError as error:
            raise TidemillError(
                f"trainer.algorithm.advantage {self._algorithm.advantage}: {error}"
            ) from error

    def _shaped(self, group: TrainableGroup, algorithm: AlgorithmConfig) -> TrainableGroup:
        costs = length_penalties(group.samples, algorithm)
        samples = [
            with_shaped_reward(sample, algorithm, self._max_tokens, cost)
            for sample, cost in zip(group.samples, costs, strict=True)
        ]
        if (baseline := group.baseline) is not None:
            reward = overlong_reward(baseline, algorithm, self._max_tokens)
            baseline = replace(baseline, shaped_reward=reward)
        return replace(group, samples=samples, baseline=baseline)

    def _with(self, sample: Sample, value: float | Float64, returns_A: Float64 | None) -> Sample:
        advantage = value if isinstance(value, float) else sample.spread(value)
        returns = None if returns_A is None else sample.spread(returns_A)
        assigned = replace(sample, token_rewards_A=None, advantage=advantage, returns=returns)
        return with_teacher(assigned, self._algorithm.teacher)

"""An advantage of the user's own.

    def advantage(rewards, tickets=None, samples=None):

`rewards` [N] float64 are the shaped rewards of one group. A function that takes `tickets` [N] (the group each
reward belongs to) is given a whole mini-batch in one call instead. `samples` [N] are the trainer's `Sample`s.
It returns N finite numbers, or N arrays with one number for each of a completion's tokens.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from tidemill.common.config.algorithm import AlgorithmConfig
from tidemill.common.config.algorithms.advantage import Values
from tidemill.common.errors import ConfigError
from tidemill.services.trainer.algorithm.advantages.registry import Estimator, RewardsOfGroup, Scope
from tidemill.services.trainer.algorithm.users_function import contained, load_users_function
from tidemill.services.trainer.groups.sample import Sample

ADVANTAGE_FIELD = "trainer.algorithm.advantage"


def load_users_advantage(reference: str) -> tuple[Scope, Estimator]:
    """Raises ConfigError: it cannot be loaded, does not fit, or fails on two made-up rewards."""
    function, names = load_users_function(ADVANTAGE_FIELD, reference, ("rewards", "tickets", "samples"))
    where = f"{ADVANTAGE_FIELD} {reference}"

    def estimate(groups: Sequence[RewardsOfGroup], algorithm: AlgorithmConfig) -> Values:
        if "tickets" in names:
            return call([sample for group in groups for sample in group.samples])
        values: Values = []
        for group in groups:
            values += call(group.samples)
        return values

    def call(samples: Sequence[Sample]) -> Values:
        tickets = np.array([sample.key[0] for sample in samples], dtype=np.int64)
        rewards = np.array([sample.shaped_reward for sample in samples])
        returned = function(rewards=rewards, tickets=tickets, samples=samples)
        return _read(returned, samples, where)

    if "samples" not in names:
        trial = function(rewards=np.array([1.0, 0.0]), tickets=np.array([0, 0]), samples=[])
        made_up: Any = SimpleNamespace(completion_ids=np.zeros(3), mask=np.ones(3, np.bool_), key=(0, 0))
        _read(trial, [made_up, made_up], where)
    return "batch" if "tickets" in names else "group", estimate


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

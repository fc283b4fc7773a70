"""Advantages of the user's own.

    def advantage(rewards, tickets=None, samples=None):

`rewards` [N] float64 are the shaped rewards of one group. A function that takes `tickets` [N] (the group each
reward belongs to) is given a whole mini-batch in one call instead. `samples` [N] are the trainer's `Sample`s.
It returns N finite numbers, or N arrays with one number for each of a completion's tokens.
"""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np

from common.errors import ConfigError
from services.trainer.algorithm.advantages.episode import Episode, Float64s
from services.trainer.algorithm.users_function import contained, load_users_function, taken_by

FIELD = "trainer.algorithm.advantage"
ARGUMENTS = ("rewards", "tickets", "samples")

Groups = Sequence[Sequence[Episode]]


def users_advantage(
    reference: str,
) -> tuple[Literal["group", "batch"], Callable[[Groups], list[float | Float64s]]]:
    """Scope and function of a user's own advantage.

    Raises:
        ConfigError: it cannot be loaded, does not fit, or fails on two made-up rewards.
    """
    function = load_users_function(FIELD, reference, ARGUMENTS)
    taken = taken_by(function)
    where = f"{FIELD} {reference}"

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

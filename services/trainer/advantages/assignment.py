"""Gives every sample of a step its advantage, once its groups are complete and the policy has prepared
them."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from common.arrays import Float64
from common.config import RunConfig
from common.errors import TidemillError
from services.trainer.advantages.episode import Float64s, make_episode
from services.trainer.advantages.registry import Estimate, Scope, find_advantage
from services.trainer.judgement import TrainableGroup
from services.trainer.samples import Sample


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

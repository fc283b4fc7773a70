"""Advantages by name, or the user's own."""

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from tidemill.common.config import RunConfig
from tidemill.common.config.algorithm import AlgorithmConfig, is_users_own
from tidemill.common.config.algorithms.advantage import Discount, Values, whiten
from tidemill.common.config.algorithms.table import ADVANTAGES
from tidemill.common.errors import TidemillError
from tidemill.common.wire.arrays import Float64
from tidemill.common.wire.messages import TrajectoryKey
from tidemill.services.trainer.groups.group import Group
from tidemill.services.trainer.groups.sample import Sample

Scope = Literal["group", "batch"]


class RewardsOfGroup:
    """Implements `GroupRewards`: a group, whose samples have shaped rewards, as estimators see it.

    What only some estimators read is computed when they do.
    """

    def __init__(
        self,
        group: Group,
        algorithm: AlgorithmConfig,
        weights_by_reward: dict[str, float],
        token_rewards_of: Callable[[Sample], Float64],
    ) -> None:
        self.group = group
        self.weights = list(weights_by_reward.values())
        self._algorithm = algorithm
        self._reward_names = list(weights_by_reward)
        self._token_rewards_of = token_rewards_of

    @property
    def samples(self) -> list[Sample]:
        return self.group.samples

    @property
    def rewards(self) -> list[float]:
        return [sample.shaped_reward for sample in self.samples]

    @property
    def lengths(self) -> list[int]:
        return [sample.num_trained for sample in self.samples]

    @property
    def greedy_reward(self) -> float:
        return self.group.baseline.shaped_reward if self.group.baseline else 0.0

    @property
    def token_rewards(self) -> list[Float64]:
        return [self._token_rewards_of(sample) for sample in self.samples]

    @property
    def values(self) -> list[Float64]:
        return [_values_of_head(sample) for sample in self.samples]

    @property
    def discounts(self) -> list[Discount]:
        from tidemill.services.trainer.algorithm.advantages.shaping import discounts

        return [discounts(sample, self._algorithm) for sample in self.samples]

    @property
    def has_turn_rewards(self) -> bool:
        return any(sample.has_turn_rewards for sample in self.samples)

    @property
    def components(self) -> list[list[float | None]]:
        rows: list[list[float | None]] = []
        for sample in self.samples:
            _, index = sample.key
            score = self.group.scores.get(index)
            components = score.components if score else {}
            rows.append([components.get(name) for name in self._reward_names])
        return rows


Estimator = Callable[[Sequence[RewardsOfGroup], AlgorithmConfig], Values]


def find_advantage(algorithm: AlgorithmConfig) -> tuple[Scope, Estimator]:
    """The advantage that the config names, and whether one call needs a group or a whole mini-batch.

    Raises:
        ConfigError: a user's own cannot be loaded or does not take what it will be given.
    """
    if is_users_own(algorithm.advantage):
        from tidemill.services.trainer.algorithm.advantages.users_advantage import load_users_advantage

        return load_users_advantage(algorithm.advantage)
    advantage = ADVANTAGES[algorithm.advantage]
    scope = advantage.scope
    # Of these, only the whitening looks at the whole mini-batch.
    if advantage.needs_values and not algorithm.value.whiten:
        scope = "group"
    return scope, advantage.estimate


def is_shaped(algorithm: AlgorithmConfig) -> bool:
    """Whether something is taken off the scores of samples before advantages are computed from them."""
    has_penalty = algorithm.overlong.penalty > 0.0 or algorithm.length_penalty.is_on
    return has_penalty or algorithm.kl.place == "reward"


class Advantages:
    """The run's advantage function on samples.

    `scope` is "group" where groups can be assigned one by one, as they complete, and "batch" where `assign`
    needs all groups of an optimizer update in one call: the result then depends on all of them.
    """

    def __init__(self, config: RunConfig) -> None:
        self._algorithm = config.trainer.algorithm
        self._max_tokens = config.max_completion_tokens
        self.scope, self._estimate = find_advantage(self._algorithm)
        self._weights_by_reward = {
            name: reward.weight for name, reward in config.reward.named.items() if "train" in reward.lanes
        }

    def assign(self, groups: Sequence[Group], algorithm: AlgorithmConfig | None = None) -> None:
        """Fill in the shaped rewards and advantages of the groups' samples. `algorithm` is the run's section
        with the coefficients of this step, where those move.

        Raises:
            TidemillError: an advantage is not finite.
        """
        of_step = algorithm or self._algorithm  # shaping alone reads coefficients that move
        penalties = self._shape(groups, of_step)

        def token_rewards_of(sample: Sample) -> Float64:
            from tidemill.services.trainer.algorithm.advantages.shaping import token_rewards

            return token_rewards(sample, of_step, self._max_tokens, penalties.get(sample.key, 0.0))

        reward_groups = [
            RewardsOfGroup(group, self._algorithm, self._weights_by_reward, token_rewards_of)
            for group in groups
        ]
        samples = [sample for group in groups for sample in group.samples]
        advantages = self._estimate(reward_groups, self._algorithm)
        if self._algorithm.advantage_traits.needs_values:
            advantages = self._fill_returns(samples, advantages)
        try:
            for sample, advantage in zip(samples, advantages, strict=True):
                # One number, or one for each trained token.
                sample.set_advantage(advantage if isinstance(advantage, float) else sample.spread(advantage))
            self._add_teachers(samples)
        except ValueError as error:
            raise TidemillError(
                f"trainer.algorithm.advantage {self._algorithm.advantage}: {error}"
            ) from error

    def _shape(self, groups: Sequence[Group], algorithm: AlgorithmConfig) -> dict[TrajectoryKey, float]:
        """Fill in shaped rewards. Returns the penalties of length within groups, by sample, if there are."""
        penalties: dict[TrajectoryKey, float] = {}
        if not is_shaped(algorithm):
            for group in groups:
                for sample in group.samples:
                    sample.shaped_reward = sample.reward
                if group.baseline is not None:
                    group.baseline.shaped_reward = group.baseline.reward
            return penalties
        from tidemill.services.trainer.algorithm.advantages.shaping import (
            length_penalties,
            overlong_reward,
            shaped_reward,
        )

        for group in groups:
            if algorithm.length_penalty.is_on:
                costs = length_penalties(group.samples, algorithm)
                for sample, cost in zip(group.samples, costs, strict=True):
                    penalties[sample.key] = cost
            for sample in group.samples:
                penalty = penalties.get(sample.key, 0.0)
                sample.shaped_reward = shaped_reward(sample, algorithm, self._max_tokens, penalty)
            if group.baseline is not None:
                baseline = group.baseline
                baseline.shaped_reward = overlong_reward(baseline, algorithm, self._max_tokens)
        return penalties

    def _fill_returns(self, samples: Sequence[Sample], advantages: Values) -> Values:
        """Fill in what the value head learns, advantage plus value at each trained token. Returns the
        advantages as they are trained: whitened, where the config says so."""
        for sample, advantage_A in zip(samples, advantages, strict=True):
            sample.fill("returns", sample.spread(advantage_A + _values_of_head(sample)))
        if not self._algorithm.value.whiten:
            return advantages
        # With a value head each of them is an array.
        return list(whiten(advantages))  # type: ignore[arg-type]

    def _add_teachers(self, samples: Sequence[Sample]) -> None:
        """Add the teacher's share to the advantages of samples that have one."""
        taught = [sample for sample in samples if sample.teacher_weight]
        if not taught:
            return
        from tidemill.services.trainer.algorithm.advantages.teacher import add_teacher

        for sample in taught:
            add_teacher(sample, self._algorithm.teacher)


def _values_of_head(sample: Sample) -> Float64:
    """[A]: the value head's estimates at the trained tokens."""
    assert "values" in sample.columns, "`Policy.precompute` comes before advantages"
    return sample.columns["values"][sample.mask].astype(np.float64)

"""The filter for staleness and validity: a complete group gets training samples, or a reason to replace it.

Every group has exactly one outcome: trained, with the samples that were left out named one by one, or
replaced.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tidemill.common.config import NamedRewardConfig, RunConfig
from tidemill.common.wire.choices import ROUTES, ROUTES_FAULT
from tidemill.common.wire.images import PICTURES_FAULT, PLACEHOLDER_FAULT
from tidemill.common.wire.messages import LOGPROBS_FAULT, Score, Trajectory, fault_of
from tidemill.common.wire.sampling import FILTER_NAMES
from tidemill.services.trainer.groups.group import Group
from tidemill.services.trainer.groups.sample import (
    Sample,
    fill_teacher,
    has_masks,
    mask_of_whole_turns,
    sampled_mask,
    turn_ends,
)

if TYPE_CHECKING:
    from tidemill.common.wire.routes import Routing

STALE = "stale"
ZERO_VARIANCE = "zero_variance"
FEW_SCORES = "too_few_scores"
FAILED_SCORE = "failed_score"
BAD_NUMBERS = "bad_numbers"
MISSING_TEACHER = "no_teacher_logprobs"
NO_PAYLOAD = "no_payload"
ENVIRONMENT_FAULT = "environment_fault"
NO_CHOICES = "no_choices"
NO_BASELINE = "no_greedy_baseline"
GREEDY = "greedy_baseline"
"""Reason for leaving out the greedy completion, which is compared with and not trained."""

MAX_REWARD = 1e30
"""Beyond this, sums and squares of rewards could overflow; no reward means such a number."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a group cannot be trained; a fresh ticket takes its place: `zero_variance`, "every reward is 0.5",
    (0.5, 0.5, 0.5)."""

    reason: str
    detail: str = ""
    rewards: tuple[float, ...] = ()
    """Rewards of a group without variance: they say how hard its prompt is."""


class LeftOut(NamedTuple):
    """Why a sample is not trained: `failed_score`, "KeyError: 'score' (mine.py, line 4)"."""

    reason: str
    detail: str = ""


class GroupFilter:
    """Decides what becomes of complete groups: by group, config and, for staleness, the step in progress."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.reward = config.reward
        self.trainer = config.trainer
        self.algorithm = config.trainer.algorithm
        self.imitation = {source.name: source.imitation for source in config.data.demonstrations}
        self.masked_sources = config.masked_sources
        self.has_baseline = self.algorithm.advantage_traits.has_greedy_baseline
        self.routing: Routing | None = None
        """The routers that the policy gives the samples' routes to, which depend on the model."""

    def apply(self, group: Group, step: int) -> Refusal | None:
        """Check the staleness bound for `step`, then `select`: fill in the group, or return why it is
        replaced."""
        if group.is_demonstration:  # it has no version
            return self.select(group)
        if step - group.min_version > self.trainer.max_staleness:
            detail = f"version {group.min_version} at step {step}, max_staleness {self.trainer.max_staleness}"
            return Refusal(STALE, detail)
        if group.is_ahead or group.max_version > step:
            detail = f"version {group.max_version} at step {step}, which did not exist yet when it was named"
            return Refusal(STALE, detail)
        trajectories = group.trajectories.values()
        # Here and not in `select`: a step that was trained kept the sampling of its time.
        wants_masks = any(trajectory.source in self.masked_sources for trajectory in trajectories)
        if wants_masks and not any(has_masks(t) or t.lacks_choices for t in trajectories):
            detail = f"its engine did not record which ids {FILTER_NAMES} left"
            return Refusal(NO_CHOICES, detail)
        return self.select(group)

    def select(self, group: Group) -> Refusal | None:
        """Apply the failure policy, and fill in the group's samples, or return why it is replaced. Advantages
        come later (`Advantages.assign`). A replay begins here: a step that was trained kept the bound of its
        time."""
        if group.is_demonstration:
            self._fill_demonstration(group)
            return None
        teacher = self._teacher(group)
        are_masked = any(map(has_masks, group.trajectories.values()))
        rewards_by_index: dict[int, float] = {}
        failures: dict[int, LeftOut] = {}
        for index, score in sorted(group.scores.items()):
            reward = self._reward(group.trajectories[index], score, are_masked, teacher is not None)
            if not isinstance(reward, LeftOut):
                rewards_by_index[index] = reward
                continue
            failures[index] = reward
            # A reward with a failure policy of its own puts it into the score; else the run's holds.
            if (score.on_failure or self.reward.on_failure) == "drop_group":
                return Refusal(FAILED_SCORE, reward.detail)
        greedy: dict[int, float] = {}
        sampled: dict[int, float] = {}
        for index, reward in rewards_by_index.items():
            lot = greedy if group.trajectories[index].is_greedy else sampled
            lot[index] = reward
        left_out = [(index, failure.reason) for index, failure in failures.items()]
        left_out += [(index, GREEDY) for index in greedy]
        if not self.has_baseline:
            greedy = {}
        elif not greedy:
            return Refusal(NO_BASELINE, "its greedy sample has no score, or it was given none")
        # The greedy sample is compared with, so it counts.
        compared = [*sampled.values(), *greedy.values()]
        if len(compared) < self.reward.min_group_size or not sampled:
            details = sorted(failure.detail for failure in failures.values() if failure.detail)
            detail = f"{len(compared)} of {len(group.scores)} scored. {' '.join(details[:1])}"
            return Refusal(FEW_SCORES, detail)
        # Compared exactly, as by the estimators: they give exactly zero where rewards are equal.
        is_constant = len(set(compared)) == 1
        # With a teacher whose weight is not 0, samples of equal rewards are trained too.
        if self.algorithm.filter_zero_variance and is_constant and not (teacher and teacher[1].weight):
            return Refusal(ZERO_VARIANCE, f"every reward is {compared[0]}", tuple(compared))
        try:
            samples = [self._filled(group, index, reward, teacher) for index, reward in sampled.items()]
            baselines = [self._filled(group, index, reward, None) for index, reward in greedy.items()]
        except ValueError as error:
            return Refusal(BAD_NUMBERS, str(error))
        if self.algorithm.normalisation == "prompt":
            # Only trained samples count: what was left out takes no share of the group's weight.
            num_trained = sum(sample.num_trained for sample in samples)
            for sample in samples:
                sample.group_size = len(samples)
                sample.group_trained = num_trained
        group.samples = samples
        group.left_out = left_out
        group.baseline = baselines[0] if baselines else None
        return None

    def _fill_demonstration(self, group: Group) -> None:
        """Fill in a demonstration, with its source's weight; it was checked when it was loaded."""
        (trajectory,) = group.trajectories.values()
        sample = group.sample_at(trajectory.index)
        sample.imitation = self.imitation[trajectory.source]
        sample.group_trained = sample.num_trained
        group.samples = [sample]

    def _teacher(self, group: Group) -> tuple[str, NamedRewardConfig] | None:
        """The teacher of the group's data source, which is that of all its trajectories."""
        trajectory = next(iter(group.trajectories.values()))
        return self.reward.teacher_of(trajectory.data_source, trajectory.source)

    def _reward(
        self, trajectory: Trajectory, score: Score, are_masked: bool, is_taught: bool
    ) -> float | LeftOut:
        """The reward of a sample; or why it is left out."""
        fault = fault_of(trajectory)
        if fault:
            return LeftOut(_reason_of_fault(trajectory, fault), fault)
        problem = self._find_choices_fault(trajectory, are_masked)
        if problem:
            return LeftOut(NO_CHOICES, problem)
        if score.value is not None:
            lacks_teacher = is_taught and score.teacher_logprobs is None
            return LeftOut(MISSING_TEACHER) if lacks_teacher else score.value
        # The run's value for a failed sample does not replace a teacher's logprobs.
        if not is_taught and not score.on_failure and self.reward.failure_value is not None:
            return self.reward.failure_value
        return LeftOut(FAILED_SCORE, score.error)

    def _find_choices_fault(self, trajectory: Trajectory, are_masked: bool) -> str:
        """Which recorded choices of the engine (routes, sampling masks) the sample lacks; empty for none."""
        if self.routing is not None:
            from tidemill.common.wire.routes import find_routes_fault

            routes = trajectory.choices.rows.get(ROUTES) if trajectory.choices else None
            if routes is None:
                return "the engine recorded no routes, or not of every token"
            problem = find_routes_fault(routes, self.routing)
            if problem:
                return problem
        if are_masked and not trajectory.is_greedy:
            from tidemill.services.trainer.groups.choices import missing_mask

            return missing_mask(trajectory)
        return ""

    def _filled(
        self, group: Group, index: int, reward: float, teacher: tuple[str, NamedRewardConfig] | None
    ) -> Sample:
        """The sample, with its reward, its turns', its teacher's logprobs, and the mask of what is trained.

        Raises:
            ValueError: a logprob is not finite, a reward is out of range, or a prompt is empty.
        """
        trajectory = group.trajectories[index]
        sample = group.sample_at(index)
        if trajectory.session:
            weight = self.config.turn_reward_weight(trajectory.data_source, trajectory.source)
            sample.turns = tuple(turn_ends(trajectory.segments, weight))
        if teacher is not None:
            logprobs_A = group.scores[index].teacher_logprobs
            assert logprobs_A is not None, "`_reward` leaves out what has none"
            fill_teacher(sample, sampled_mask(trajectory), teacher[0], logprobs_A, teacher[1].weight)
        for value in (reward, *(turn.reward for turn in sample.turns)):
            # In this form NaN is refused too.
            if not abs(value) <= MAX_REWARD:
                raise ValueError(f"trajectory {trajectory.key}: reward {value} is beyond {MAX_REWARD:g}")
        sample.reward = reward
        if not self.algorithm.mask_truncated:
            return sample
        if trajectory.finish == "length":
            # It has no gradient any more, but stays in the group's mean and counts as a sequence.
            sample.set_mask(np.zeros_like(sample.mask))
        else:
            sample.set_mask(mask_of_whole_turns(trajectory))
        return sample


def _reason_of_fault(trajectory: Trajectory, fault: str) -> str:
    """The reason for leaving out a sample that has this fault."""
    if fault.startswith(ROUTES_FAULT):
        return NO_CHOICES
    if fault.startswith((LOGPROBS_FAULT, PLACEHOLDER_FAULT)):
        return BAD_NUMBERS
    if fault.startswith(PICTURES_FAULT):
        return NO_PAYLOAD
    is_claimed = trajectory.claim is not None or trajectory.lacks_choices
    return NO_PAYLOAD if is_claimed else ENVIRONMENT_FAULT

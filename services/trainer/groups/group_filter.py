"""The filter for staleness and validity: a complete group becomes training samples, or a reason to replace
it.

Every group has exactly one outcome: trained, with the samples that were left out named one by one, or
replaced. Records, samples and what was precomputed stay together in one object on the way to the optimizer.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

import numpy as np

from tidemill.common.config import NamedRewardConfig, RunConfig
from tidemill.common.wire.arrays import Int32
from tidemill.common.wire.messages import Score, ScoreStatus, Trajectory, fault_of
from tidemill.services.trainer.groups.samples import (
    Precomputed,
    PrecomputedTokens,
    Sample,
    make_sample,
    mask_of_whole_turns,
    token_versions,
    with_teaching,
)

STALE, ZERO_VARIANCE, FEW_SCORES, FAILED_SCORE = "stale", "zero_variance", "too_few_scores", "failed_score"
BAD_NUMBERS, UNTAUGHT = "bad_numbers", "no_teacher_logprobs"
NO_PAYLOAD, ENVIRONMENT_FAULT = "no_payload", "environment_fault"
NO_BASELINE = "no_greedy_baseline"
GREEDY = "greedy_baseline"
"""Why a sample is left out that was not sampled."""

MAX_REWARD = 1e30
"""Beyond this, sums and squares of rewards could overflow; no reward means such a number."""


@dataclass(slots=True)
class CompleteGroup:
    """All trajectories of a ticket with all their scores, by index."""

    ticket: int
    step: int
    trajectories: dict[int, Trajectory]
    scores: dict[int, Score]
    precomputed: Precomputed | None = None
    queued_s: Mapping[int, float] = field(default_factory=dict)
    """How long each trajectory waited for its reward, by the clock of Redis; empty where not known."""
    is_ahead: bool = False
    """Whether a token came before the version that it names was committed: it is of a lost history."""

    @property
    def min_version(self) -> int:
        """The oldest version that produced a token of the group."""
        return min(trajectory.min_version for trajectory in self.trajectories.values())

    @property
    def max_version(self) -> int:
        """The newest version that produced a token of the group."""
        return max(trajectory.max_version for trajectory in self.trajectories.values())


@dataclass(frozen=True, slots=True)
class TrainableGroup:
    """A group that passed the filter: its records, its samples, and what was left out: (index, reason)."""

    source: CompleteGroup
    samples: list[Sample]
    rewards: list[float]
    left_out: list[tuple[int, str]] = field(default_factory=list)
    baseline: Sample | None = None
    """The greedy sample that the others are compared with, where the advantage wants one."""

    @property
    def ticket(self) -> int:
        return self.source.ticket

    @property
    def sampled(self) -> list[Trajectory]:
        """All completions but the greedy baseline, also those that are not trained; of a sample that has
        failed there is none."""
        every = self.source.trajectories.values()
        return [one for one in every if not one.is_greedy and not fault_of(one)]

    def trained_versions(self) -> list[Int32]:
        """For each sample, the version that produced each of its trained tokens. Shapes [A]."""
        records = self.source.trajectories
        return [token_versions(records[sample.key[1]])[sample.mask] for sample in self.samples]

    def with_precomputed(self) -> "TrainableGroup":
        """The group whose samples have what was precomputed of its records."""
        if self.source.precomputed is None:
            return self
        tokens, nothing = self.source.precomputed.tokens, PrecomputedTokens()
        names = [item.name for item in fields(PrecomputedTokens)]
        found = [tokens.get(sample.key[1], nothing) for sample in self.samples]
        samples = [
            replace(sample, **{name: getattr(item, name) for name in names})
            for sample, item in zip(self.samples, found, strict=True)
        ]
        return replace(self, samples=samples)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a group cannot be trained; a fresh ticket takes its place."""

    ticket: int
    reason: str
    detail: str = ""
    rewards: tuple[float, ...] = ()
    """Of a group without variance: they say how hard its prompt is."""


class GroupFilter:
    """Decides what becomes of complete groups; the same group always has the same outcome."""

    def __init__(self, config: RunConfig) -> None:
        self.config, self.reward, self.trainer = config, config.reward, config.trainer
        self.algorithm = config.trainer.algorithm
        self.has_baseline = self.algorithm.advantage_traits.has_greedy_baseline

    def apply(self, group: CompleteGroup, step: int) -> TrainableGroup | Refusal:
        """Check the staleness bound for `step`, apply the failure policy, make samples. Their advantages come
        later (`Advantages.assign`)."""
        if step - group.min_version > self.trainer.max_staleness:
            detail = f"version {group.min_version} at step {step}, max_staleness {self.trainer.max_staleness}"
            return Refusal(group.ticket, STALE, detail)
        if group.is_ahead or group.max_version > step:
            detail = f"version {group.max_version} at step {step}, which did not exist yet when it was named"
            return Refusal(group.ticket, STALE, detail)
        teacher = self._teacher(group)
        faults = {index: fault for index, one in group.trajectories.items() if (fault := fault_of(one))}
        usable = {index: score for index, score in group.scores.items() if index not in faults}
        rewards, left_out = self._rewards(usable, teacher is not None)
        for index in sorted(faults):
            is_claimed = group.trajectories[index].claim is not None
            left_out.append((index, NO_PAYLOAD if is_claimed else ENVIRONMENT_FAULT))
        for index, _ in left_out:
            # A reward of its own policy says so in the score; the others leave it to the run's.
            if (group.scores[index].on_failure or self.reward.on_failure) == "drop_group":
                return Refusal(group.ticket, FAILED_SCORE, faults.get(index, group.scores[index].error))
        greedy = {index: rewards[index] for index in rewards if group.trajectories[index].is_greedy}
        sampled = {index: reward for index, reward in rewards.items() if index not in greedy}
        left_out += [(index, GREEDY) for index in greedy]
        if not self.has_baseline:
            rewards, greedy = sampled, {}
        elif not greedy:
            return Refusal(group.ticket, NO_BASELINE, "its greedy sample has no score, or it was given none")
        if len(rewards) < self.reward.min_group_size or not sampled:
            reasons = {score.error for score in group.scores.values() if score.error} | {*faults.values()}
            detail = f"{len(rewards)} of {len(group.scores)} scored. {' '.join(sorted(reasons)[:1])}"
            return Refusal(group.ticket, FEW_SCORES, detail)
        is_constant = len(set(rewards.values())) == 1
        # Where a teacher counts, samples of one reward teach as well.
        if self.algorithm.filter_zero_variance and is_constant and not (teacher and teacher[1].weight):
            values = tuple(rewards.values())
            return Refusal(group.ticket, ZERO_VARIANCE, f"every reward is {values[0]}", values)
        try:
            samples = [self._sample(group, index, reward, teacher) for index, reward in sampled.items()]
            baselines = [self._sample(group, index, reward, None) for index, reward in greedy.items()]
        except ValueError as error:
            return Refusal(group.ticket, BAD_NUMBERS, str(error))
        if self.algorithm.normalisation == "prompt":
            num_trained = sum(sample.num_trained for sample in samples)
            samples = [replace(one, group_size=len(samples), group_trained=num_trained) for one in samples]
        baseline = baselines[0] if baselines else None
        trainable = TrainableGroup(group, samples, list(sampled.values()), left_out, baseline)
        return trainable.with_precomputed()

    def _teacher(self, group: CompleteGroup) -> tuple[str, NamedRewardConfig] | None:
        """The teacher of the group's data source, which is that of all its trajectories."""
        trajectory = next(iter(group.trajectories.values()))
        return self.reward.teacher_of(trajectory.data_source, trajectory.source)

    def _rewards(
        self, scores: Mapping[int, Score], is_taught: bool
    ) -> tuple[dict[int, float], list[tuple[int, str]]]:
        """Reward of each usable sample by index, and the indices left out, with the reason. A value in place
        of a failed score (a group function's, or the run's) is none in place of a teacher's logprobs."""
        rewards: dict[int, float] = {}
        left_out: list[tuple[int, str]] = []
        for index in sorted(scores):
            score = scores[index]
            if is_taught and score.status is ScoreStatus.OK and score.teacher_logprobs is None:
                left_out.append((index, UNTAUGHT))
            elif score.status is ScoreStatus.OK and score.value is not None:
                rewards[index] = score.value
            elif not is_taught and not score.on_failure and self.reward.failure_value is not None:
                rewards[index] = self.reward.failure_value
            else:
                left_out.append((index, FAILED_SCORE))
        return rewards, left_out

    def _sample(
        self, group: CompleteGroup, index: int, reward: float, teacher: tuple[str, NamedRewardConfig] | None
    ) -> Sample:
        """Raises ValueError where a logprob is not finite, a reward is out of range, or a prompt is empty."""
        trajectory, weight = group.trajectories[index], 0.0
        if trajectory.session:
            weight = self.config.turn_reward_weight(trajectory.data_source, trajectory.source)
        sample = make_sample(trajectory, weight)
        if teacher is not None:
            logprobs_A = group.scores[index].teacher_logprobs
            assert logprobs_A is not None, "`_rewards` leaves out what has none"
            sample = with_teaching(sample, teacher[0], logprobs_A, teacher[1].weight)
        for one in (reward, *(turn.reward for turn in sample.turns)):
            if not abs(one) <= MAX_REWARD:
                raise ValueError(f"trajectory {trajectory.key}: reward {one} is beyond {MAX_REWARD:g}")
        if not self.algorithm.mask_truncated:
            return replace(sample, reward=reward)
        if trajectory.finish == "length":
            return replace(sample, mask=np.zeros_like(sample.mask), reward=reward)
        return replace(sample, mask=mask_of_whole_turns(trajectory), reward=reward)

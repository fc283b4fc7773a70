"""Groups: what has arrived for a ticket, and the filter for staleness and validity. A complete group becomes
training samples, or a reason to replace it.

Every group has exactly one outcome: trained, with the samples that were left out named one by one, or
replaced. Records, samples and what was precomputed stay together in one object on the way to the optimizer.
"""

from dataclasses import dataclass, field, replace

import numpy as np

from tidemill.common.config import NamedRewardConfig, RunConfig
from tidemill.common.history.groups import RecordedGroup
from tidemill.common.streams import id_order
from tidemill.common.wire.arrays import Int32
from tidemill.common.wire.choices import ROUTES, ROUTES_FAULT, Routing, find_routes_fault
from tidemill.common.wire.messages import LOGPROBS_FAULT, Score, Ticket, Trajectory, fault_of
from tidemill.services.trainer.groups.samples import (
    Precomputed,
    Sample,
    has_masks,
    make_sample,
    mask_of_whole_turns,
    missing_mask,
    with_teaching,
)

STALE, ZERO_VARIANCE, FEW_SCORES, FAILED_SCORE = "stale", "zero_variance", "too_few_scores", "failed_score"
BAD_NUMBERS, MISSING_TEACHER = "bad_numbers", "no_teacher_logprobs"
NO_PAYLOAD, ENVIRONMENT_FAULT, NO_CHOICES = "no_payload", "environment_fault", "no_choices"
NO_BASELINE = "no_greedy_baseline"
GREEDY = "greedy_baseline"
"""Reason for leaving out the greedy completion, which is compared with and not trained."""

MAX_REWARD = 1e30
"""Beyond this, sums and squares of rewards could overflow; no reward means such a number."""


UNKNOWN_VERSION = 2**63


@dataclass(slots=True)
class PendingGroup(RecordedGroup):
    """What has arrived for a ticket that is outstanding, or that is in a step that is trained again."""

    ticket_min_version: int = 0
    started_version: int = -1
    oldest_sampled: int = UNKNOWN_VERSION
    """Oldest weight version among the tokens that have arrived."""
    is_ahead: bool = False
    """Whether a token arrived before its version was committed: that version is of a lost history."""
    is_taken: bool = False
    """Whether the step in progress trains on it."""
    precomputed: dict[int, Precomputed] = field(default_factory=dict)
    """What was computed for the trajectories while they waited for their scores, by index."""
    precomputed_for: int = -1
    """The step for which that was done; -1: none."""

    @classmethod
    def of(cls, ticket: Ticket | Trajectory) -> "PendingGroup":
        """An empty group for a ticket that was issued just now, or for a demonstration."""
        size, min_version = ticket.group_size, ticket.min_version
        return cls(ticket.ticket, ticket.step, group_size=size, ticket_min_version=min_version)

    @property
    def is_generated(self) -> bool:
        """Whether every trajectory is there."""
        return len(self.trajectories) == self.group_size

    @property
    def is_complete(self) -> bool:
        return self.is_generated and (self.is_demonstration or len(self.scores) == self.group_size)

    @property
    def oldest_version(self) -> int:
        """No token of the group is or will be older than this, as far as is known now."""
        if self.is_generated:
            return self.oldest_sampled
        return max(self.ticket_min_version, self.started_version)

    @property
    def min_version(self) -> int:
        """The oldest version that produced a token which has arrived."""
        return min(trajectory.min_version for trajectory in self.trajectories.values())

    @property
    def max_version(self) -> int:
        """The newest version that produced a token which has arrived."""
        return max(trajectory.max_version for trajectory in self.trajectories.values())

    @property
    def queued_s(self) -> dict[int, float]:
        """Seconds that each trajectory waited for a reward worker, by index, as far as they are known. Entry
        ids are times of one server: workers' clocks need not agree."""
        queued_ms = {
            index: id_order(entry_id)[0] - id_order(self.trajectory_ids[index])[0]
            for index, entry_id in self.score_ids.items()
            if index in self.trajectory_ids
        }
        return {i: max(0.0, between / 1000 - self.scores[i].latency_s) for i, between in queued_ms.items()}

    def forget(self) -> None:
        """Drop everything that has arrived, to read it again."""
        for arrived in (self.trajectories, self.scores, self.trajectory_ids, self.score_ids):
            arrived.clear()
        self.other_scores.clear()
        self.precomputed, self.precomputed_for = {}, -1
        self.started_version, self.oldest_sampled, self.is_ahead = -1, UNKNOWN_VERSION, False


@dataclass(frozen=True, slots=True)
class TrainableGroup:
    """A group that passed the filter: its records, its samples, and what was left out: (index, reason)."""

    source: PendingGroup
    samples: list[Sample]
    left_out: list[tuple[int, str]] = field(default_factory=list)
    baseline: Sample | None = None
    """The greedy sample that the others are compared with, where the advantage needs one."""

    @property
    def ticket(self) -> int:
        return self.source.ticket

    @property
    def rewards(self) -> list[float]:
        """Of its samples, before any shaping; none for a demonstration."""
        return [] if self.source.is_demonstration else [sample.reward for sample in self.samples]

    @property
    def sampled(self) -> list[Trajectory]:
        """All sampled completions, trained or not, without the greedy baseline and samples that have failed;
        none for a demonstration."""
        every = () if self.source.is_demonstration else self.source.trajectories.values()
        return [one for one in every if not one.is_greedy and not fault_of(one)]

    def trained_versions(self) -> list[Int32]:
        """For each sample, the version that produced each of its trained tokens; no version has produced a
        demonstration. Shapes [A]."""
        if self.source.is_demonstration:
            return []
        records = self.source.trajectories
        return [records[sample.key[1]].token_versions()[sample.mask] for sample in self.samples]

    def with_precomputed(self) -> "TrainableGroup":
        """The group with what was precomputed for its records added to its samples."""
        if self.source.precomputed_for < 0:
            return self
        found = self.source.precomputed
        samples = [replace(one, **found.get(one.key[1], {})) for one in self.samples]  # type: ignore[arg-type]
        return replace(self, samples=samples)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a group cannot be trained; a fresh ticket takes its place."""

    reason: str
    detail: str = ""
    rewards: tuple[float, ...] = ()
    """Rewards of a group without variance: they say how hard its prompt is."""


class GroupFilter:
    """Decides what becomes of complete groups: by group, config and, for staleness, the step in progress."""

    def __init__(self, config: RunConfig) -> None:
        self.config, self.reward, self.trainer = config, config.reward, config.trainer
        self.algorithm = config.trainer.algorithm
        self.imitation = {source.name: source.imitation for source in config.data.demonstrations}
        self.masked_sources = config.masked_sources
        self.has_baseline = self.algorithm.advantage_traits.has_greedy_baseline
        self.routing: Routing | None = None
        """The routers that the policy gives the samples' routes to, which depend on the model."""

    def apply(self, group: PendingGroup, step: int) -> TrainableGroup | Refusal:
        """Check the staleness bound for `step`, then `select`."""
        if group.is_demonstration:  # it has no version
            return self.select(group)
        if step - group.min_version > self.trainer.max_staleness:
            detail = f"version {group.min_version} at step {step}, max_staleness {self.trainer.max_staleness}"
            return Refusal(STALE, detail)
        if group.is_ahead or group.max_version > step:
            detail = f"version {group.max_version} at step {step}, which did not exist yet when it was named"
            return Refusal(STALE, detail)
        samples = group.trajectories.values()
        # Here and not in `select`: a step that was trained kept the sampling of its time.
        wants_masks = any(one.source in self.masked_sources for one in samples)
        if wants_masks and not any(has_masks(one) or one.lacks_choices for one in samples):
            detail = "its engine did not record which ids top_p, top_k or min_p left"
            return Refusal(NO_CHOICES, detail)
        return self.select(group)

    def select(self, group: PendingGroup) -> TrainableGroup | Refusal:
        """Apply the failure policy, make samples. Their advantages come later (`Advantages.assign`). A replay
        begins here: a step that was trained kept the bound of its time."""
        if group.is_demonstration:
            return self._demonstration(group)
        teacher = self._teacher(group)
        are_masked = any(map(has_masks, group.trajectories.values()))
        rewards: dict[int, float] = {}
        failures: dict[int, tuple[str, str]] = {}
        for index, score in sorted(group.scores.items()):
            found = self._reward(group.trajectories[index], score, are_masked, teacher is not None)
            if not isinstance(found, tuple):
                rewards[index] = found
                continue
            failures[index] = found
            # A reward with a failure policy of its own puts it into the score; else the run's holds.
            if (score.on_failure or self.reward.on_failure) == "drop_group":
                return Refusal(FAILED_SCORE, found[1])
        greedy = {index: rewards[index] for index in rewards if group.trajectories[index].is_greedy}
        sampled = {index: reward for index, reward in rewards.items() if index not in greedy}
        left_out = [(index, reason) for index, (reason, _) in failures.items()]
        left_out += [(index, GREEDY) for index in greedy]
        if not self.has_baseline:
            rewards, greedy = sampled, {}
        elif not greedy:
            return Refusal(NO_BASELINE, "its greedy sample has no score, or it was given none")
        if len(rewards) < self.reward.min_group_size or not sampled:
            details = sorted(detail for _, detail in failures.values() if detail)
            detail = f"{len(rewards)} of {len(group.scores)} scored. {' '.join(details[:1])}"
            return Refusal(FEW_SCORES, detail)
        # Compared exactly, as by the estimators: they give exactly zero where rewards are equal. The greedy
        # sample counts too: where all others have more than it, they have an advantage.
        is_constant = len(set(rewards.values())) == 1
        # With a teacher whose weight is not 0, samples of equal rewards are trained too.
        if self.algorithm.filter_zero_variance and is_constant and not (teacher and teacher[1].weight):
            values = tuple(rewards.values())
            return Refusal(ZERO_VARIANCE, f"every reward is {values[0]}", values)
        try:
            samples = [self._sample(group, index, reward, teacher) for index, reward in sampled.items()]
            baselines = [self._sample(group, index, reward, None) for index, reward in greedy.items()]
        except ValueError as error:
            return Refusal(BAD_NUMBERS, str(error))
        if self.algorithm.normalisation == "prompt":
            # Only trained samples count: what was left out takes no share of the group's weight.
            num_trained = sum(sample.num_trained for sample in samples)
            samples = [replace(one, group_size=len(samples), group_trained=num_trained) for one in samples]
        baseline = baselines[0] if baselines else None
        trainable = TrainableGroup(group, samples, left_out, baseline)
        return trainable.with_precomputed()

    def _demonstration(self, group: PendingGroup) -> TrainableGroup:
        """A demonstration as a group, with its source's weight; it was checked when it was loaded."""
        (trajectory,) = group.trajectories.values()
        sample = make_sample(trajectory)
        weight = self.imitation[trajectory.source]
        return TrainableGroup(group, [replace(sample, imitation=weight, group_trained=sample.num_trained)])

    def _teacher(self, group: PendingGroup) -> tuple[str, NamedRewardConfig] | None:
        """The teacher of the group's data source, which is that of all its trajectories."""
        trajectory = next(iter(group.trajectories.values()))
        return self.reward.teacher_of(trajectory.data_source, trajectory.source)

    def _reward(
        self, trajectory: Trajectory, score: Score, are_masked: bool, is_taught: bool
    ) -> float | tuple[str, str]:
        """The reward of a sample; or why it is left out, as (reason, detail)."""
        if fault := fault_of(trajectory):
            if fault.startswith(ROUTES_FAULT):
                return NO_CHOICES, fault
            if fault.startswith(LOGPROBS_FAULT):
                return BAD_NUMBERS, fault
            is_claimed = trajectory.claim is not None or trajectory.lacks_choices
            return NO_PAYLOAD if is_claimed else ENVIRONMENT_FAULT, fault
        if self.routing is not None:
            routes = trajectory.choices.rows.get(ROUTES) if trajectory.choices else None
            if routes is None:
                return NO_CHOICES, "the engine recorded no routes, or not of every token"
            if problem := find_routes_fault(routes, self.routing):
                return NO_CHOICES, problem
        if are_masked and not trajectory.is_greedy and (missing := missing_mask(trajectory)):
            return NO_CHOICES, missing
        if score.value is not None:
            return (MISSING_TEACHER, "") if is_taught and score.teacher_logprobs is None else score.value
        # The run's value for a failed sample does not replace a teacher's logprobs.
        if not is_taught and not score.on_failure and self.reward.failure_value is not None:
            return self.reward.failure_value
        return FAILED_SCORE, score.error

    def _sample(
        self, group: PendingGroup, index: int, reward: float, teacher: tuple[str, NamedRewardConfig] | None
    ) -> Sample:
        """Raises ValueError where a logprob is not finite, a reward is out of range, or a prompt is empty."""
        trajectory, weight = group.trajectories[index], 0.0
        if trajectory.session:
            weight = self.config.turn_reward_weight(trajectory.data_source, trajectory.source)
        sample = make_sample(trajectory, weight)
        if teacher is not None:
            logprobs_A = group.scores[index].teacher_logprobs
            assert logprobs_A is not None, "`_reward` leaves out what has none"
            sample = with_teaching(sample, teacher[0], logprobs_A, teacher[1].weight)
        for one in (reward, *(turn.reward for turn in sample.turns)):
            # In this form NaN is refused too.
            if not abs(one) <= MAX_REWARD:
                raise ValueError(f"trajectory {trajectory.key}: reward {one} is beyond {MAX_REWARD:g}")
        if not self.algorithm.mask_truncated:
            return replace(sample, reward=reward)
        if trajectory.finish == "length":
            # It has no gradient any more, but stays in the group's mean and counts as a sequence.
            return replace(sample, mask=np.zeros_like(sample.mask), reward=reward)
        return replace(sample, mask=mask_of_whole_turns(trajectory), reward=reward)

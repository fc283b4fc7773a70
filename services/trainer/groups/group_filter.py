"""From a complete group to training samples, or to the reason why it is replaced.

Every group has exactly one outcome: trained, with the samples that were left out named one by one, or
replaced. Nothing is left out silently, and nothing too old is ever trained on.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from common.config import RunConfig
from common.wire.messages import Score, ScoreStatus, Trajectory
from services.trainer.groups.samples import Prepared, PreparedTokens, Sample

STALE, ZERO_VARIANCE, FEW_SCORES, FAILED_SCORE = "stale", "zero_variance", "too_few_scores", "failed_score"
BAD_NUMBERS = "bad_numbers"

MAX_REWARD = 1e30
"""Beyond this, sums and squares of rewards could overflow; no reward means such a number."""


@dataclass(slots=True)
class CompleteGroup:
    """All trajectories of a ticket with all their scores, by index."""

    ticket: int
    step: int
    trajectories: dict[int, Trajectory]
    scores: dict[int, Score]
    prepared: Prepared | None = None
    queued_s: Mapping[int, float] = field(default_factory=dict)
    """How long each trajectory waited for its reward, by the clock of Redis; empty where not known."""
    is_ahead: bool = False
    """Whether a token had come before the version that it names was committed: it is of a lost history."""

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
    """A group with its samples, and what was left out of it: (index, reason)."""

    ticket: int
    samples: list[Sample]
    rewards: list[float]
    left_out: list[tuple[int, str]] = field(default_factory=list)
    source: CompleteGroup | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a group cannot be trained; a fresh ticket takes its place."""

    ticket: int
    reason: str
    detail: str = ""


class Judge:
    """Decides what becomes of complete groups; the same group always has the same outcome."""

    def __init__(self, config: RunConfig) -> None:
        self.reward, self.trainer = config.reward, config.trainer
        self.algorithm = config.trainer.algorithm

    def judge(self, group: CompleteGroup, step: int) -> TrainableGroup | Refusal:
        """Prove the staleness bound for `step`, apply the failure policy, make samples.

        Their advantages come later, from all of them together (`Advantages.assign`).
        """
        if step - group.min_version > self.trainer.max_staleness:
            detail = f"version {group.min_version} at step {step}, max_staleness {self.trainer.max_staleness}"
            return Refusal(group.ticket, STALE, detail)
        if group.is_ahead or group.max_version > step:
            detail = f"version {group.max_version} at step {step}, which did not exist yet when it was named"
            return Refusal(group.ticket, STALE, detail)
        rewards, left_out = self._rewards(group.scores)
        failed = [index for index, reason in left_out if reason == FAILED_SCORE]
        for index in failed:
            # A reward of its own policy says so in the score; the others leave it to the run's.
            if (group.scores[index].on_failure or self.reward.on_failure) == "drop_group":
                return Refusal(group.ticket, FAILED_SCORE, group.scores[index].error)
        if len(rewards) < self.reward.min_group_size:
            reasons = {score.error for score in group.scores.values() if score.error}
            detail = f"{len(rewards)} of {len(group.scores)} scored. {' '.join(sorted(reasons)[:1])}"
            return Refusal(group.ticket, FEW_SCORES, detail)
        if self.algorithm.filter_zero_variance and len(set(rewards.values())) == 1:
            return Refusal(group.ticket, ZERO_VARIANCE, f"every reward is {next(iter(rewards.values()))}")
        try:
            samples = [self._sample(group, index, reward) for index, reward in rewards.items()]
        except ValueError as error:
            return Refusal(group.ticket, BAD_NUMBERS, str(error))
        return TrainableGroup(group.ticket, samples, list(rewards.values()), left_out, group)

    def _rewards(self, scores: Mapping[int, Score]) -> tuple[dict[int, float], list[tuple[int, str]]]:
        """Reward of each usable sample by index, and the indices left out, with the reason."""
        rewards: dict[int, float] = {}
        left_out: list[tuple[int, str]] = []
        for index in sorted(scores):
            score = scores[index]
            if score.status is ScoreStatus.OK and score.value is not None:
                rewards[index] = score.value
            elif not score.on_failure and self.reward.failure_value is not None:
                rewards[index] = self.reward.failure_value
            else:
                left_out.append((index, FAILED_SCORE))
        return rewards, left_out

    def _sample(self, group: CompleteGroup, index: int, reward: float) -> Sample:
        """One sample with what was prepared of it.

        Raises:
            ValueError: a logprob is not finite, the reward is out of range, or the prompt is empty.
        """
        trajectory = group.trajectories[index]
        if not abs(reward) <= MAX_REWARD:
            raise ValueError(f"trajectory {trajectory.key}: reward {reward} is beyond {MAX_REWARD:g}")
        mask = trajectory.mask
        if self.algorithm.mask_truncated and trajectory.finish == "length":
            mask = np.zeros_like(mask)
        tokens = group.prepared.tokens.get(index, PreparedTokens()) if group.prepared else PreparedTokens()
        return replace(
            unscored_sample(trajectory),
            mask=mask,
            reward=reward,
            proximal_logprobs=tokens.proximal_logprobs,
            reference_logprobs=tokens.reference_logprobs,
            values=tokens.values,
        )


def unscored_sample(trajectory: Trajectory) -> Sample:
    """The tokens of a trajectory, for what does not depend on its reward.

    Raises:
        ValueError: a logprob is not finite, or the prompt is empty.
    """
    return Sample(
        key=trajectory.key,
        prompt_ids=trajectory.prompt_ids,
        completion_ids=trajectory.completion_ids,
        rollout_logprobs=trajectory.logprobs,
        mask=trajectory.mask,
        reward=0.0,
    )

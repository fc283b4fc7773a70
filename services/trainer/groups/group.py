"""A group: what has arrived for a ticket, and what is trained of it. Records and samples stay together in one
object on the way to the optimizer."""

from dataclasses import dataclass, field

import numpy as np

from tidemill.common.streams import id_order
from tidemill.common.streams.recorded_group import RecordedGroup
from tidemill.common.wire.messages import Ticket, Trajectory, fault_of
from tidemill.services.trainer.groups.sample import Sample, make_sample

UNKNOWN_VERSION = 2**63
"""Greater than every version, so that the least of it and a version is that version."""


@dataclass(slots=True)
class Group(RecordedGroup):
    """A ticket that is outstanding, or that is in a step that is trained again.

    Example: of four trajectories, index 2 has no score and index 0 is greedy: `arrived` has 0, 1, 2 and 3,
    `samples` those of 1 and 3, `left_out` is [(2, "failed_score"), (0, "greedy_baseline")], `baseline` that
    of 0.
    """

    ticket_min_version: int = 0
    started_version: int = -1
    """The version that the worker had when it began the group; -1: not known."""
    oldest_sampled: int = UNKNOWN_VERSION
    """Oldest weight version among the tokens that have arrived."""
    is_ahead: bool = False
    """Whether a token arrived before its version was committed: that version is of a lost history."""
    is_taken: bool = False
    """Whether the step in progress trains on it."""
    arrived: dict[int, Sample] = field(default_factory=dict)
    """A sample of each trajectory whose numbers can be trained, by index."""
    precomputed_for: int = -1
    """The step for which the policy has filled columns of these samples; -1: none."""
    samples: list[Sample] = field(default_factory=list)
    """The samples that are trained, by index; empty until the group has passed the filter."""
    left_out: list[tuple[int, str]] = field(default_factory=list)
    """The samples that are not trained: (index, reason)."""
    baseline: Sample | None = None
    """The greedy sample that the others are compared with, where the advantage needs one."""

    @classmethod
    def of(cls, ticket: Ticket | Trajectory) -> "Group":
        """An empty group for a ticket that was issued just now, or for a demonstration."""
        return cls(
            ticket.ticket,
            ticket.step,
            group_size=ticket.group_size,
            ticket_min_version=ticket.min_version,
        )

    def sample_at(self, index: int) -> Sample:
        """The sample of the trajectory at this index; it is made once.

        Raises:
            ValueError: a logprob is not finite, or a prompt is empty.
        """
        sample = self.arrived.get(index)
        if sample is None:
            sample = make_sample(self.trajectories[index])
            self.arrived[index] = sample
        return sample

    def make_samples(self) -> dict[int, Sample]:
        """Samples of all trajectories whose numbers can be trained, by index and in its order."""
        # By index and not by arrival: which samples share a forward pass decides how they are rounded.
        samples = {}
        for index in sorted(self.trajectories):
            try:
                samples[index] = self.sample_at(index)
            except ValueError:
                continue  # the filter leaves it out, or refuses the group
        return samples

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
        queued_s = {}
        for index, entry_id in self.score_ids.items():
            if index not in self.trajectory_ids:
                continue
            published_ms = id_order(self.trajectory_ids[index])[0]
            scored_ms = id_order(entry_id)[0]
            until_score_s = (scored_ms - published_ms) / 1000
            queued_s[index] = max(0.0, until_score_s - self.scores[index].latency_s)
        return queued_s

    @property
    def rewards(self) -> list[float]:
        """Rewards of its samples, before any shaping; none for a demonstration."""
        return [] if self.is_demonstration else [sample.reward for sample in self.samples]

    @property
    def sampled(self) -> list[Trajectory]:
        """All completions that were sampled for it, trained or not, but no failed and no greedy one, and
        none for a demonstration."""
        if self.is_demonstration:
            return []
        trajectories = self.trajectories.values()
        return [sample for sample in trajectories if not sample.is_greedy and not fault_of(sample)]

    def trained_versions(self) -> list[dict[int, int]]:
        """For each sample, how many of its trained tokens each version produced, the oldest version first; no
        version has produced a demonstration. Of two tokens of version 7 and three of version 8: {7: 2, 8: 3}.
        """
        if self.is_demonstration:
            return []
        versions: list[dict[int, int]] = []
        for sample in self.samples:
            trajectory = self.trajectories[sample.key[1]]
            if not sample.num_trained:
                versions.append({})
            elif trajectory.min_version == trajectory.max_version:
                versions.append({trajectory.min_version: sample.num_trained})
            else:
                versions_T = trajectory.token_versions()
                numbers, counts = np.unique(versions_T[sample.mask], return_counts=True)
                versions.append(dict(zip(numbers.tolist(), counts.tolist(), strict=True)))
        return versions

    def forget(self) -> None:
        """Drop everything that has arrived, to read it again."""
        for records in (self.trajectories, self.scores, self.trajectory_ids, self.score_ids):
            records.clear()
        self.other_scores.clear()
        # A new dictionary: the policy may be computing for the samples of the old one.
        self.arrived = {}
        self.precomputed_for = -1
        self.started_version = -1
        self.oldest_sampled = UNKNOWN_VERSION
        self.is_ahead = False
